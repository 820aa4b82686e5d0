"""What front ends and workers say to one another goes through their real codecs, over ways that
lose, double, swap, cut and change frames (F07): a line ends at its first fault, whoever was served
over it is served again, and no token differs.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from headrace.adapters.frames import FrameReader, FrameWriter, direction_key
from headrace.cluster import wire
from headrace.core.base.errors import TransferError
from headrace.core.base.events import Reject
from headrace.core.base.request import SeqSpec
from headrace.core.base.worker import Role
from headrace.core.router.events import Resync, WorkerKv, WorkerKvSnapshot, WorkerRole
from headrace.core.router.front_events import WorkerSaid
from sim.test_lost_workers import SPLIT, check_outputs, requests
from support.cluster_parts import Gone, Line
from support.cluster_world import ClusterWorld
from support.seeds import FEW_AND_A_THOUSAND
from support.world_turns import Away, turns

SPOILT = 0.02  # of all frames
FATES = ("lost", "doubled", "swapped", "cut", "changed")
MIXED = (Role.MIXED,) * 3


class Way(deque[Any]):
    """One direction of a line. Each message is a frame, which may be spoilt, and what is heard is
    what the other end makes of it. Beats follow, so that no fault is the last thing that comes.
    """

    def __init__(
        self,
        rng: Random,
        to_wire: Callable[[Any], Any],
        hear: Callable[[bytes], Any],
        beat: Any,
    ) -> None:
        super().__init__()
        key = direction_key(rng.randbytes(32), "one way")
        self._rng, self._to_wire, self._hear, self._beat = rng, to_wire, hear, beat
        self._writer, self._reader = FrameWriter(key), FrameReader(key)
        self.fate = ""  # of the frame that has ended it

    def append(self, message: Any) -> None:
        if isinstance(message, Gone):
            super().append(message)  # no message, but the end of the stream
            return
        if self.fate:
            return
        said = self._to_wire(message)
        frame = self._writer.frame(wire.encode(said))
        if self._rng.random() >= SPOILT:
            assert self._take(frame) == [said]
            super().append(message)
            return
        self.fate = self._rng.choice(FATES)
        heard = self._spoilt(frame)
        assert heard == ([said] if self.fate == "doubled" else [])
        if heard:
            super().append(message)

    def _spoilt(self, frame: bytes) -> list[Any]:
        """What is heard until the line is refused, which it has to be."""
        beat = self._writer.frame(wire.encode(self._beat))
        rng, changed = self._rng, bytearray(frame)
        changed[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        parts = {
            "lost": [beat],
            "doubled": [frame, frame],
            "swapped": [beat, frame],
            "cut": [frame[: rng.randrange(len(frame))], beat],
            "changed": [bytes(changed), beat],
        }[self.fate]
        heard: list[Any] = []
        with pytest.raises(TransferError):  # noqa: PT012
            for part in parts:
                heard += self._take(part)
            while True:  # it waits for more than has come, as for a length that was changed
                heard += self._take(self._writer.frame(bytes(1 << 16)))
        return heard

    def _take(self, data: bytes) -> list[Any]:
        return [self._hear(payload) for payload in self._reader.feed(data)]


def to_worker(message: Any) -> Any:
    return wire.SendSnapshot() if isinstance(message, Resync) else message


def to_front(message: Any) -> Any:
    match message:
        case WorkerSaid(words=words):
            return wire.Turn(words=words)
        case WorkerKv(first_seq_no=kv_no, changes=kv):
            return wire.Turn(kv_no=kv_no, kv=kv)
        case WorkerKvSnapshot(seq_no=kv_no, names=names):
            return wire.Snapshot(kv_no, names)
        case WorkerRole(role=role):
            return wire.RoleIs(role)
        case _:
            raise AssertionError(message)


class SpoiltLines:
    """A world whose only front end hangs up on lines that are spoilt; their workers come again."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = Random(seed)
        self.world = ClusterWorld(seed, max_migrations=10_000, **settings)
        self.fates: list[str] = []
        self._away = Away(self.world, self.rng)
        for worker in self.world.workers:
            self._spoil(worker.lines[0])

    def _spoil(self, line: Line) -> None:
        inward = Way(self.rng, to_worker, wire.decode_to_worker, wire.Renew())
        outward = Way(self.rng, to_front, wire.decode_from_worker, wire.Beat())
        for message in line.to_worker:
            inward.append(message)
        for word in line.to_front:
            outward.append(word)
        line.to_worker, line.to_front = inward, outward

    def run(self, asked: Iterable[tuple[SeqSpec, ...]]) -> None:
        world, rng = self.world, self.rng
        for _ in turns(world, rng, asked):
            self._hang_up()
            for line in self._away.come_back(0.05):
                self._spoil(line)
        self._away.all_come_back()
        for line in self._lines:
            self._mend(line)
        world.run()

    @property
    def _lines(self) -> list[Line]:
        return [line for worker in self.world.workers for line in worker.lines]

    def _hang_up(self) -> None:
        for worker in self.world.workers:
            for line in worker.lines:
                ways = line.to_worker, line.to_front
                fates = [way.fate for way in ways if isinstance(way, Way) and way.fate]
                if fates and line is worker.lines[-1] and self._away.send(worker):
                    self.fates += fates

    def _mend(self, line: Line) -> None:
        """Nothing is spoilt from here on, so that the audit's own request is sent once."""
        line.to_worker, line.to_front = deque(line.to_worker), deque(line.to_front)


@pytest.mark.parametrize("roles", [MIXED, SPLIT], ids=["mixed", "split"])
@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_spoilt_frames_end_a_line_and_no_stream(seeds: range, roles: tuple[Role, ...]) -> None:
    fates: list[str] = []
    num_migrations = 0
    for seed in seeds:
        spoilt = SpoiltLines(seed, roles=roles, copy_failure_rate=0.05)
        spoilt.run(requests(seed % 10))
        check_outputs(spoilt.world, seed)
        assert not any(isinstance(end, Reject) for end in spoilt.world.ends.values())
        fates += spoilt.fates
        num_migrations += spoilt.world.front.num_migrations
    assert {*fates} == {*FATES}
    assert len(fates) > 5 * len(seeds)
    assert num_migrations > len(seeds)
