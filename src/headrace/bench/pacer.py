"""An engine that computes nothing: it streams events at a steady pace, each with the moment at
which it was sent, so that whoever reads them knows how long they took.

    python -m headrace.bench.pacer PORT

The first event says when the request was here. Moments are those of the machine's monotonic clock.
"""

import asyncio
import sys
import time

MODEL = "pacer"
PACE_S = 0.1  # ten tokens a second
NUM_EVENTS = 50

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "
_STREAM = _HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"%s","object":"model"}]}' % MODEL.encode()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: requests one after another, until the other side closes it."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                await _stream(writer, time.monotonic_ns())
            else:
                body = _MODELS if b"/v1/models" in head else b"{}"
                writer.write(
                    _HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                )
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, arrived_ns: int) -> None:
    loop = asyncio.get_running_loop()
    writer.write(_STREAM + _event(arrived_ns))
    due_s = loop.time()
    for _ in range(NUM_EVENTS):
        due_s += PACE_S
        await asyncio.sleep(due_s - loop.time())
        writer.write(_event(time.monotonic_ns()))
        await writer.drain()
    done = b"data: [DONE]\n\n"
    writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))


def _event(moment_ns: int) -> bytes:
    """As long as a usual chunk of a chat."""
    event = b'data: {"ns":%d,"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
    data = event % (moment_ns, b"x" * 180)
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(port: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
