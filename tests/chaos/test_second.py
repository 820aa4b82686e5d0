"""A hand-off in which a worker stops, dies or gives no block any more costs a second at most (F03).

Nobody is taken for lost here before a minute, so whoever waited for that would be noticed. What a
failure costs is what is said where it is found: the time since the last sign of life. How late the
machine wakes anybody is measured beside it, and forgiven.
"""

import os
import re
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import msgspec
import pytest

from chaos.test_faults import FAR_APART, num_ready, settle
from chaos.test_workers import Answer, answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.generate import GenerateRequest
from support.lag import Lag, measured_lag
from support.remote_worker import listening, remote_worker

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

NUM_BLOCKS = 8  # of the prompt, each computed by a step of its own
SILENCE_S = 60.0
# The worker stops, dies or falls asleep before it does something for so many times.
_BLOW = """
import os, signal, time
fate, left = FATE, [AT]
def blow():
    left[0] -= 1
    if not left[0]:
        # A signal to a process may find another thread first, and this one runs on for a moment.
        if fate:
            os.kill(os.getpid(), fate)
        time.sleep(0.3 if fate else 3600)
"""
AT_A_STEP = """
from headrace.live.device import Device
start = Device._start_step
def start_step(self, plan):
    blow()
    start(self, plan)
Device._start_step = start_step
"""
AT_A_BLOCK = """
from headrace.adapters.movers.tcp import BlockServer
lend = BlockServer._lend_one
def lend_one(self, line, name):
    blow()
    return lend(self, line, name)
BlockServer._lend_one = lend_one
"""
BEHIND_A_BLOCK = """
from headrace.adapters.movers.tcp import BlockServer
lend = BlockServer._lend_one
def lend_one(self, line, name):
    is_lent = lend(self, line, name)
    blow()
    return is_lent
BlockServer._lend_one = lend_one
"""
# The first of several that is handed a request; FILE says that there was one.
AT_A_REQUEST = """
import os, signal, time
from contextlib import suppress
from headrace.cluster.session import Session
submit = Session.submit
def stop_first(self, seqs, sent_ns):
    with suppress(FileExistsError):
        os.close(os.open(FILE, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
    submit(self, seqs, sent_ns)
Session.submit = stop_first
"""
# The first of several that has computed a step, of which it has said that it begins.
AFTER_A_STEP = """
import os, signal, time
from contextlib import suppress
from headrace.live.device import Device
start = Device._start_step
def start_step(self, plan):
    told = self._on_step
    def stop_first(*words):
        time.sleep(0.1)  # what it says of having begun is on its way meanwhile
        with suppress(FileExistsError):
            os.close(os.open(FILE, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.3)
        told(*words)
    self._on_step = stop_first
    start(self, plan)
    self._on_step = told
Device._start_step = start_step
"""
# The first of several that copies a block: before the one of this number.
AT_A_COPY = """
import os, time
from contextlib import suppress
from headrace.adapters.movers.tcp import BlockStream
take, left = BlockStream.receive_into, [AT]
def receive_into(self, view):
    left[0] -= 1
    if not left[0]:
        with suppress(FileExistsError):
            os.close(os.open(FILE, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), FATE)
            time.sleep(0.3)  # other threads may run on for a moment
    return take(self, view)
BlockStream.receive_into = receive_into
"""
LEASE_S = 10.0
ASLEEP = 0


def blow(place: str, at: int, fate: int) -> str:
    return _BLOW.replace("FATE", str(int(fate))).replace("AT]", f"{at}]") + place


MOMENTS = [
    pytest.param(AT_A_STEP, 1, id="before anything is computed"),
    pytest.param(AT_A_STEP, NUM_BLOCKS // 2, id="between two steps"),
    pytest.param(AT_A_BLOCK, 1, id="before the first block"),
    pytest.param(AT_A_BLOCK, NUM_BLOCKS // 2, id="before one in the middle"),
    pytest.param(AT_A_BLOCK, NUM_BLOCKS, id="before the last block"),
    pytest.param(BEHIND_A_BLOCK, NUM_BLOCKS, id="after the last block"),
]


@pytest.fixture
def config(tmp_path: Path, port: int) -> Config:
    cluster = listening(
        tmp_path,
        port,
        silence_timeout_s=SILENCE_S,
        handoff="always",
        canary=False,
    )
    return replace(
        tiny_config(tmp_path), cluster=cluster, scheduler=SchedulerConfig(step_tokens=16)
    )


def asked() -> list[GenerateRequest]:
    (one,) = requests(1)
    prompt = [(3 * place + place // 16) % 64 for place in range(16 * NUM_BLOCKS + 1)]
    params = msgspec.structs.replace(one.params, max_tokens=30)
    return [replace(one, prompt_tokens=prompt, params=params)]


def booted(config: Config, stack: ExitStack, num_workers: int) -> BootedCluster:
    cluster = boot_cluster(config)
    stack.callback(cluster.close)
    wait_until(lambda: num_ready(cluster) == num_workers)
    return cluster


def answered(cluster: BootedCluster, wanted: list[Answer]) -> Lag:
    with measured_lag() as lag:
        begin_s = time.monotonic()
        assert answers(cluster.text_engine, asked()) == wanted
        assert time.monotonic() - begin_s < SILENCE_S / 2
    return lag


def costs(text: str) -> list[float]:
    """Of each failure, by whoever has found it."""
    found = re.findall(r"(?:has said nothing|has come) for ([0-9.]+) s", text)
    return [float(seconds) for seconds in found]


def last_words(process: Popen[str]) -> str:
    process.kill()
    assert process.stderr is not None
    return process.stderr.read()


@pytest.mark.parametrize(("place", "at"), MOMENTS)
@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_prefill_worker_goes_at_any_moment(
    config: Config,
    port: int,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    place: str,
    at: int,
    fate: signal.Signals,
) -> None:
    wanted = undisturbed(config, asked())
    hook = FAR_APART + blow(place, at, fate)
    lender = stack.enter_context(remote_worker(port, role="prefill", before=hook))
    borrower = stack.enter_context(remote_worker(port, role="decode", before=FAR_APART))
    cluster = booted(config, stack, 2)
    lag = answered(cluster, wanted)
    if fate is signal.SIGSTOP:
        wait_until(lambda: cluster.engine.stats().num_recalls > 0 or place is not AT_A_STEP)
        os.kill(lender.pid, signal.SIGCONT)
    else:
        assert lender.wait(30) == -signal.SIGKILL
        wait_until(lambda: num_ready(cluster) == 1)
    answered(cluster, wanted)
    settle(cluster)
    cluster.close()
    found = costs(caplog.text) + costs(last_words(borrower))
    assert found != [] or fate is signal.SIGKILL or place is BEHIND_A_BLOCK
    assert all(cost_s <= 1.0 + lag.forgiven_s for cost_s in found), found


@pytest.mark.parametrize("at", [1, NUM_BLOCKS // 2, NUM_BLOCKS])
def test_the_way_of_blocks_falls_silent_while_both_live(
    config: Config, port: int, stack: ExitStack, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    wanted = undisturbed(config, asked())
    hook = FAR_APART + blow(AT_A_BLOCK, at, ASLEEP)
    stack.enter_context(remote_worker(port, role="prefill", before=hook))
    borrower = stack.enter_context(remote_worker(port, role="decode", before=FAR_APART))
    cluster = booted(config, stack, 2)
    lag = answered(cluster, wanted)
    wait_until(lambda: cluster.engine.stats().num_failed_loads > 0)
    answered(cluster, wanted)
    settle(cluster)
    assert cluster.engine.stats().num_handoffs == 2
    cluster.close()
    (cost_s,) = costs(last_words(borrower))
    assert 0.7 <= cost_s <= 1.0 + lag.forgiven_s


@pytest.mark.parametrize("at", [1, NUM_BLOCKS // 2])
def test_in_shared_memory_what_was_computed_is_there(
    config: Config, port: int, stack: ExitStack, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    """Of one that has stopped; who decodes computes the rest, as it is told to."""
    config = replace(config, kv=replace(config.kv, load_timeout_s=SILENCE_S / 2))
    wanted = undisturbed(config, asked())
    hook = blow(AT_A_STEP, at, signal.SIGSTOP)
    lender = stack.enter_context(remote_worker(port, role="prefill", before=hook))
    stack.enter_context(remote_worker(port, role="decode"))
    cluster = booted(config, stack, 2)
    lag = answered(cluster, wanted)
    assert cluster.engine.stats().num_recalls == 1
    os.kill(lender.pid, signal.SIGCONT)
    answered(cluster, wanted)
    settle(cluster)
    (cost_s,) = costs(caplog.text)
    assert 0.75 <= cost_s <= 1.0 + lag.forgiven_s


@pytest.mark.parametrize("place", [AT_A_REQUEST, AFTER_A_STEP], ids=["handed", "admitted"])
def test_one_that_is_handed_a_request_stops_before_it_has_a_token(
    config: Config,
    port: int,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    place: str,
) -> None:
    wanted = undisturbed(config, asked())
    hook = FAR_APART + place.replace("FILE", repr(str(tmp_path / "stopped")))
    stack.enter_context(remote_worker(port, role="prefill", before=FAR_APART))
    both = [stack.enter_context(remote_worker(port, role="decode", before=hook)) for _ in range(2)]
    cluster = booted(config, stack, 3)
    lag = answered(cluster, wanted)
    assert cluster.engine.stats().num_recalls == 1
    for decoder in both:
        os.kill(decoder.pid, signal.SIGCONT)
    answered(cluster, wanted)
    settle(cluster)
    (cost_s,) = costs(caplog.text)
    assert 0.75 <= cost_s <= 1.0 + lag.forgiven_s


@pytest.mark.parametrize("at", [1, NUM_BLOCKS // 2, NUM_BLOCKS])
@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_one_that_copies_blocks_goes_and_they_are_not_held_for_it(
    config: Config, port: int, stack: ExitStack, tmp_path: Path, at: int, fate: signal.Signals
) -> None:
    wanted = undisturbed(config, asked())
    struck = tmp_path / "struck"
    hook = AT_A_COPY.replace("AT]", f"{at}]").replace("FATE", str(int(fate)))
    hook = FAR_APART + hook.replace("FILE", repr(str(struck)))
    stack.enter_context(remote_worker(port, role="prefill", before=FAR_APART))
    both = [stack.enter_context(remote_worker(port, role="decode", before=hook)) for _ in range(2)]
    cluster = booted(config, stack, 3)
    lag = answered(cluster, wanted)
    assert struck.exists()

    def num_lent() -> int:
        (lender,) = [one for one in cluster.engine.workers() if one.role == "prefill"]
        return 0 if lender.stats is None else lender.stats.num_lent_blocks

    wait_until(lambda: num_lent() == 0)
    assert time.time() - struck.stat().st_mtime < LEASE_S + lag.forgiven_s
    if fate is signal.SIGSTOP:
        for decoder in both:
            os.kill(decoder.pid, signal.SIGCONT)
    else:
        wait_until(lambda: num_ready(cluster) == 2)
    answered(cluster, wanted)
    settle(cluster)
