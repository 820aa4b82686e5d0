"""The backends under test: the torch reference, and native on every instruction set of this CPU."""

from typing import Any

import pytest

from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from headrace.ops.torch.backend import TorchBackend

NATIVE = [f"native-{isa}" for isa in _native.usable_isas()]


def make_backend(name: str, threads: int = 2) -> Any:
    if name == "torch":
        return TorchBackend()
    return NativeBackend(threads=threads, isa=name.removeprefix("native-"), activations="f32")


@pytest.fixture(params=["torch", *NATIVE])
def backend(request: pytest.FixtureRequest) -> Any:
    return make_backend(request.param)


@pytest.fixture(params=NATIVE)
def invariant_backend(request: pytest.FixtureRequest) -> Any:
    """A backend that claims batch invariance."""
    made = make_backend(request.param)
    assert made.batch_invariant
    return made
