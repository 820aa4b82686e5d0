"""One HTTP request and its answer: its id, what is remembered of it, and its line in the log."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol
from uuid import uuid4

import msgspec
from starlette.types import Message, Receive, Scope, Send

from headrace.core.router.decision import Decision
from headrace.server.generation import Outlet, Tally

KEY = "headrace.exchange"
# ASGI extensions of our connections:
ABORT = "headrace.abort"  # break the connection at once
PIPE = "headrace.pipe"  # the rest of a body goes straight to the connection: see Pipe
WHOLE = "headrace.whole"  # whether the request's body is here, when it is asked

CLIENT_GONE = 499  # what proxies log for a client that did not wait

_log = logging.getLogger("headrace.access")


class Pipe(Protocol):
    """The body of one answer, without a task and a queue between it and the connection."""

    on_room: Callable[[], None] | None  # called when there is room again

    @property
    def is_open(self) -> bool:
        """Whether the head has been sent, and pieces may follow in chunks."""
        ...

    def write(self, body: bytes) -> bool:
        """A piece, which is not empty. False = there is no more room: until `on_room`, whoever goes
        on fills the memory. When the client has left, it is dropped.
        """
        ...


PROBES = ("/health", "/ready")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_FIRST_DIGITS = str(uuid4())[:-12]
_numbers = count(uuid4().node)


@dataclass(slots=True)
class Exchange:
    scope: Scope
    headers: Mapping[str, str]  # by names in lower case; of several with one name the first
    request_id: str
    arrived_ns: int
    status: int = 0  # 0 = nothing sent
    is_stream: bool = False
    ignored_fields: list[str] = field(default_factory=list)
    tally: Tally | None = None
    outlet: Outlet | None = None  # of its answer, where that is a stream
    engine_ids: list[str] = field(default_factory=list)  # the engine's requests, one a prompt
    find_decision: Callable[[str], Decision | None] | None = None  # why one of these is where it is
    error: str = ""
    peer_faults: list[str] = field(default_factory=list)  # of those that were asked in its place
    is_fault: bool = False  # the error is the server's own

    @classmethod
    def begin(cls, scope: Scope) -> "Exchange":
        pairs = reversed(scope["headers"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        given = headers.get("x-request-id", "")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else _next_id()
        exchange = cls(scope, headers, request_id, time.monotonic_ns())
        scope[KEY] = exchange
        return exchange

    @staticmethod
    def of(scope: Scope) -> "Exchange":
        exchange = scope[KEY]
        if not isinstance(exchange, Exchange):
            raise TypeError("the scope carries no exchange")
        return exchange

    def sender(self, send: Send) -> Send:
        """`send`, noting the status and adding the headers that every answer has."""

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
                if self.ignored_fields:
                    headers.append((b"x-ignored-fields", ", ".join(self.ignored_fields).encode()))
                headers += self._routing()
                message = {**message, "headers": headers}
            await send(message)

        return noted

    def _decision(self) -> Decision | None:
        """On the first of its requests, as it is by now."""
        if self.find_decision is None or not self.engine_ids:
            return None
        return self.find_decision(self.engine_ids[0])

    def _routing(self) -> list[tuple[bytes, bytes]]:
        """Which worker has the first of its requests, which had its prompt, and where the reasons
        are found.
        """
        decision = self._decision()
        if decision is None:
            return []
        headers = [(b"x-headrace-worker", decision.worker.encode())]
        if decision.prefill_worker is not None:
            headers.append((b"x-headrace-prefill-worker", decision.prefill_worker.encode()))
        return [*headers, (b"x-headrace-decision", self.engine_ids[0].encode())]

    def note_error(self, error: BaseException) -> None:
        """For the log: with its cause, where there is one that the client is not told."""
        self.error = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:
            self.error += f" ({error.__cause__})"
            self.is_fault = True

    def abort(self) -> None:
        """Break the connection, unsent bytes and all; without the extension, do nothing."""
        abort = self.scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()

    @property
    def has_whole_body(self) -> bool:
        """Whether the request is here to its end; without the extension, nobody knows."""
        is_whole = self.scope.get("extensions", {}).get(WHOLE)
        return is_whole is not None and is_whole()

    @property
    def pipe(self) -> Pipe | None:
        pipe: Pipe | None = self.scope.get("extensions", {}).get(PIPE)
        return pipe

    def log(self) -> None:
        # A probe that is told "not yet" has its answer; nothing is wrong. A stream may go wrong
        # after its status has been sent.
        is_fault = self.is_fault or (self.status >= 500 and self.scope["path"] not in PROBES)
        level = logging.WARNING if is_fault else logging.INFO
        if not _log.isEnabledFor(level):
            return
        line: dict[str, Any] = {
            "event": "request",
            "id": self.request_id,
            "method": self.scope["method"],
            "path": self.scope["path"][:200],
            "status": self.status,
            "duration_ms": round((time.monotonic_ns() - self.arrived_ns) / 1e6, 3),
        }
        if self.tally is not None:
            line |= {
                "stream": self.is_stream,
                "prompt_tokens": self.tally.prompt_tokens,
                "cached_tokens": self.tally.cached_tokens,
                "completion_tokens": self.tally.completion_tokens,
                "finish": self.tally.finish_reasons,
            }
        if (decision := self._decision()) is not None:
            line["worker"] = decision.worker
            if decision.prefill_worker is not None:
                line["prefill_worker"] = decision.prefill_worker
        if self.ignored_fields:
            line["ignored_fields"] = self.ignored_fields
        if self.error:
            line["error"] = self.error
        if self.peer_faults:
            line["faults"] = self.peer_faults
        _log.log(level, "%s", msgspec.json.encode(line).decode())


def _next_id() -> str:
    """A UUID, since some engines behind a gateway refuse ids that are none: the beginning of a
    random one, and a number.
    """
    return f"{_FIRST_DIGITS}{next(_numbers) & 0xFFFF_FFFF_FFFF:012x}"


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
