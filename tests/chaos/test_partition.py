"""A worker on a machine of its own, as far as its network goes: a namespace, which is cut off.

Needs root and `ip`; the addresses exist only inside.
"""

import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.test_workers import requests, tiny_config, undisturbed
from support.namespaces import FRONT, can_make_machines, ip, run_in, two_machines

pytest.importorskip("headrace.ops.native._native")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not can_make_machines(), reason="needs root and ip(8)"),
]

SECRET = "sixteen letters!"
PORT = 7000

WORKER = """
import sys
from headrace.cluster.remote import serve_fronts
from headrace.core.base.worker import Role
serve_fronts([(sys.argv[1], 7000)], b"sixteen letters!", role=Role.MIXED, name=sys.argv[2])
"""

# The front end, in its namespace: asks all the time, and is cut off from one worker for a while.
FRONT_END = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from chaos.test_workers import answers, requests, tiny_config
from headrace.cluster.boot import boot_cluster
from headrace.core.base.events import Finish
from headrace.core.config.cluster import ClusterConfig

folder, host = Path(sys.argv[1]), sys.argv[2]
secret = folder / "secret"
secret.write_text("sixteen letters!")
cluster = ClusterConfig(
    workers=0, listen=f"{host}:7000", secret_file=str(secret), silence_timeout_s=2.0
)
booted = boot_cluster(replace(tiny_config(folder), cluster=cluster))

ends = []
booted.engine.observe(
    lambda now, event, effects: ends.extend(one for one in effects if isinstance(one, Finish))
)

def names():
    return sorted(worker.name for worker in booted.engine.workers() if worker.is_ready)

def say(**facts):
    print(json.dumps(facts), flush=True)

deadline = time.monotonic() + 60
while len(names()) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
say(names=names())
asked = requests(6)
while (word := sys.stdin.readline().strip()) != "end":
    until = time.monotonic() + float(word)
    rounds, slowest_s = 0, 0.0
    outputs = None
    while time.monotonic() < until:
        began = time.monotonic()
        outputs = [[text, str(reason)] for text, _, reason in answers(booted.text_engine, asked)]
        slowest_s = max(slowest_s, time.monotonic() - began)
        rounds += 1
    while booted.engine.stats().num_pinned_blocks and time.monotonic() < until + 30:
        time.sleep(0.05)
    booted.engine.check()
    say(names=names(), rounds=rounds, slowest_s=slowest_s, outputs=outputs,
        ends=len(ends) - 6 * rounds, pinned=booted.engine.stats().num_pinned_blocks,
        migrations=booted.engine.stats().num_migrations)
    ends.clear()
booted.close()
"""


def test_a_partition_of_ten_seconds_costs_no_answer(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    wanted = [[text, str(reason)] for text, _, reason in undisturbed(config, requests(6))]
    with two_machines() as (front, box), ExitStack() as stack:

        def start(namespace: str, *words: str, **options: object) -> "subprocess.Popen[str]":
            process = stack.enter_context(run_in(namespace, *words, **options))
            stack.callback(process.kill)
            return process

        start(front, "-c", WORKER, FRONT, "near")
        start(box, "-c", WORKER, FRONT, "far")
        end = start(
            front, "-c", FRONT_END, str(tmp_path), FRONT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert end.stdin is not None
        assert end.stdout is not None

        def hear() -> dict[str, object]:
            assert end.stdout is not None
            facts = json.loads(end.stdout.readline())
            assert isinstance(facts, dict)
            return facts

        def ask(seconds: float) -> None:
            assert end.stdin is not None
            end.stdin.write(f"{seconds}\n")
            end.stdin.flush()

        assert len(str(hear()["names"]).split(",")) == 2
        ask(12)
        time.sleep(1)
        ip("-n", box, "link", "set", "box", "down")
        facts = hear()
        assert facts["outputs"] == wanted
        assert [str(name)[:4] for name in facts["names"]] == ["near"]  # type: ignore[attr-defined]
        assert float(str(facts["slowest_s"])) < 8.0
        assert int(str(facts["migrations"])) > 0
        # What two workers have computed has one end.
        assert (facts["ends"], facts["pinned"]) == (0, 0)
        ip("-n", box, "link", "set", "box", "up")
        ask(25)  # it notices within fifteen seconds that it is not heard, and comes again
        facts = hear()
        assert facts["outputs"] == wanted
        assert len(facts["names"]) == 2  # type: ignore[arg-type]
        assert (facts["ends"], facts["pinned"]) == (0, 0)
        end.stdin.write("end\n")
        end.stdin.flush()
        assert end.wait(30) == 0
