"""What is left behind is seen: a thread and a socket of a worker, whatever a front end keeps."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from chaos.test_workers import answers, requests, tiny_config
from headrace.cluster.boot import boot_cluster
from support import leftovers
from support.http_server import running_server
from support.leftovers import Watch, nothing_left
from support.remote_worker import free_ports, listening, remote_worker

T = TypeVar("T")
# With each request that comes, something that never ends.
A_THREAD = """
import threading
kept = lambda: threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
A_LINE = """
import socket, threading
def kept():
    ours, theirs = socket.socketpair()
    theirs.close()
    wait = threading.Event().wait
    threading.Thread(target=lambda: wait(ours.fileno() * 1e3), daemon=True).start()
"""
A_FILE = """
files = []
kept = lambda: files.append(open("/dev/null"))
"""
_KEEP = """
from headrace.cluster.session import Session
submit = Session.submit
def submit_and_keep(self, seqs, sent_ns):
    kept()
    submit(self, seqs, sent_ns)
Session.submit = submit_and_keep
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.5)


@pytest.mark.parametrize(
    ("keep", "fault"),
    [
        (A_THREAD, "7 threads, not 6"),
        (A_LINE, "3 sockets, not 2"),
        (A_FILE, "1 x /dev/null"),
    ],
)
def test_of_a_worker(watch: Watch, tmp_path: Path, keep: str, fault: str) -> None:
    pytest.importorskip("headrace.ops.native._native")
    (port,) = free_ports(1)
    cluster = listening(tmp_path, port)
    with ExitStack() as stack:
        stack.callback(watch.take)  # at its end it has that as well
        worker = stack.enter_context(remote_worker(port, before=keep + _KEEP))
        booted = boot_cluster(replace(tiny_config(tmp_path), cluster=cluster))
        stack.callback(booted.close)
        answers(booted.text_engine, requests(1))
        watch.look_at_worker("box", worker.pid, 0, num_links=1)
        assert watch.take() == [f"worker box has {fault}"]


def test_of_a_front_end(watch: Watch) -> None:
    with ExitStack() as stack:
        thread_ends = threading.Event()
        stack.callback(thread_ends.set)

        def forget() -> int:
            stack.enter_context(socket.socket())
            threading.Thread(target=thread_ends.wait, name="forgotten").start()
            orphan = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: 0"]))
            stack.callback(orphan.kill)
            return orphan.pid

        pid, excess = found_after(watch, forget)
        assert (
            excess == f"this process has 1 x socket more, threads ['forgotten'], processes [{pid}]"
        )


def test_of_a_server(watch: Watch) -> None:
    def forget() -> None:
        with running_server(None, is_attached=False) as server:
            assert server.server.loop is not None
            asyncio.run_coroutine_threadsafe(asyncio.sleep(3600), server.server.loop)

    assert found_after(watch, forget)[1] == "a server has 3 tasks, not 2"


def found_after(watch: Watch, forget: Callable[[], T]) -> tuple[T, str]:
    """What it says, and what it has left."""
    try:
        with nothing_left(watch):
            said = forget()
    except AssertionError as fault:
        return said, str(fault).split("\n")[0]
    return said, ""


def test_processes_that_have_ended_are_not_looked_at() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert leftovers.is_ended(ended.pid)
        assert leftovers.excess_of_worker(ended.pid, num_links=0, most_peers=0) == ""
    assert leftovers.is_ended(ended.pid)
    assert not leftovers.is_ended(os.getpid())
