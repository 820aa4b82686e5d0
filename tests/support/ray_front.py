"""A front end over workers on Ray, in a machine of the test's own, which it asks line by line.

    python -m support.ray_front FOLDER HEAD OPTIONS < LINES

OPTIONS are settings by section. Each line is answered by one line of JSON, but `ask` by two: one
when every request has begun to answer, and one when all have ended.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from chaos.test_workers import Answer, answers, requests, tiny_config
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.base.errors import ConfigError
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, SchedulerConfig
from support.ray_machines import environment

START_S = 120.0


def config_of(folder: Path, head: str, options: Mapping[str, Any]) -> Config:
    cluster = {"on": f"ray://{head}", "on_timeout_s": 60, "restart_delay_s": 0.5}
    return replace(
        tiny_config(folder),
        cluster=ClusterConfig(**(cluster | options["cluster"])),
        autoscaler=AutoscalerConfig(**options.get("autoscaler", {})),
        scheduler=SchedulerConfig(**options.get("scheduler", {})),
    )


def outputs_of(said: list[Answer]) -> list[list[str]]:
    return [[text, str(reason)] for text, _, reason in said]


def state_of(booted: BootedCluster) -> dict[str, Any]:
    stats = booted.engine.stats()
    return {
        "ready": sorted(one.name for one in booted.engine.workers() if one.is_ready),
        "faults": [one.fault for one in booted.engine.workers()],
        "num_migrations": stats.num_migrations,
        "num_handoffs": stats.num_handoffs,
    }


def obey(booted: BootedCluster, word: str, number: int, out: TextIO) -> dict[str, Any]:
    if word == "ask":
        said = answers(
            booted.text_engine,
            requests(number),
            strike=lambda: print(json.dumps({"has_begun": True}), file=out, flush=True),
        )
        return state_of(booted) | {"outputs": outputs_of(said)}
    if word == "wait":
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            workers = booted.engine.workers()
            if len(workers) == number and all(one.is_ready for one in workers):
                break
            time.sleep(0.1)
    return state_of(booted)


def main() -> int:
    folder, head, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    try:
        booted = boot_cluster(config_of(folder, head, options))
    except ConfigError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return 2
    print(json.dumps(state_of(booted)), flush=True)
    for line in sys.stdin:
        word, number = line.split()
        print(json.dumps(obey(booted, word, int(number), sys.stdout)), flush=True)
    booted.engine.check()
    booted.close()
    return 0


class RayFront:
    """The same from the test's side."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        assert isinstance(told, dict)
        return told

    def say(self, word: str, number: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word} {number}\n")
        self.process.stdin.flush()

    def ask(self, number: int) -> dict[str, Any]:
        self.say("ask", number)
        assert self.hear() == {"has_begun": True}
        return self.hear()

    def wait(self, num_workers: int) -> dict[str, Any]:
        """Until so many are there, and all of them ready."""
        self.say("wait", num_workers)
        told = self.hear()
        assert len(told["ready"]) == num_workers, told
        return told

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@contextmanager
def ray_front(
    namespace: str, folder: Path, head: str, env: Mapping[str, str], **options: object
) -> Iterator[RayFront]:
    words = ["-m", "support.ray_front", str(folder), head, json.dumps(options)]
    with subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, *words],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(**env),
    ) as process:
        try:
            yield RayFront(process)
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
