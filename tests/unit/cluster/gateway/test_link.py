"""One connection to an engine, byte by byte: what is an answer, and who has which of it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.cluster.gateway.link import (
    BUSY_LINKS,
    MAX_HEAD_BYTES,
    Link,
    LinkError,
    Links,
    request_head,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nX-Of-Engine: Yes\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def talk(play: Callable[[Links, str], Awaitable[None]], *answers: bytes) -> int:
    """`play` over an engine that has one answer for each request, and hangs up after the last one
    and after one that ends with "!". How many connections it took.
    """
    left = list(answers)
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        try:
            while left:
                await reader.readuntil(b"\r\n\r\n")
                answer = left.pop(0)
                writer.write(answer)
                if answer.endswith(b"!"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            links = Links()
            try:
                async with asyncio.timeout(10):
                    await play(links, f"http://127.0.0.1:{port}")
            finally:
                links.close()
                while opened:
                    opened.pop().close()
                while len(asyncio.all_tasks()) > 1:  # those who serve see that nobody is left
                    await asyncio.sleep(0.001)

    asyncio.run(run())
    return num_connections


opened: list[Link] = []


async def asked(links: Links, url: str) -> Link:
    link = await links.take(url)
    opened.append(link)
    link.ask(request_head(url, "/v1/x", [(b"a", b"b")], 0), b"")
    return link


async def whole(link: Link) -> bytes:
    await link.hear_head()
    data = b""
    while piece := await link.read():
        data += piece
    return data


def test_a_request_says_where_it_goes_and_how_long_it_is() -> None:
    assert request_head("http://h:7/base", "/v1/x", [(b"a", b"\xff")], 12) == (
        b"POST /base/v1/x HTTP/1.1\r\nhost: h:7\r\na: \xff\r\ncontent-length: 12\r\n\r\n"
    )


def test_a_connection_is_used_again() -> None:
    async def play(links: Links, url: str) -> None:
        for _ in range(3):
            link = await asked(links, url)
            assert await whole(link) == b"abcd"
            assert link.status == 200
            assert (b"X-Of-Engine", b"Yes") in link.headers
            links.give_back(url, link)

    assert talk(play, HEAD + b"abcd", HEAD + b"abcd", HEAD + b"abcd") == 1


@pytest.mark.parametrize(
    "answer",
    [
        HEAD.replace(b"200 OK", b"200 OK\r\nconnection: close") + b"abcd",
        HEAD.replace(b"1.1", b"1.0") + b"abcd",
    ],
)
def test_one_that_an_engine_will_close_is_not(answer: bytes) -> None:
    async def play(links: Links, url: str) -> None:
        for _ in range(2):
            link = await asked(links, url)
            assert await whole(link) == b"abcd"
            links.give_back(url, link)

    assert talk(play, answer, HEAD + b"abcd") == 2


def test_while_more_are_in_use_one_waits_for_the_next_request() -> None:
    async def play(links: Links, url: str) -> None:
        for _ in range(BUSY_LINKS):
            await asked(links, url)
        assert links.take_waiting(url) is None  # but one is made
        for _ in range(3):
            while (link := links.take_waiting(url)) is None:
                await asyncio.sleep(0.001)
            opened.append(link)
            assert link.has_waited
            link.ask(request_head(url, "/v1/x", [], 0), b"")
            assert await whole(link) == b"abcd"
            links.give_back(url, link)

    assert BUSY_LINKS + 1 <= talk(play, *[HEAD + b"abcd"] * 100) <= BUSY_LINKS + 4


def test_few_at_a_time_are_as_many_as_are_asked() -> None:
    async def play(links: Links, url: str) -> None:
        for _ in range(BUSY_LINKS - 1):
            await asked(links, url)
        await asyncio.sleep(0.02)

    assert talk(play, *[HEAD + b"abcd"] * 100) == BUSY_LINKS - 1


def test_nor_one_whose_answer_was_not_read_to_its_end() -> None:
    async def play(links: Links, url: str) -> None:
        for _ in range(2):
            link = await asked(links, url)
            await link.hear_head()
            links.give_back(url, link)

    assert talk(play, CHUNKED + b"4\r\nabcd\r\n", CHUNKED + b"0\r\n\r\n") == 2


def test_heads_that_come_before_the_answer_are_passed_over() -> None:
    async def play(links: Links, url: str) -> None:
        link = await asked(links, url)
        assert await whole(link) == b"abcd"
        assert (link.status, len(link.headers)) == (200, 2)

    talk(play, b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + HEAD + b"abcd")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"!", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES, "no HTTP"),
        (b"HTTP/1.1 000 OK\r\ncontent-length: 0\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 600 OK\r\ncontent-length: 0\r\n\r\n", "no HTTP"),
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"1\r\na\r\n0\r\n\r\n", "no HTTP"),
        (CHUNKED + b"0\r\nx: " + b"y" * (1 << 20), "no HTTP"),
        (CHUNKED + b"1;x=" + b"y" * (1 << 20), "no HTTP"),
        (HEAD + b"ab!", "broke off"),
        (CHUNKED + b"4\r\nabcd\r\n!", "no HTTP"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            "no HTTP",
        ),
        (HEAD.replace(b"X-Of", b"Transfer-Encoding: chunked\r\nX-Of") + b"abcd", "no HTTP"),
    ],
)
def test_what_is_no_answer(answer: bytes, reason: str) -> None:
    async def play(links: Links, url: str) -> None:
        link = await asked(links, url)
        with pytest.raises(LinkError, match=reason):
            await whole(link)
        assert not link.is_reusable

    talk(play, answer)


def test_an_engine_that_says_more_than_was_asked_is_not_asked_again() -> None:
    async def play(links: Links, url: str) -> None:
        link = await asked(links, url)
        assert await whole(link) == b"abcd"
        assert not link.is_reusable

    talk(play, HEAD + b"abcd" + HEAD + b"efgh", b"never")


def test_a_body_may_end_with_its_connection() -> None:
    async def play(links: Links, url: str) -> None:
        link = await asked(links, url)
        assert await whole(link) == b"all of it!"

    talk(play, b"HTTP/1.1 200 OK\r\n\r\nall of it!")


def test_unless_it_was_given_up_before() -> None:
    async def play(links: Links, url: str) -> None:
        link = await asked(links, url)
        await link.hear_head()
        assert await link.read() == b"half"
        asyncio.get_running_loop().call_later(0.01, link.fail, "the engine is silent")
        with pytest.raises(LinkError, match="silent"):
            await link.read()

    talk(play, b"HTTP/1.1 200 OK\r\n\r\nhalf", b"never")


def test_one_that_still_has_to_send_is_not_used_again() -> None:
    async def play(links: Links, url: str) -> None:
        link = await links.take(url)
        opened.append(link)
        body = bytes(32 << 20)
        link.ask(request_head(url, "/v1/x", (), len(body)), body)
        assert await whole(link) == b"abcd"
        assert not link.is_reusable

    talk(play, HEAD.replace(b"200 OK", b"413 Too Much") + b"abcd", b"never")


def test_a_sink_that_has_no_room_is_given_nothing_until_it_has() -> None:
    async def play(links: Links, url: str) -> None:
        had: list[bytes] = []
        link = await asked(links, url)
        await link.hear_head()

        def sink(data: bytes) -> bool:
            had.append(data)
            return False

        pouring = asyncio.create_task(link.pour(sink))
        await asyncio.sleep(0)
        while not pouring.done():
            before = len(had)
            await asyncio.sleep(0.02)
            assert len(had) == before  # nothing unasked
            link.resume()
            await asyncio.sleep(0.02)
        assert sum(map(len, had)) == 3 << 20
        assert max(map(len, had)) <= 1 << 20  # and what is not taken stays outside

    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    talk(play, CHUNKED + chunk * 3 + b"0\r\n\r\n")


def test_what_came_before_anybody_took_it_is_poured_too() -> None:
    async def play(links: Links, url: str) -> None:
        had: list[bytes] = []
        link = await asked(links, url)
        await link.hear_head()
        while not link._is_paused:
            await asyncio.sleep(0.005)

        def sink(data: bytes) -> bool:
            had.append(data)
            return True

        await link.pour(sink)
        assert b"".join(had) == bytes(3 << 20)

    talk(play, CHUNKED + b"300000\r\n" + bytes(3 << 20) + b"\r\n0\r\n\r\n")


def test_whoever_is_failed_hears_why() -> None:
    async def play(links: Links, url: str) -> None:
        link = await asked(links, url)
        asyncio.get_running_loop().call_later(0.01, link.fail, "the engine is silent")
        with pytest.raises(LinkError, match="silent"):
            await link.hear_head()

    talk(play, b"HTTP/1.1 200", b"never")
