"""A prefill worker is killed while another copies from it, and the next one lends at the very same
address (F06): the copy finds that it is another one, and what it would have brought is computed.
"""

import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaos.test_faults import FAR_APART, num_ready, settle
from chaos.test_second import asked
from chaos.test_workers import Answer, answers, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.config.schema import Config, SchedulerConfig
from support.remote_worker import free_ports, listening, remote_worker

if TYPE_CHECKING:
    import subprocess

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

# A lender's port, whoever lends.
AT_PORT = """
from headrace.adapters.movers import tcp
create = tcp.socket.create_server
tcp.socket.create_server = lambda where, **options: create((where[0], PORT), **options)
"""
# The first copy waits at a moment until the test says that it goes on.
_WAIT = """
import os, time
from headrace.adapters.movers.tcp import TcpSource
def wait():
    if not os.path.exists(HELD):
        open(HELD, "w").close()
        while not os.path.exists(HELD + ".go"):
            time.sleep(0.01)
"""
BEFORE_THE_HAND_SHAKE = """
init = TcpSource.__init__
def init_late(self, *words):
    wait()
    init(self, *words)
TcpSource.__init__ = init_late
"""
BEFORE_THE_COPY = """
copy = TcpSource.copy
def copy_late(self, names, pool, block_ids, until_s):
    wait()
    return copy(self, names, pool, block_ids, time.monotonic() + 5)
TcpSource.copy = copy_late
"""


@pytest.fixture
def ports() -> list[int]:
    """Of the front end, and of whoever lends."""
    return free_ports(2)


@pytest.fixture
def config(tmp_path: Path, ports: list[int]) -> Config:
    cluster = listening(
        tmp_path,
        ports[0],
        handoff="always",
        canary=False,
    )
    return replace(
        tiny_config(tmp_path), cluster=cluster, scheduler=SchedulerConfig(step_tokens=16)
    )


@pytest.mark.parametrize("moment", [BEFORE_THE_HAND_SHAKE, BEFORE_THE_COPY])
def test_who_lends_at_the_address_of_one_that_died_is_not_taken_for_it(
    config: Config, ports: list[int], stack: ExitStack, tmp_path: Path, moment: str
) -> None:
    port, kv_port = ports
    first, other = asked(), [replace(one, salt="other") for one in asked()]
    wanted, held = undisturbed(config, first), tmp_path / "held"
    lends = FAR_APART + AT_PORT.replace("PORT", str(kv_port))
    hook = FAR_APART + (_WAIT + moment).replace("HELD", repr(str(held)))
    killed = stack.enter_context(remote_worker(port, role="prefill", before=lends))
    borrower = stack.enter_context(remote_worker(port, role="decode", before=hook))
    cluster = boot_cluster(config)
    stack.callback(cluster.close)
    wait_until(lambda: num_ready(cluster) == 2)
    got: list[Answer] = []
    asking = threading.Thread(target=lambda: got.extend(answers(cluster.text_engine, first)))
    asking.start()
    wait_until(held.exists)

    killed.kill()
    wait_until(lambda: num_ready(cluster) == 1)
    stack.enter_context(remote_worker(port, role="prefill", before=lends))
    wait_until(lambda: num_ready(cluster) == 2)
    socket.create_connection(("127.0.0.1", kv_port)).close()
    # What the one before it had in its blocks was something else.
    assert answers(cluster.text_engine, other) == wanted
    (tmp_path / "held.go").touch()
    asking.join(60)
    assert got == wanted

    assert cluster.engine.stats().num_handoffs >= 2
    settle(cluster)
    again = [replace(one, salt="again") for one in first]
    assert answers(cluster.text_engine, again) == wanted
    settle(cluster)
    check_words(cluster, borrower, moment)


def check_words(cluster: BootedCluster, borrower: "subprocess.Popen[str]", moment: str) -> None:
    """Whoever borrows has noticed, and lent blocks came from the second one all the same."""
    wait_until(lambda: cluster.engine.stats().num_failed_loads > 0)
    wait_until(lambda: cluster.engine.stats().num_hit_tokens > 0)
    cluster.close()
    borrower.kill()
    assert borrower.stderr is not None
    is_broken = "KV from another worker is computed here instead" in borrower.stderr.read()
    assert is_broken is (moment is BEFORE_THE_COPY)
