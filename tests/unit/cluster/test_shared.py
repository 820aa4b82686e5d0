"""What front ends that share a worker's engine hear of it, and what is left when one has gone."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.test_workers import tiny_config
from headrace.cluster.shared import Member, SharedEngine
from headrace.cluster.wire import Configure, FromWorker, Ready, Snapshot, Submit, Turn
from headrace.core.base.events import BlocksStored, Finish
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.live.boot import AsWorker

pytest.importorskip("headrace.ops.native._native")

PROMPT = tuple(range(1, 50))  # three full blocks


class HeardLine:
    """Keeps what a front end is told."""

    def __init__(self) -> None:
        self.words: list[FromWorker] = []

    def send(self, message: FromWorker) -> None:
        self.words.append(message)

    def cut(self) -> None:
        pass

    def turns(self) -> list[Turn]:
        return [word for word in self.words if isinstance(word, Turn)]

    def num_finished(self) -> int:
        return sum(isinstance(word, Finish) for turn in self.turns() for word in turn.words)


class Front:
    """A front end of an engine that others may have, too."""

    def __init__(self, engine: SharedEngine, asked: Configure) -> None:
        self.line = HeardLine()
        self._engine = engine
        self.member: Member = engine.enter(asked, self.line, "")  # type: ignore[arg-type]

    def submit(self, seq_id: int, max_tokens: int, *, is_leased: bool = False) -> None:
        spec = SeqSpec(
            seq_id=SeqId(seq_id),
            request_id=str(seq_id),
            prompt_tokens=PROMPT,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            is_leased=is_leased,
        )
        self.member.obey(Submit((spec,), Ns(time.monotonic_ns())))

    def leave(self) -> None:
        self._engine.leave(self.member)


def soon(is_so: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.005)


@pytest.fixture
def engine() -> Iterator[SharedEngine]:
    with closing(SharedEngine(AsWorker())) as engine:
        yield engine


@pytest.fixture
def asked(tmp_path: Path) -> Configure:
    config = tiny_config(tmp_path)
    return Configure(config=replace(config, kv=replace(config.kv, lease_s=600.0)))


def test_who_joins_hears_first_what_is_cached(engine: SharedEngine, asked: Configure) -> None:
    first = Front(engine, asked)
    first.submit(1, 2)
    soon(lambda: first.line.num_finished() == 1)
    changes = [change for turn in first.line.turns() for change in turn.kv]
    assert all(isinstance(change, BlocksStored) for change in changes)
    late = Front(engine, asked)
    soon(lambda: len(late.line.words) > 1)
    ready, snapshot = late.line.words[:2]
    assert isinstance(ready, Ready)
    assert isinstance(snapshot, Snapshot)
    assert [*snapshot.names] == [name for change in changes for name in change.names]
    assert len(snapshot.names) == 3
    assert (snapshot.kv_no, snapshot.is_last) == (len(changes), True)


def test_nothing_runs_on_for_who_has_gone(engine: SharedEngine, asked: Configure) -> None:
    """Others are served on."""
    stays, goes = Front(engine, asked), Front(engine, asked)
    stats = stays.member.worker._engine.stats
    goes.submit(2, 450)  # longer than the other one
    stays.submit(2, 400)
    soon(lambda: stats().num_running == 2)
    goes.leave()
    soon(lambda: stays.line.num_finished() == 1)
    assert stats().num_running == 0


def test_nothing_is_held_for_who_has_gone(engine: SharedEngine, asked: Configure) -> None:
    stays, goes = Front(engine, asked), Front(engine, asked)
    stats = stays.member.worker._engine.stats
    for front in (stays, goes):
        front.submit(1, 1, is_leased=True)
    soon(lambda: stays.line.num_finished() == goes.line.num_finished() == 1)
    both = stats().num_pinned_blocks
    stays.submit(2, 1)  # another turn, after which nothing runs
    soon(lambda: stays.line.num_finished() == 2 and not stats().num_running)
    assert stats().num_pinned_blocks == both > 0
    stays.leave()
    goes.leave()
    soon(lambda: stats().num_pinned_blocks == 0)
