"""Other people's engines as workers: OpenAI-compatible servers behind RouterCore.

Decides what of a request the router must know, and when an engine is given up; refuses to change a
byte of what is asked or answered. No model is loaded here.
"""
