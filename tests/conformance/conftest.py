"""The backends under test: the torch reference, and native on every instruction set of this CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.ops.torch.backend import TorchBackend

try:
    from headrace.ops.native import _native
except ModuleNotFoundError as error:
    # Only where it is not built: an extension that is there and does not load is a failure.
    _skipped = pytest.mark.skip(reason=f"the native backend is not built: {error}")
    NATIVE: list[Any] = [pytest.param("native", marks=_skipped)]
else:
    NATIVE = [f"native-{isa}" for isa in _native.usable_isas()]


def make_backend(name: str, threads: int = 2) -> Any:
    if name == "torch":
        return TorchBackend()
    from headrace.ops.native.backend import NativeBackend

    return NativeBackend(threads=threads, isa=name.removeprefix("native-"), activations="f32")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operations this small are slower where a second thread has to be woken."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=["torch", *NATIVE])
def backend(request: pytest.FixtureRequest) -> Any:
    return make_backend(request.param)


@pytest.fixture(params=NATIVE)
def invariant_backend(request: pytest.FixtureRequest) -> Any:
    """A backend that claims batch invariance."""
    made = make_backend(request.param)
    assert made.batch_invariant
    return made
