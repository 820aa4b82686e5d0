"""Publishes KV events as vLLM does: its messages, its numbers, its replay of what was missed."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

Hash = int | bytes


def stored(
    hashes: list[Hash], tokens: list[int], *, parent: Hash | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // max(1, len(hashes)),
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(*hashes: Hash, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def batch(*events: Any) -> bytes:
    """As maps of fields."""
    return msgspec.msgpack.encode({"ts": 1.5, "events": events, "data_parallel_rank": 0})


def batch_of_arrays(*events: dict[str, Any]) -> bytes:
    """As arrays, where all fields up to the last one are there."""
    return msgspec.msgpack.encode([1.5, [list(event.values()) for event in events], 0])


class KvPublisher:
    """One engine's life. `most_kept` batches can be had again; `tells_topic` with a frame more, as
    later versions send them. `most_answered` batches of an answer arrive, and then its last one, as
    where they are sent faster than they are read.
    """

    def __init__(
        self, *, most_kept: int = 10_000, tells_topic: bool = False, most_answered: int = 10_000
    ) -> None:
        self._most_answered = most_answered
        self._before: tuple[bytes, ...] = (b"kv",) if tells_topic else ()
        self.num_replays = 0
        self._pub = _open_pub("tcp://127.0.0.1:*")
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind("tcp://127.0.0.1:*")
        self.events_url = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=most_kept)
        self._next = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve_replays, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """At the same address, with nothing cached and nothing kept."""
        self._pub.context.destroy(linger=0)  # waits until the port is free
        self._kept.clear()
        self._next = 0
        self._pub = _open_pub(self.events_url)

    def send_raw(self, frames: list[bytes]) -> None:
        self._pub.send_multipart(frames)

    def await_subscriber(self) -> None:
        """What is published before is lost to it."""
        assert self._pub.poll(10_000)
        self._pub.recv()

    def publish(self, payload: bytes, *, is_lost: bool = False) -> None:
        """`is_lost`: it is kept for a replay only."""
        if not is_lost:
            self._pub.send_multipart((b"kv", self._next.to_bytes(8, "big"), payload))
        self._kept.append((self._next, payload))
        self._next += 1

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        self._pub.context.destroy(linger=0)

    def _serve_replays(self) -> None:
        while not self._is_closing.is_set():
            if not self._router.poll(20):
                continue
            client, empty, first = self._router.recv_multipart()
            asked = [one for one in list(self._kept) if one[0] >= int.from_bytes(first, "big")]
            for number, payload in (
                *asked[: self._most_answered],
                *asked[self._most_answered :][-1:],
            ):
                frames = (client, empty, *self._before, number.to_bytes(8, "big"), payload)
                self._router.send_multipart(frames)
            self._router.send_multipart((client, empty, *self._before, b"\xff" * 8, b""))
            self.num_replays += 1


def _open_pub(url: str) -> "zmq.Socket[bytes]":
    pub = zmq.Context().socket(zmq.XPUB)  # a PUB that tells who subscribes
    pub.bind(url)
    return pub


@contextmanager
def kv_publisher(**facts: Any) -> Iterator[KvPublisher]:
    publisher = KvPublisher(**facts)
    try:
        yield publisher
    finally:
        publisher.close()
