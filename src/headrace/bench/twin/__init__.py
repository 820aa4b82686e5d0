"""Live against simulated: the same requests through a real server and through the simulator.

Decides what both are offered and how they are compared; refuses to know how either of them serves.
"""
