"""Answers to clients of HTTP/1.0, which know no chunks: a body without a length ends with the
connection, as uvicorn ends it for them in any case.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app`, whose answer in this cycle goes out as it is."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        is_bounded = True

        async def send_plain(message: Message) -> None:
            nonlocal is_bounded
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_bounded = b"content-length" in names
                if not is_bounded:
                    cycle.chunked_encoding = False
            elif not is_bounded:
                # uvicorn sends no more than was announced: each piece is, just before it.
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return plain
