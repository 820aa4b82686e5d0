"""A wrong batch is refused before anything is read or written."""

from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import BlockId
from headrace.ops.interface import KvLayout, StepBatch
from support.ops_rig import batch_of, compile_rows, run

ROWS = np.eye(20, 8, dtype=np.float32)


def program_of(backend: Any) -> Any:
    return compile_rows(backend, lambda ops, x, w: x, ROWS, kv=KvLayout(1, 1, 8, 4), max_tokens=16)


WRONG = {
    "token too large": batch_of(([0, 20], 0, [0])),
    "token negative": batch_of(([-1], 0, [0])),
    "no tokens": batch_of(([], 0, [0])),
    "too many tokens": batch_of((range(17), 0, [0, 1])),
    "block too large": batch_of(([0], 0, [4])),
    "block negative": batch_of(([0], 0, [-1])),
    "table too short": batch_of(([0], 16, [0])),
    "row too large": batch_of(([0], 0, [0]), logit_rows=[1]),
    "starts disagree": StepBatch([0, 1], [0, 3], [0], [[BlockId(0)]], [0]),
    "fewer tables": StepBatch([0, 1], [0, 1, 2], [0, 0], [[BlockId(0)]], [0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches(backend: Any, name: str) -> None:
    program = program_of(backend)
    with pytest.raises(DeviceError):
        program.run(WRONG[name])
    # The next step is right.
    assert (run(program, batch_of(([3], 0, [0]))) == ROWS[3]).all()


@pytest.mark.parametrize("copy", [(4, 0, 1), (0, 4, 1), (-1, 0, 1), (0, 1, 17), (0, 1, -1)])
def test_wrong_copies(backend: Any, copy: tuple[int, int, int]) -> None:
    with pytest.raises(DeviceError):
        program_of(backend).copy_blocks([BlockCopy(BlockId(copy[0]), BlockId(copy[1]), copy[2])])
