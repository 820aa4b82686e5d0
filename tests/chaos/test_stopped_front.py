"""A server that is stopped (Ctrl-Z, then `fg`), alone or with its workers, keeps them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

SILENCE_S = 2.0
_SCRIPT = """
import json, sys
from pathlib import Path
from chaos.test_workers import answers, requests, tiny_config, undisturbed
from headrace.cluster.boot import boot_cluster

config = tiny_config(Path(sys.argv[1]), silence_timeout_s=float(sys.argv[2]))
asked = requests(6)
wanted = undisturbed(config, asked)
cluster = boot_cluster(config)
for line in sys.stdin:
    print(json.dumps("begun"), flush=True)
    is_same = answers(cluster.text_engine, asked) == wanted
    cluster.engine.check()
    print(json.dumps([is_same, [one.num_starts for one in cluster.engine.workers()]]), flush=True)
cluster.close()
"""


@pytest.mark.parametrize("stop", [os.kill, os.killpg], ids=["alone", "with its workers"])
def test_nobody_is_lost(tmp_path: Path, stop: Callable[[int, int], None]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(tmp_path), str(SILENCE_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        start_new_session=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            for _ in range(2):
                server.stdin.write("\n")
                server.stdin.flush()
                assert json.loads(server.stdout.readline()) == "begun"
                stop(server.pid, signal.SIGSTOP)
                time.sleep(2 * SILENCE_S)
                stop(server.pid, signal.SIGCONT)
                assert json.loads(server.stdout.readline()) == [True, [1, 1]]
        finally:
            os.killpg(server.pid, signal.SIGKILL)
