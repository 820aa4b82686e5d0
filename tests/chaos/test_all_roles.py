"""Workers for prompts, workers that decode and workers for both, with pools of unequal size: one
after another dies, and no byte differs.
"""

import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from chaos.test_faults import booted, num_ready, settle
from chaos.test_workers import answers, requests, tiny_config, undisturbed, wait_until
from headrace.core.config.schema import Config, SchedulerConfig
from support.remote_worker import listening, remote_worker
from support.tiny_model import BLOCK_BYTES

if TYPE_CHECKING:
    from subprocess import Popen

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

# It has a pool of so many bytes, whatever the front end says.
SMALLER = """
from dataclasses import replace
from headrace.cluster import shared
boot = shared.boot
def smaller(config, **names):
    return boot(replace(config, kv=replace(config.kv, memory_bytes=BYTES)), **names)
shared.SharedEngine.__init__.__defaults__ = (smaller,)
"""
NUM_BLOCKS = {"prefill": 48, "decode": 300, "mixed": 64}


@pytest.fixture
def config(tmp_path: Path, port: int) -> Config:
    cluster = listening(
        tmp_path,
        port,
        silence_timeout_s=2.0,
        handoff="always",
    )
    config = replace(tiny_config(tmp_path), cluster=cluster)
    router = replace(config.router, policy="kv")
    return replace(config, router=router, scheduler=SchedulerConfig(step_tokens=16))


@pytest.mark.parametrize(
    "fate", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_they_serve_together_and_any_of_them_may_go(
    config: Config, port: int, stack: ExitStack, fate: signal.Signals
) -> None:
    asked = [
        replace(one, params=msgspec.structs.replace(one.params, max_tokens=150))
        for one in requests(8)
    ]
    wanted = undisturbed(config, asked)

    def come(role: str) -> None:
        hook = SMALLER.replace("BYTES", str(NUM_BLOCKS[role] * BLOCK_BYTES))
        victims[role] = stack.enter_context(remote_worker(port, role=role, before=hook))

    victims: dict[str, Popen[str]] = {}
    for role in NUM_BLOCKS:
        come(role)
    cluster = booted(config, stack, num_workers=3)
    assert answers(cluster.text_engine, asked) == wanted

    def pools() -> dict[str, int]:
        return {one.role: one.stats.num_blocks for one in cluster.engine.workers() if one.stats}

    wait_until(lambda: pools() == NUM_BLOCKS)
    assert cluster.engine.stats().num_handoffs > 0
    settle(cluster)
    for role in NUM_BLOCKS:
        victim = victims[role]
        salted = [replace(one, salt=role) for one in asked]
        strike = partial(victim.send_signal, fate)
        assert answers(cluster.text_engine, salted, strike=strike, num_begun=3) == wanted
        wait_until(lambda: num_ready(cluster) == 2)
        come(role)
        wait_until(lambda: num_ready(cluster) == 3)
        settle(cluster)
    assert answers(cluster.text_engine, asked[:2]) == wanted[:2]
    settle(cluster)
