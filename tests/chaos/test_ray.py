"""A real Ray over two machines, as far as their networks go: its head in one namespace, its node in
another. Needs root, `ip`, and the extra [ray]; `make test-ray` brings that.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.test_workers import requests, tiny_config, undisturbed
from support.namespaces import BOX, FRONT, can_make_machines, run_in
from support.ray_machines import HEAD, commands_in, ray_machines, workers_in

pytest.importorskip("headrace.ops.native._native")
pytest.importorskip("ray", reason="needs the extra [ray]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_make_machines(), reason="needs root and ip(8)"),
]

SECRET = "sixteen letters!"

# The front end, beside the head: asks, has the node killed meanwhile, and asks again.
FRONT_END = """
import json, os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
from chaos.test_workers import answers, requests, tiny_config
from headrace.cluster.boot import boot_cluster
from headrace.core.config.cluster import ClusterConfig

folder, head, box = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
cluster = ClusterConfig(
    workers=2, on=f"ray://{head}:6379", on_timeout_s=60, secret_file=str(folder / "secret")
)
booted = boot_cluster(replace(tiny_config(folder), cluster=cluster))

def kill_node():
    for pid in subprocess.check_output(["ip", "netns", "pids", box], text=True).split():
        os.kill(int(pid), signal.SIGKILL)

def ask(strike=None):
    said = answers(booted.text_engine, requests(6), strike=strike)
    return [[text, str(reason)] for text, _, reason in said]

def say(**facts):
    print(json.dumps(facts), flush=True)

nodes = [worker.num_starts for worker in booted.engine.workers()]
say(outputs=ask(), num_starts=nodes)
assert sys.stdin.readline().strip() == "strike"
outputs = ask(kill_node)
migrations = booted.engine.stats().num_migrations
deadline = time.monotonic() + 90
while time.monotonic() < deadline and not all(w.is_ready for w in booted.engine.workers()):
    time.sleep(0.1)
num_starts = sum(worker.num_starts for worker in booted.engine.workers())
again = ask()
booted.engine.check()
say(outputs=outputs, migrations=migrations, num_starts=num_starts, again=again,
    ready=[worker.is_ready for worker in booted.engine.workers()])
sys.stdin.readline()
booted.close()
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    with ray_machines() as names:
        yield names


def test_where_there_is_no_room_the_start_says_what_was_asked(
    machines: tuple[str, str], tmp_path: Path
) -> None:
    model = tiny_config(tmp_path).model.path
    on = ["--on", f"ray://{HEAD}", "--on-timeout-s", "5", "--on-cpus", "3"]
    words = ["-m", "headrace.cli.main", "serve", model, "--port", "0", "--workers", "1", *on]
    with run_in(machines[0], *words, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "it asks for 3 free CPUs, and " in err
    for address in (FRONT, BOX):
        assert f"{address} has 2 of 2" in err


def test_a_node_dies_and_no_byte_differs(machines: tuple[str, str], tmp_path: Path) -> None:
    front, box = machines
    config = tiny_config(tmp_path)
    (tmp_path / "secret").write_text(SECRET)
    wanted = [[text, str(reason)] for text, _, reason in undisturbed(config, requests(6))]
    words = ["-c", FRONT_END, str(tmp_path), FRONT, box]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with run_in(front, *words, **pipes) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["outputs"] == wanted
            # One on each node; the secret is nowhere that others can look.
            assert (workers_in(front), workers_in(box)) == (1, 1)
            commands = [*commands_in(front).values(), *commands_in(box).values()]
            assert not any(SECRET in command for command in commands)
            process.stdin.write("strike\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            assert told["outputs"] == told["again"] == wanted
            assert told["migrations"] > 0
            assert told["ready"] == [True, True]
            assert told["num_starts"] >= 3
            assert workers_in(front) == 2
            # Nobody survives a front end that is killed.
            process.kill()
            process.wait(10)
            deadline = time.monotonic() + 60
            while workers_in(front):
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            process.kill()
