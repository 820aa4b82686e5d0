"""Batches in order, over real sockets: none twice, and missed ones had again."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import zmq
import zmq.asyncio

from headrace.cluster.gateway.kv_feed import MAX_WAITING_BYTES, KvFeed, _socket
from support.kv_publisher import KvPublisher, kv_publisher


class Heard:
    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.num_begun = 0

    def heard(self, payload: bytes) -> None:
        self.batches.append(payload)

    def began_anew(self) -> None:
        self.batches.clear()
        self.num_begun += 1


def listen(
    publisher: KvPublisher,
    play: Callable[[Heard], Awaitable[None]],
    *,
    replay: bool = True,
) -> tuple[Heard, KvFeed]:
    """`play` while a feed listens to the publisher."""
    heard = Heard()
    feed = KvFeed("e0", publisher.events_url, publisher.replay_url if replay else "", heard)

    async def run() -> None:
        running = asyncio.create_task(feed.run())
        try:
            await asyncio.to_thread(publisher.await_subscriber)
            await play(heard)
        finally:
            running.cancel()

    asyncio.run(run())
    return heard, feed


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_batches_are_heard_in_order() -> None:
    with kv_publisher() as publisher:

        async def play(heard: Heard) -> None:
            for number in range(50):
                publisher.publish(b"%d" % number)
            await until(lambda: len(heard.batches) >= 50)

        heard, feed = listen(publisher, play)
    assert heard.batches == [b"%d" % number for number in range(50)]
    assert (heard.num_begun, feed.num_gaps) == (0, 0)


@pytest.mark.parametrize("tells_topic", [False, True])
def test_what_was_before_is_had_again(tells_topic: bool) -> None:
    with kv_publisher(tells_topic=tells_topic) as publisher:
        publisher.publish(b"0")
        publisher.publish(b"1")

        async def play(heard: Heard) -> None:
            await until(lambda: len(heard.batches) == 2)
            publisher.publish(b"2")
            await until(lambda: len(heard.batches) == 3)

        heard, feed = listen(publisher, play)
    assert heard.batches == [b"0", b"1", b"2"]
    assert feed.num_gaps == 0


def test_a_gap_is_filled_before_what_follows_it() -> None:
    with kv_publisher() as publisher:

        async def play(heard: Heard) -> None:
            await until(lambda: publisher.num_replays)  # which might bring the lost ones too
            publisher.publish(b"0")
            publisher.publish(b"1", is_lost=True)
            publisher.publish(b"2", is_lost=True)
            publisher.publish(b"3")
            publisher.publish(b"4")
            await until(lambda: len(heard.batches) >= 5)

        heard, feed = listen(publisher, play)
        assert publisher.num_replays == 2  # at the begin, and for the gap
    assert heard.batches == [b"0", b"1", b"2", b"3", b"4"]
    assert feed.num_gaps == 0


def test_a_gap_that_nobody_fills_is_counted() -> None:
    for replay in (True, False):
        with kv_publisher(most_kept=1) as publisher:

            async def play(heard: Heard, publisher: KvPublisher = publisher) -> None:
                publisher.publish(b"0")
                await until(lambda: heard.batches)
                publisher.publish(b"1", is_lost=True)
                publisher.publish(b"2")
                await until(lambda: len(heard.batches) == 2)

            heard, feed = listen(publisher, play, replay=replay)
        assert heard.batches == [b"0", b"2"]
        assert feed.num_gaps == 1


def test_an_engine_that_restarts_begins_anew() -> None:
    with kv_publisher() as publisher:

        async def play(heard: Heard) -> None:
            publisher.publish(b"old 0")
            publisher.publish(b"old 1")
            await until(lambda: len(heard.batches) == 2)
            publisher.restart()
            await asyncio.to_thread(publisher.await_subscriber)
            publisher.publish(b"new 0")
            await until(lambda: heard.num_begun)
            await until(lambda: heard.batches)

        heard, _ = listen(publisher, play)
    assert heard.batches == [b"new 0"]
    assert heard.num_begun == 1


def test_messages_that_are_none_are_passed_over() -> None:
    with kv_publisher() as publisher:

        async def play(heard: Heard) -> None:
            for frames in ([b"x"], [b"", b"short", b"x"], [b"", b"\xff" * 8, b"x"], [b""] * 5):
                publisher.send_raw(frames)
            publisher.publish(b"0")
            await until(lambda: heard.batches)

        heard, feed = listen(publisher, play)
    assert heard.batches == [b"0"]
    assert feed.num_gaps == 0


async def lose_one(publisher: KvPublisher, heard: Heard) -> None:
    """The second of three batches, which is not to be had again."""
    publisher.publish(b"0")
    await until(lambda: heard.batches)
    publisher.publish(b"1", is_lost=True)
    publisher.publish(b"2")
    await until(lambda: len(heard.batches) == 2)


def test_a_replay_that_never_answers_holds_nothing_up_for_long(monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.cluster.gateway.kv_feed.REPLAY_TIMEOUT_S", 0.05)
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    silent.bind("tcp://127.0.0.1:*")
    with kv_publisher() as publisher:
        publisher.replay_url = silent.getsockopt_string(zmq.LAST_ENDPOINT)
        heard, feed = listen(publisher, partial(lose_one, publisher))
    context.destroy(linger=0)
    assert heard.batches == [b"0", b"2"]
    assert feed.num_gaps == 1


def test_a_replay_that_lost_some_on_its_way_is_asked_for_the_rest() -> None:
    with kv_publisher(most_answered=3) as publisher:
        for number in range(10):
            publisher.publish(b"%d" % number)

        async def play(heard: Heard) -> None:
            await until(lambda: len(heard.batches) >= 10)

        heard, feed = listen(publisher, play)
    assert heard.batches == [b"%d" % number for number in range(10)]
    assert feed.num_gaps == 0
    assert publisher.num_replays == 3  # 0-2, 3-5, 6-8 with the last one


def test_a_replay_that_trickles_for_ever_holds_nothing_up_for_long(monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.cluster.gateway.kv_feed.MAX_REPLAY_S", 0.1)
    context = zmq.Context()
    slow = context.socket(zmq.ROUTER)
    slow.bind("tcp://127.0.0.1:*")
    is_over = threading.Event()

    def trickle() -> None:
        """A batch that was heard before, again and again."""
        clients = set[bytes]()
        while not is_over.wait(0.005):
            while slow.poll(0):
                clients.add(slow.recv_multipart()[0])
            for client in clients:
                slow.send_multipart((client, b"", bytes(8), b"0"))

    thread = threading.Thread(target=trickle)
    thread.start()
    with kv_publisher() as publisher:
        publisher.replay_url = slow.getsockopt_string(zmq.LAST_ENDPOINT)
        heard, feed = listen(publisher, partial(lose_one, publisher))
    is_over.set()
    thread.join()
    context.destroy(linger=0)
    assert heard.batches == [b"0", b"2"]
    assert feed.num_gaps == 1


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
def test_what_waits_is_bounded_by_bytes(kind: int) -> None:
    """By messages of the largest size, since ZeroMQ counts nothing else."""
    context = zmq.asyncio.Context()
    with kv_publisher() as publisher, _socket(context, kind, publisher.events_url) as socket:
        most = int(socket.getsockopt(zmq.RCVHWM)) * int(socket.getsockopt(zmq.MAXMSGSIZE))
    context.destroy(linger=0)
    assert 0 < most <= MAX_WAITING_BYTES


def test_a_message_that_is_too_long_costs_itself_alone(monkeypatch: Any) -> None:
    """ZeroMQ ends the stream there, and does not join again."""
    monkeypatch.setattr("headrace.cluster.gateway.kv_feed.MAX_BATCH_BYTES", 1000)
    with kv_publisher() as publisher:

        async def play(heard: Heard) -> None:
            publisher.publish(b"0")
            await until(lambda: heard.batches)
            publisher.send_raw([b"", (1).to_bytes(8, "big"), bytes(1001)])
            await asyncio.to_thread(publisher.await_subscriber)
            publisher.publish(b"1")
            await until(lambda: len(heard.batches) == 2)

        heard, feed = listen(publisher, play)
    assert heard.batches == [b"0", b"1"]
    assert (heard.num_begun, feed.num_gaps) == (0, 0)
