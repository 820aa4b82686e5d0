"""The readable reference backend (CPU, CUDA).

Imports torch; nothing on the default path imports this.
"""
