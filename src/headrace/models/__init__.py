"""Architectures written once over `ops`; loaders (GGUF, safetensors); tokenizers and chat
templates.

Decides what a model file means; refuses to run code from a model folder and to know how an
operation is computed.
"""
