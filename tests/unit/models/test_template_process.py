"""The worker of a chat template: it lives as long as its owner, and is replaced when it is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from headrace.core.base.errors import ConfigError, RequestError
from headrace.models.text import template_process
from headrace.models.text.template import ChatTemplate
from headrace.models.text.template_process import Reply, TemplateProcess, WorkerLate, WorkerLost
from headrace.models.text.template_wire import Kind, Limits, frame, parsed_header

ECHO = (
    "{% if x is defined %}{{ x }}{% else %}{% for i in range(99999) %}{% for j in range(99999) %}"
)
ECHO += "{% endfor %}{% endfor %}{% endif %}"
NAMES, ENDLESS = json.dumps({"x": "text"}).encode(), b"{}"
TEXT = Reply(Kind.TEXT, "text")
LIMITS = Limits(render_s=0.5)
WAIT_S = 20.0


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    with closing(TemplateProcess(ECHO, LIMITS)) as process:
        assert process.start() == Reply(Kind.READY, "")
        yield process


def pid_of(process: TemplateProcess) -> int:
    assert process.pid is not None
    return process.pid


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_worker_answers_many_questions(process: TemplateProcess) -> None:
    pid = pid_of(process)
    assert [process.render(NAMES) for _ in range(20)] == [TEXT] * 20
    assert process.pid == pid


def test_a_late_worker_is_replaced_at_once(process: TemplateProcess) -> None:
    pid = pid_of(process)
    with pytest.raises(WorkerLate):
        process.render(ENDLESS)
    assert process.pid not in (None, pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.render(NAMES) == TEXT


def test_a_worker_that_was_ended_while_it_waited_costs_nobody_an_answer(
    process: TemplateProcess,
) -> None:
    pid = pid_of(process)
    assert process.render(NAMES) == TEXT
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process.render(NAMES) == TEXT
    assert process.pid not in (None, pid)


def test_a_worker_that_is_ended_at_work_is_replaced(process: TemplateProcess) -> None:
    assert process.render(NAMES) == TEXT
    killer = threading.Timer(0.1, os.kill, (pid_of(process), signal.SIGKILL))
    killer.start()
    with pytest.raises(WorkerLost, match="it ended with status -9"):
        process.render(ENDLESS)
    killer.join()
    assert process.render(NAMES) == TEXT


def test_signals_for_the_owner_do_not_reach_it(process: TemplateProcess) -> None:
    pid = pid_of(process)
    assert os.getsid(pid) == pid  # a terminal's signals go to its session
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert process.render(NAMES) == TEXT
    assert process.pid == pid


def test_an_interrupted_owner_gets_no_answer_of_another_question(
    process: TemplateProcess,
) -> None:
    """Ctrl-C comes while the answer is awaited, as in `headrace chat`."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            process.render(ENDLESS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.render(NAMES) == TEXT


def test_closing_ends_a_rendering_under_way() -> None:
    process = TemplateProcess(ECHO, Limits(render_s=60))
    process.start()
    pid = pid_of(process)
    faults: list[Exception] = []

    def render() -> None:
        try:
            process.render(ENDLESS)
        except WorkerLost as error:
            faults.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.1)
    process.close()
    process.close()
    thread.join(WAIT_S)
    assert len(faults) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(WorkerLost, match="closed"):
        process.render(NAMES)


def test_a_template_that_is_dropped_leaves_no_process() -> None:
    template = ChatTemplate("x", bos_token="", eos_token="")
    template.check()
    pid = pid_of(template._process)
    del template
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("names", ["", "{}"], ids=["idle", "busy"])
def test_a_worker_dies_with_its_owner(names: str) -> None:
    """Both have the same standard error; it ends when both have."""
    code = (
        "import sys, time, threading\n"
        "from headrace.models.text.template_process import TemplateProcess\n"
        "from headrace.models.text.template_wire import Limits\n"
        f"process = TemplateProcess({ECHO!r}, Limits(render_s=1))\n"
        "process.start()\n"
        "print(process.pid, flush=True)\n"
        f"names = {names!r}.encode()\n"
        "names and process.render(names)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        assert int(owner.stdout.readline()) > 0
        time.sleep(0.2)
        owner.kill()
        started = time.monotonic()
        assert owner.stderr.read() == b""
        assert time.monotonic() - started < (4.0 if names else 1.0)


# ---- workers that are not what they should be


def saying(monkeypatch: pytest.MonkeyPatch, data: bytes, then: str = "") -> TemplateProcess:
    """A process that says `data`, whatever it is asked."""
    code = f"import sys; out = sys.stdout.buffer; out.write({data!r}); out.flush(); {then}"
    monkeypatch.setattr(template_process, "_RUN", code)
    return TemplateProcess("x", Limits(start_s=5.0, render_s=0.3))


READY = frame(Kind.READY, b"")
STAY = "sys.stdin.buffer.read()"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x04",
        b"\x63" + bytes(4),  # no such kind
        frame(Kind.TEXT, b"abc")[:-1],
        frame(Kind.TEXT, b"\xff"),
        bytes((Kind.TEXT,)) + b"\xff" * 4,
        bytes((Kind.FAILED,)) + (1 << 20).to_bytes(4, "big"),
    ],
    ids=["nothing", "part", "kind", "cut", "not text", "huge", "huge error"],
)
def test_wrong_frames_are_a_lost_worker(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    with closing(saying(monkeypatch, READY + data)) as process, pytest.raises(WorkerLost):
        process.render(NAMES)
    with closing(saying(monkeypatch, data)) as process, pytest.raises(WorkerLost):
        process.start()


def test_a_worker_that_does_not_listen_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names fill the socket, which nobody empties."""
    stay = "import time; time.sleep(60)"
    with closing(saying(monkeypatch, READY, stay)) as process, pytest.raises(WorkerLate):
        process.render(bytes(1 << 22))


def test_an_answer_of_another_kind_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(saying(monkeypatch, READY + READY, STAY)) as process:
        assert process.render(NAMES).kind is Kind.READY


def test_a_source_may_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, frame(Kind.NO_MEMORY, b""), STAY).close()
    with closing(ChatTemplate("x", bos_token="", eos_token="")) as template:
        with pytest.raises(ConfigError, match="compiled: it needs more than 512 MiB of memory"):
            template.check()
        with pytest.raises(RequestError, match="more than 512 MiB of memory"):
            template.render([])


def test_without_an_interpreter_there_is_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="cannot start a process"):
        ChatTemplate("x", bos_token="", eos_token="")


def test_frames_say_their_kind_and_length() -> None:
    assert frame(Kind.TEXT, b"abc") == b"\x04\x00\x00\x00\x03abc"
    assert parsed_header(b"\x04\x00\x00\x01\x00") == (Kind.TEXT, 256)
