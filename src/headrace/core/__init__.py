"""The pure core: every decision headrace takes, as machines `handle(now, event) -> effects`.

No clock, no I/O, no tensors, no logging, no unseeded chance: what runs here also runs in the
simulator.
"""
