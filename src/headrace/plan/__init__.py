"""Capacity questions answered with the cost model and the simulator.

Decides which steps stand for a question and what presets mean; refuses to know what steps cost."""
