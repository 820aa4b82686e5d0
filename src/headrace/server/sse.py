"""Server-sent events as OpenAI frames them: `data: {json}` and an empty line, `[DONE]` once at the
end.

An error after the start is an event whose object has an `error`, and nothing follows it: a stream
without `[DONE]` is not a whole answer.
"""

from typing import Final

import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Send

from headrace.server.delivery import Delivery
from headrace.server.errors import failure_of
from headrace.server.exchange import Exchange, Pipe

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"

_KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
_encoder = msgspec.json.Encoder()

# The library would cut all streams as soon as the process is told to stop; `run` lets them finish.
AppStatus.enable_automatic_graceful_drain = False


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


class TextEvent:
    """An event of a stream that comes for each token with another text: what is the same in all of
    them is encoded once.
    """

    TEXT: Final = "\0"

    def __init__(self, chunk: msgspec.Struct) -> None:
        """`chunk` has TEXT where the texts will be."""
        self._head, self._tail = event(chunk).split(_encoder.encode(self.TEXT))

    def of(self, text: str) -> bytes:
        return self._head + _encoder.encode(text) + self._tail


def error_event(error: BaseException) -> bytes:
    return b"data: " + failure_of(error).body() + b"\n\n"


def stream_response(delivery: Delivery) -> EventSourceResponse:
    """Sends the bytes of a delivery, with a comment now and then so that proxies keep the
    connection.
    """
    response = EventSourceResponse(
        aiter(delivery),
        headers={"cache-control": "no-cache"},
        ping=KEEP_ALIVE_S,
        sep="\n",
        ping_message_factory=lambda: _KEEP_ALIVE,
    )
    del response.headers["connection"]  # says keep-alive, of one that may end here
    return response


def pipe_of(exchange: Exchange) -> Pipe | None:
    """What takes a stream's bytes without a task in between, where the client knows chunks."""
    return None if exchange.scope["http_version"] == "1.0" else exchange.pipe


async def push_stream(delivery: Delivery, pipe: Pipe, send: Send) -> None:
    """What `stream_response` sends, by a pipe."""
    response = stream_response(delivery)
    head = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **head})
    await delivery.push(pipe, comment=_KEEP_ALIVE.encode(), every_s=KEEP_ALIVE_S)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
