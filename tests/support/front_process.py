"""A front end in a process of its own, without workers, that asks what it is told to."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCRIPT = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from chaos.test_workers import answers, requests, tiny_config
from headrace.cluster.boot import boot_cluster
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig

folder, port, num_workers, handoff = Path(sys.argv[1]), *sys.argv[2:]
cluster = ClusterConfig(
    workers=0, listen=f"127.0.0.1:{port}", secret_file=str(folder / "secret"),
    silence_timeout_s=1.0, handoff=handoff,
)
config = replace(
    tiny_config(folder), cluster=cluster, router=RouterConfig(breaker_failures=1000)
)

def say(**facts):
    print(json.dumps(facts), flush=True)

booted = boot_cluster(config)
engine = booted.engine

def knows_all():
    # Also what they have cached, which those who served another front end tell a moment later.
    workers = [one for one in engine.workers() if one.is_ready and one.stats is not None]
    num_cached = sum(one.stats.num_cached_blocks for one in workers)
    num_told = engine._core._router.stats().num_replicas
    return len(workers) >= int(num_workers) and num_told >= num_cached

while not knows_all():
    time.sleep(0.02)
say(is_up=True)
for line in sys.stdin:
    asked = requests(int(line))
    got = answers(booted.text_engine, asked, strike=lambda: say(has_begun=True))
    engine.check()
    say(
        answers=repr(got),
        hits=[
            max(worker.num_hit_blocks for worker in engine.decision(one.request_id).candidates)
            for one in asked
        ],
        migrations=engine.stats().num_migrations,
        handoffs=engine.stats().num_handoffs,
    )
booted.close()
"""


class FrontProcess:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline())
        assert isinstance(facts, dict)
        return facts

    def ask(self, num: int) -> None:
        """It says when all have begun to be answered, and then the answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num}\n")
        self.process.stdin.flush()


@contextmanager
def front_process(
    folder: Path, port: int, *, num_workers: int, handoff: str = "auto"
) -> Iterator[FrontProcess]:
    """With the model and the secret that lie in this folder."""
    tests = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(folder), str(port), str(num_workers), handoff],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tests.parent / "src"), str(tests)))},
    ) as process:
        try:
            yield FrontProcess(process)
        finally:
            process.kill()
