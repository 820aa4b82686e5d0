"""The fused operations that models are written in, and the backends that run them.

Decides how an operation is computed; refuses to know which model asks and why a batch is as it is.
"""
