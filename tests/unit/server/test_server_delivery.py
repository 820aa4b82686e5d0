"""Bytes on their way to one client."""

import asyncio

import pytest

from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.base.types import Ns
from headrace.core.telemetry import ClientWait
from headrace.server import delivery as delivery_module
from headrace.server.delivery import KEEPS_UP_NS, Delivery, SlowReader
from support.deliveries import (
    Clock,
    Connection,
    Source,
    cuts,
    delivery_of,
    pushing,
    rest,
    run,
    turns,
)


def test_bytes_come_in_order_and_joined() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        source.feed(b"a", b"", b"b", None)
        await delivery.first(None)
        delivery.commit()
        while not delivery.is_done:
            await asyncio.sleep(0)
        assert [chunk async for chunk in delivery] == [b"ab"]
        assert delivery.error is None

    run(test)


def test_a_whole_answer_waits_for_the_end() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        whole = asyncio.create_task(delivery.whole())
        source.feed(b"a")
        await asyncio.sleep(0)
        assert not whole.done()
        source.feed(b"b", None)
        assert await whole == b"ab"

    run(test)


def test_an_error_before_the_beginning_is_raised() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        source.feed(RequestError("no"))
        with pytest.raises(RequestError, match="no"):
            await delivery.first(None)

    run(test)


def test_an_error_after_the_beginning_is_the_end() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        source.feed(b"a")
        await delivery.first(None)
        delivery.commit()
        source.feed(RequestError("no"))
        assert await rest(delivery) == b"a<no>"
        assert isinstance(delivery.error, RequestError)

    run(test)


def test_the_wait_for_the_first_bytes_has_a_limit() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        await delivery.first(0)
        delivery.commit()
        source.feed(b"a", None)
        assert await rest(delivery) == b"a"

    run(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_closing_ends_the_source(has_begun: bool) -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        if has_begun:
            source.feed(b"a")
            await delivery.first(None)
        await delivery.aclose()
        await delivery.aclose()
        assert delivery.is_done
        assert source.is_closed == has_begun
        assert len(asyncio.all_tasks()) == 1

    run(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_server_can_end_it_with_a_reason(has_begun: bool) -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        if has_begun:
            source.feed(b"a")
            await delivery.first(None)
        delivery.fail(OverloadError("closing", retry_after_s=1))
        if has_begun:
            delivery.commit()
            assert await rest(delivery) == b"a<closing>"
        else:
            with pytest.raises(OverloadError):
                await delivery.whole()

    run(test)


def test_a_reader_that_stalls_is_cut() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source, limit=3)
        delivery.stall_s = 0.0
        source.feed(b"ab")
        await delivery.first(None)
        delivery.commit()
        source.feed(b"cd")
        while not delivery.is_done:
            await asyncio.sleep(0)
        assert isinstance(delivery.error, SlowReader)
        assert source.is_closed
        assert cuts == ["cut"]
        assert await rest(delivery) == b""

    run(test)


def test_a_reader_that_takes_is_not_cut() -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source, limit=3)
        source.feed(*[b"abcd"] * 100, None)
        await delivery.first(None)
        delivery.commit()
        assert await rest(delivery) == b"abcd" * 100
        assert cuts == []

    run(test)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(delivery_module, "time", clock)
    return clock


async def send(delivery: Delivery, clock: Clock, *sends_ns: int) -> bytes:
    """Takes the bytes, and spends so long over each piece."""
    sent, times = b"", iter(sends_ns)
    async for chunk in delivery:
        sent += chunk
        clock.now_ns += next(times)
        for _ in range(5):  # in which the source may go on
            await asyncio.sleep(0)
    return sent


def test_a_client_that_keeps_up_has_not_been_waited_for(clock: Clock) -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        assert delivery.client_wait() is None
        source.feed(b"a", b"b", None)
        assert await send(delivery, clock, KEEPS_UP_NS - 1) == b"ab"
        clock.now_ns += 10 * KEEPS_UP_NS  # what the server does afterwards is not the client's
        assert delivery.client_wait() is None

    run(test)


def test_the_wait_for_a_client_lasts_until_the_last_bytes_have_left(clock: Clock) -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        begin = clock.now_ns = 5 * KEEPS_UP_NS
        source.feed(b"a")
        await delivery.first(None)
        sending = asyncio.create_task(send(delivery, clock, 30 * KEEPS_UP_NS, 20 * KEEPS_UP_NS))
        await asyncio.sleep(0)
        source.feed(b"b", None)
        assert await sending == b"ab"
        clock.now_ns += KEEPS_UP_NS
        assert delivery.client_wait() == ClientWait(Ns(begin), Ns(begin + 50 * KEEPS_UP_NS))

    run(test)


def test_a_client_that_has_caught_up_is_charged_from_there(clock: Clock) -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        source.feed(b"a")
        sending = asyncio.create_task(send(delivery, clock, 30 * KEEPS_UP_NS, 2 * KEEPS_UP_NS))
        for _ in range(10):
            await asyncio.sleep(0)
        begin = clock.now_ns = 100 * KEEPS_UP_NS
        source.feed(b"b", None)
        assert await sending == b"ab"
        assert delivery.client_wait() == ClientWait(Ns(begin), Ns(begin + 2 * KEEPS_UP_NS))

    run(test)


def test_a_client_that_leaves_is_charged_until_then(clock: Clock) -> None:
    async def test(source: Source) -> None:
        delivery = delivery_of(source)
        source.feed(b"a")
        chunks = aiter(delivery)
        assert await anext(chunks) == b"a"
        clock.now_ns = 9 * KEEPS_UP_NS  # and nobody comes for more
        assert delivery.client_wait() == ClientWait(Ns(0), Ns(9 * KEEPS_UP_NS))
        await delivery.aclose()

    run(test)


# ---- bytes that are pushed to a connection


def test_pushed_bytes_go_out_as_they_come() -> None:
    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=3), Connection()
        source.feed(b"a")
        await delivery.first(None)
        delivery.commit()
        task = pushing(delivery, connection)
        for text in (b"bbbb", b"cccc"):
            await turns()
            source.feed(text)
        source.feed(RequestError("no"))
        await task
        assert connection.sent == [b"a", b"bbbb", b"cccc", b"<no>"]
        assert cuts == []

    run(test)


def test_without_room_they_wait_together_and_are_charged_to_the_client(clock: Clock) -> None:
    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=100), Connection()
        task = pushing(delivery, connection)
        connection.has_room = False
        source.feed(b"a")
        await turns()  # it has been taken, and is the last that was
        begin = clock.now_ns = 7 * KEEPS_UP_NS
        source.feed(b"b", b"c", None)
        await turns()
        assert connection.sent == [b"a"]
        assert not task.done()
        clock.now_ns += 30 * KEEPS_UP_NS
        connection.drain()
        await task
        assert connection.sent == [b"a", b"bc"]
        clock.now_ns += 5 * KEEPS_UP_NS
        assert delivery.client_wait() == ClientWait(Ns(begin), Ns(begin + 30 * KEEPS_UP_NS))

    run(test)


def test_a_client_that_has_room_again_has_caught_up(clock: Clock) -> None:
    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=100), Connection()
        task = pushing(delivery, connection)
        connection.has_room = False
        for text in (b"a", b"b"):
            source.feed(text)
            await turns()
        clock.now_ns += 30 * KEEPS_UP_NS
        connection.drain()
        source.feed(b"c", None)
        await task
        assert connection.sent == [b"a", b"b", b"c"]
        assert delivery.client_wait() is None

    run(test)


def test_whoever_never_has_room_is_cut() -> None:
    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=3), Connection()
        delivery.stall_s = 0.0
        delivery.commit()
        task = pushing(delivery, connection)
        connection.has_room = False
        source.feed(b"a")
        await turns()
        source.feed(b"bcde")
        await task
        assert connection.sent == [b"a"]
        assert isinstance(delivery.error, SlowReader)
        assert cuts == ["cut"]

    run(test)


def test_a_comment_goes_out_now_and_then_where_there_is_room() -> None:
    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=3), Connection()
        task = pushing(delivery, connection, every_s=0)
        while connection.sent != [b":", b":"]:
            connection.has_room = len(connection.sent) < 1
            await asyncio.sleep(0)
        source.feed(None)
        await task
        assert connection.sent == [b":", b":"]

    run(test)
