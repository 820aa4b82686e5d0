"""Bytes that go past the source's task."""

import pytest

from headrace.server import delivery as delivery_module
from headrace.server.delivery import KEEPS_UP_NS
from support.deliveries import Clock, Connection, Source, delivery_of, pushing, run, turns


def test_an_outlet_is_open_while_bytes_would_go_out_at_once() -> None:
    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=100), Connection()
        assert not delivery.is_open  # nobody has begun to send
        source.feed(b"a")
        task = pushing(delivery, connection)
        await turns()
        assert delivery.is_open
        delivery.send(b"b")
        connection.has_room = False
        delivery.send(b"c")
        assert not delivery.is_open
        source.feed(b"d")
        await turns()
        connection.drain()
        assert delivery.is_open
        delivery.send(b"e")
        source.feed(None)
        await task
        assert connection.sent == [b"a", b"b", b"c", b"d", b"e"]
        assert not delivery.is_open

    run(test)


def test_an_outlet_is_shut_while_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(delivery_module, "time", clock)

    async def test(source: Source) -> None:
        delivery, connection = delivery_of(source, limit=100), Connection()
        source.feed(b"a")
        await delivery.first(None)
        assert not delivery.is_open
        task = pushing(delivery, connection)
        connection.has_room = False
        await turns()
        source.feed(b"b")
        await turns()
        clock.now_ns += 30 * KEEPS_UP_NS
        connection.drain()
        delivery.send(b"c")
        source.feed(None)
        await task
        assert connection.sent == [b"a", b"b", b"c"]
        assert delivery.client_wait() is None  # it has caught up

    run(test)
