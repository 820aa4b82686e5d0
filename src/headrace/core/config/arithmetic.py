"""How exactly to compute where nobody has said it: what "auto" means for a backend.

Decides what is fastest without being worse than it has to be; refuses to look at a machine.
"""

from typing import NamedTuple


class Arithmetic(NamedTuple):
    """What linear layers may round their inputs to, and what attention multiplies in."""

    activations: str
    attention: str
    why_activations: str = ""  # empty = it was asked for
    why_attention: str = ""


def choose_arithmetic(backend: str, isa: str, activations: str, attention: str) -> Arithmetic:
    """With nothing "auto" in it. `isa` is the instruction set that the native backend uses."""
    why_activations = why_attention = ""
    has_tiles = backend == "native" and isa == "amx"
    if activations == "auto":
        if backend != "native":
            activations, why_activations = "f32", f"the {backend} backend rounds nothing"
        elif has_tiles:
            activations, why_activations = "int12", "the fastest with AMX"
        else:
            activations, why_activations = "int8", "the fastest for every type of weights"
    if attention == "auto":
        if has_tiles and activations != "f32":
            attention, why_attention = "bf16", "the fastest with AMX"
        else:
            attention, why_attention = "f32", "exact, where bf16 is not faster"
    return Arithmetic(activations, attention, why_activations, why_attention)
