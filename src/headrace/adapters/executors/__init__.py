"""Executors carry out step plans: our own backends, the simulator's cost model, external engines.

Refuse to know why a plan is as it is.
"""
