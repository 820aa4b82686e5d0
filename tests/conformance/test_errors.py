"""A wrong batch is refused before anything is read or written."""

from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import BlockId
from headrace.ops.interface import AttentionSpec, KvLayout, Rope, StepBatch
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
    "no sequences": StepBatch([], [0], [], [], []),
    "an empty share": batch_of(([0, 1], 0, [0]), ([], 0, [1]), logit_rows=[0]),
    "position negative": batch_of(([0], -1, [0])),
    "position of another world": batch_of(([0], 2**31, [0])),
    "rows do not increase": batch_of(([0, 1], 0, [0]), logit_rows=[1, 0]),
    "a row twice": batch_of(([0, 1], 0, [0]), logit_rows=[1, 1]),
    "row negative": batch_of(([0], 0, [0]), logit_rows=[-1]),
    "row too large": batch_of(([0], 0, [0]), logit_rows=[1]),
    "starts disagree": StepBatch([0, 1], [0, 3], [0], [[BlockId(0)]], [0]),
    "starts begin late": StepBatch([0, 1], [1, 2], [0], [[BlockId(0)]], [0]),
    "starts go back": StepBatch(
        [0, 1], [0, 2, 1, 2], [0] * 3, [[BlockId(i)] for i in range(3)], []
    ),
    "fewer tables": StepBatch([0, 1], [0, 1, 2], [0, 0], [[BlockId(0)]], [0]),
    "fewer positions": StepBatch([0, 1], [0, 1, 2], [0], [[BlockId(0)], [BlockId(1)]], [0]),
    "no starts": StepBatch([0], [], [0], [[BlockId(0)]], [0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches(backend: Any, name: str) -> None:
    program = program_of(backend)
    with pytest.raises(DeviceError):
        program.run(WRONG[name])
    # The next step is right.
    assert (run(program, batch_of(([3], 0, [0]))) == ROWS[3]).all()


WRONG_COPIES = [(4, 0, 1), (0, 4, 1), (-1, 0, 1), (0, -1, 1), (0, 1, 17), (0, 1, 0), (0, 1, -1)]


def test_what_is_refused_changes_nothing(backend: Any) -> None:
    spec, rope = AttentionSpec(2, 2, 8, 8**-0.5), Rope((1.0, 0.5, 0.25, 0.125), True)
    rows = np.random.default_rng(0).standard_normal((20, 48)).astype(np.float32)
    programs = [
        compile_rows(
            backend,
            lambda ops, x, w: ops.attention(x, 0, spec, rope),
            rows,
            kv=KvLayout(1, 2, 8, 4),
            max_tokens=16,
        )
        for _ in range(2)
    ]
    for program in programs:
        run(program, batch_of((range(10), 0, [0])))
    spared, tried = programs
    for wrong in (
        batch_of(([12, 20], 3, [0])),
        batch_of(([12], 3, [0]), ([13], 0, [4])),
        batch_of(([12], 3, [0]), logit_rows=[1]),
    ):
        with pytest.raises(DeviceError):
            tried.run(wrong)
    for wrong_copy in WRONG_COPIES:
        copies = [(1, 0, 16), wrong_copy]
        with pytest.raises(DeviceError):
            tried.copy_blocks([BlockCopy(BlockId(src), BlockId(dst), n) for src, dst, n in copies])
    last = batch_of(([10], 10, [0]))
    assert (run(tried, last) == run(spared, last)).all()


@pytest.mark.parametrize("copy", WRONG_COPIES)
def test_wrong_copies(backend: Any, copy: tuple[int, int, int]) -> None:
    with pytest.raises(DeviceError):
        program_of(backend).copy_blocks([BlockCopy(BlockId(copy[0]), BlockId(copy[1]), copy[2])])
