"""Workers that tell their front end wrongly or not at all what they have cached (F12) and how much
they have to do (F13): it costs hits and turns, and no byte.
"""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

from chaos.test_faults import num_ready, settle
from chaos.test_workers import answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.schema import Config
from headrace.core.router.decision import Decision
from headrace.live.generate import GenerateRequest
from support.remote_worker import listening, remote_worker
from support.tiny_model import BLOCK_BYTES

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

# Changes of its cache are lost, told twice, told late and in another order, and so are snapshots of
# it, until FILE is there. Each time that it is asked for a snapshot, ASKED grows by a byte.
UNTRUE_KV = """
from pathlib import Path
from random import Random
import msgspec
from headrace.cluster import shared, wire
from headrace.cluster.worker_line import WorkerLine
rng, send, late = Random(1), WorkerLine.send, []
def tell(self, message):
    has_kv = isinstance(message, wire.Snapshot) or isinstance(message, wire.Turn) and message.kv
    if not has_kv or Path(FILE).exists():
        return send(self, message)
    changes, fate = message, rng.randrange(6)
    if isinstance(message, wire.Turn):
        send(self, msgspec.structs.replace(message, kv=()))
        changes = wire.Turn(kv_no=message.kv_no, kv=message.kv)
    if fate == 1:
        late.append(changes)
    elif fate != 0:
        send(self, changes)
    if fate == 2:
        send(self, changes)
    if fate == 3:
        while late:
            send(self, late.pop())
WorkerLine.send = tell
obey = shared.Worker.obey
def note(self, session, message):
    if isinstance(message, wire.SendSnapshot):
        with open(ASKED, "ab") as asked:
            asked.write(b".")
    obey(self, session, message)
shared.Worker.obey = note
"""
# Its load is no number, and less than nothing.
UNTRUE_LOAD = """
import msgspec
from headrace.cluster import wire
from headrace.cluster.worker_line import WorkerLine
send = WorkerLine.send
def tell(self, message):
    if isinstance(message, wire.Turn) and message.load is not None:
        load = msgspec.structs.replace(message.load, num_running=float("nan"))
        message = msgspec.structs.replace(message, load=load)
    if isinstance(message, wire.Beat) and message.stats is not None:
        stats = msgspec.structs.replace(message.stats, num_free_blocks=-1)
        message = msgspec.structs.replace(message, stats=stats)
    send(self, message)
WorkerLine.send = tell
"""
# It lives, and says nothing more about its load after a while.
NO_LOAD = """
import msgspec
from headrace.cluster import wire
from headrace.cluster.worker_line import WorkerLine
send, told = WorkerLine.send, []
def tell(self, message):
    if isinstance(message, wire.Turn):
        message = msgspec.structs.replace(message, load=None)
    if isinstance(message, wire.Beat) and message.stats is not None:
        told.append(message)
        message = message if len(told) < 4 else wire.Beat()
    send(self, message)
WorkerLine.send = tell
"""
NUM_ROUNDS = 12  # at least


@pytest.fixture
def config(tmp_path: Path, port: int) -> Config:
    config = tiny_config(tmp_path)
    return replace(
        config,
        cluster=listening(tmp_path, port, silence_timeout_s=5.0, canary=False),
        router=replace(config.router, policy="kv"),
    )


def booted(config: Config, stack: ExitStack) -> BootedCluster:
    cluster = boot_cluster(config)
    stack.callback(cluster.close)
    wait_until(lambda: num_ready(cluster) == 2)
    return cluster


def asked(num: int, num_output: int = 60) -> list[GenerateRequest]:
    """Prompts of two to five blocks."""
    return [
        replace(
            one,
            prompt_tokens=[*one.prompt_tokens] * 2,
            params=msgspec.structs.replace(one.params, max_tokens=num_output),
        )
        for one in requests(num)
    ]


def decisions(cluster: BootedCluster, num: int) -> list[Decision]:
    """On the last so many requests."""
    found = [cluster.engine.decision(f"r{index}") for index in range(num)]
    return [decision for decision in found if decision is not None]


def test_changes_of_a_cache_that_go_astray_cost_hits_and_nothing_else(
    config: Config, port: int, stack: ExitStack, tmp_path: Path
) -> None:
    """Its pool is so small that each round evicts what the one before it has left."""
    wanted = undisturbed(config, asked(8))
    small = replace(config, kv=replace(config.kv, memory_bytes=48 * BLOCK_BYTES))
    is_over, snapshots = tmp_path / "over", tmp_path / "asked"
    snapshots.touch()
    hook = UNTRUE_KV.replace("FILE", repr(str(is_over))).replace("ASKED", repr(str(snapshots)))
    for _ in range(2):
        stack.enter_context(remote_worker(port, before=hook))
    cluster = booted(small, stack)
    numbers = count()

    def has_asked_again() -> bool:
        """Both were asked, and one once more: its snapshot, or a change after it, was lost."""
        number = next(numbers)
        salted = [replace(one, salt=str(number // 2)) for one in asked(8)]
        assert answers(cluster.text_engine, salted) == wanted
        return number + 1 >= NUM_ROUNDS and snapshots.stat().st_size > 2

    wait_until(has_asked_again, within_s=60)
    settle(cluster)

    is_over.touch()
    few = [replace(one, salt="now") for one in asked(3)]

    def is_known() -> bool:
        """What it takes to be cached at the worker of its choice is all that can be."""
        assert answers(cluster.text_engine, few) == wanted[:3]
        hits = [decision.chosen.num_hit_blocks for decision in decisions(cluster, 3)]
        return hits == [len(one.prompt_tokens) // 16 for one in few]

    wait_until(is_known)
    settle(cluster)


@pytest.mark.parametrize("hook", [UNTRUE_LOAD, NO_LOAD], ids=["nonsense", "nothing"])
def test_who_tells_nonsense_about_its_load_or_nothing_is_taken_for_busy(
    config: Config, port: int, stack: ExitStack, hook: str
) -> None:
    """It gets what comes when there is nobody else."""
    wanted = undisturbed(config, asked(6))
    stack.enter_context(remote_worker(port, name="liar", before=hook))
    honest = stack.enter_context(remote_worker(port, name="honest"))
    cluster = booted(config, stack)

    def is_left_alone() -> bool:
        assert answers(cluster.text_engine, asked(6)) == wanted
        found = decisions(cluster, 6)
        reasons = [[one.reason for one in decision.filtered] for decision in found]
        names = {decision.chosen.name for decision in found}
        return (names, reasons) == ({"honest-0"}, [["silent about its load"]] * 6)

    wait_until(is_left_alone)
    assert is_left_alone()
    cluster.engine.check()
    os.kill(honest.pid, signal.SIGKILL)
    wait_until(lambda: num_ready(cluster) == 1)
    assert answers(cluster.text_engine, asked(6)) == wanted
    for decision in decisions(cluster, 6):
        assert (decision.chosen.name, decision.is_fallback) == ("liar-0", True)
    cluster.engine.check()
