"""The driver of the same machines under a virtual clock: an event heap, faults by seed.

Decides the order of simultaneous events; refuses to hold a second copy of any policy."""
