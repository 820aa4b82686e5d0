"""What a checker sees of the core's ports. Never run; `make check` reads it."""

from collections.abc import Sequence
from typing import assert_type

from headrace.core.base.errors import HeadraceError, OverloadError, RequestError
from headrace.core.base.events import EngineEffect, EngineEvent, Timer
from headrace.core.base.machine import Machine
from headrace.core.base.types import BlockId, Ns, SeqId
from headrace.core.engine.core import EngineCore


def effects_of(machine: Machine[EngineEvent, EngineEffect]) -> Sequence[EngineEffect]:
    return machine.handle(Ns(0), Timer(1))


def an_engine_is_a_machine(core: EngineCore) -> None:
    assert_type(effects_of(core), Sequence[EngineEffect])


def times_are_not_numbers(core: EngineCore) -> None:
    core.handle(0, Timer(1))  # type: ignore[arg-type]


def ids_are_not_each_other(seq_id: SeqId) -> BlockId:
    return seq_id  # type: ignore[return-value]


def errors_carry_what_to_do(error: HeadraceError) -> None:
    match error:
        case RequestError():
            assert_type(error.status_hint, int)
            assert_type(error.param, str | None)
        case OverloadError():
            assert_type(error.retry_after_s, float)
        case _:
            assert_type(error.hint, str)
