"""The process in which a chat template runs: bounded in memory, ended from outside when late.

Run by `template_process`, with one socket as standard input and output. It serves one template, one
rendering at a time, and ends with its owner: at once when it waits, else when its own alarm rings.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from headrace.models.text.template_wire import (
    HEADER_BYTES,
    MAX_ERROR_BYTES,
    Kind,
    Limits,
    frame,
    parsed_header,
    to_bytes,
    to_text,
)

if TYPE_CHECKING:
    from headrace.models.text.sandbox import Sandbox

# The owner's clock decides; the alarm is for a worker whose owner is gone.
_ALARM_GRACE_S = 1.0


def main() -> None:
    # Both reach a whole group or service at once; the owner ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    # An owner that has gone closes both directions.
    with suppress(ConnectionError):
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # there is nothing to flush, and nobody to flush it to


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    start = _received(source)
    if start is None:
        return
    given = json.loads(to_text(start))
    limits = Limits(**given["limits"])
    _bound_memory(limits.memory_bytes)
    template = _Template(limits)
    _answer(sink, partial(template.compile, given["source"]), limits.start_s)
    while (payload := _received(source)) is not None:
        _answer(sink, partial(template.render, payload), limits.render_s)


def _received(source: BinaryIO) -> bytes | None:
    """The payload of the next frame; None where the owner has gone."""
    start = source.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        return None
    _, num_bytes = parsed_header(start)
    payload = source.read(num_bytes)
    return payload if len(payload) == num_bytes else None


def _answer(sink: BinaryIO, make: Callable[[], bytes], limit_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, limit_s + _ALARM_GRACE_S)
    try:
        reply = make()
    except MemoryError:
        reply = _NO_MEMORY
    except Exception as error:
        reply = _saying(Kind.FAILED, error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    sink.write(reply)
    sink.flush()


_NO_MEMORY = frame(Kind.NO_MEMORY, b"")


def _saying(kind: Kind, error: Exception) -> bytes:
    text = str(error) or type(error).__name__
    if isinstance(line := getattr(error, "lineno", None), int):
        text = f"line {line}: {text}"
    return frame(kind, to_bytes(text[: MAX_ERROR_BYTES // 4]))


class _Template:
    """What this process serves; answers are frames."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sandbox: Sandbox | None = None

    def compile(self, source: str) -> bytes:
        # The import is the larger part of coming up; here it is within the limits.
        from headrace.models.text.sandbox import Sandbox

        self._sandbox = Sandbox(source)
        return frame(Kind.READY, b"")

    def render(self, payload: bytes) -> bytes:
        from headrace.models.text.sandbox import Refused

        if self._sandbox is None:
            raise ValueError("there is no template")
        names = json.loads(to_text(payload))
        try:
            text = self._sandbox.render(names, self._limits.max_output_chars(len(payload)))
        except Refused as refusal:
            return _saying(Kind.REFUSED, refusal)
        return frame(Kind.TEXT, to_bytes(text))


def _bound_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    # Not every system knows this limit; on those the time that a rendering has bounds its memory.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    # A core would hold what people wrote.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where memory is short, Linux ends this process before any other.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
