"""The fast CUDA backend."""
