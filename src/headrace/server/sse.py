"""Server-sent events as OpenAI frames them: `data: {json}` and an empty line, `[DONE]` once at the
end.

An error after the start is an event whose object has an `error`, and nothing follows it: a stream
without `[DONE]` is not a whole answer.
"""

import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse

from headrace.server.delivery import Delivery
from headrace.server.errors import failure_of

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()

# The library would cut all streams as soon as the process is told to stop; `run` lets them finish.
AppStatus.enable_automatic_graceful_drain = False


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


def error_event(error: BaseException) -> bytes:
    return b"data: " + failure_of(error).body() + b"\n\n"


def stream_response(delivery: Delivery) -> EventSourceResponse:
    """Sends the bytes of a delivery, with a comment now and then so that proxies keep the
    connection.
    """
    return EventSourceResponse(
        aiter(delivery),
        headers={"cache-control": "no-cache"},
        ping=KEEP_ALIVE_S,
        sep="\n",
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
    )
