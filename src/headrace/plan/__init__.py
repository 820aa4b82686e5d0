"""Capacity questions answered with the cost model and the simulator.

Refuses to know a formula that the production code does not use."""
