"""Counting what was executed, which is the same in every run, whatever else the machine does.

Decides how to count: machine instructions by valgrind, where it is installed, and Python's bytecode
instructions by its own tracing.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from headrace.bench.counted import cases
from headrace.bench.scheduler import fill, result_of
from headrace.core.base.errors import HeadraceError
from headrace.core.base.events import EngineEffect, StartStep, StepDone
from headrace.core.base.types import Ns
from headrace.core.engine.core import EngineCore
from headrace.ops.native import _native

NUM_STEPS = 32  # two blocks' worth, so that every sequence fills the same number of blocks
NUM_SEQS = (1, 32, 256)
_COUNT = re.compile(r"I\s+refs:\s+([\d,]+)")


def has_valgrind() -> bool:
    return shutil.which("valgrind") is not None


def count_instructions() -> dict[str, int]:
    """Machine instructions of one run of each case. Takes some seconds for each; HeadraceError
    where valgrind fails.
    """
    made = cases()
    base = _instructions(next(iter(made)), 0)
    return {
        name: (_instructions(name, case.num_runs) - base) // case.num_runs
        for name, case in made.items()
    }


def _instructions(case: str, num_runs: int) -> int:
    """Of a whole process. Most are Python's own start, which is the same for each case."""
    tool = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    program = (sys.executable, "-m", "headrace.bench.counted", case, str(num_runs))
    environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*tool, *program], env=environ, capture_output=True, text=True, check=False
    )
    found = _COUNT.search(done.stderr)
    if done.returncode != 0 or found is None:
        raise HeadraceError("valgrind counted nothing", case=case, said=done.stderr[-500:])
    return int(found[1].replace(",", ""))


def count_bytecodes(work: Callable[[], object]) -> int:
    """Bytecode instructions of the Python functions that `work` calls."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def count_step_bytecodes(num_seqs: int, num_steps: int = NUM_STEPS) -> int:
    """Of the host's part of a step in which `num_seqs` sequences decode one token, on average."""
    core, plan = fill(num_seqs, num_output_tokens=4 * num_steps + num_seqs)
    counts: list[int] = []
    now = 0
    while len(counts) <= num_steps:  # the first one computes what the others keep
        now += 1_000_000
        is_steady = len(plan.seqs) == plan.num_tokens == num_seqs
        effects: list[EngineEffect] = []
        step = partial(_step, core, Ns(now), StepDone(result_of(plan)), effects)
        if is_steady:
            counts.append(count_bytecodes(step))
        else:
            step()
        plan = next(effect.plan for effect in effects if isinstance(effect, StartStep))
    return sum(counts[1:]) // num_steps


def _step(core: EngineCore, now: Ns, event: StepDone, effects: list[EngineEffect]) -> None:
    effects += core.handle(now, event)


def compiler() -> str:
    """The compiler of the native extension, as it has signed it."""
    with open(_native.__file__, "rb") as file:
        found = re.search(rb"(GCC: \([^)]*\) [\d.]+|clang version [\d.]+)", file.read())
    return found[1].decode() if found else "unknown"
