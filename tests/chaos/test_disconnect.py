"""Clients that leave at any moment, many at once: nothing may be left of them."""

import asyncio
import json
import os
import random
import time
from typing import Any

import pytest

from headrace.core.config.schema import SchedulerConfig
from support.fake_engine import MODEL_NAME, FakeBooted, formula_model
from support.http_server import RunningServer, running_server

NUM_CLIENTS = 64
PATIENCE_S = 180  # for an answer beside 63 other clients, on a machine that others use too


def body_of(rng: random.Random, connection: str = "keep-alive", **fields: Any) -> bytes:
    """A request of any kind: streamed or whole, one choice or several, chat or completion."""
    common: dict[str, Any] = {
        "model": MODEL_NAME,
        "stream": rng.random() < 0.6,
        "n": rng.choice((1, 1, 2, 4)),
        "max_tokens": rng.choice((5, 50, 500)),
        **fields,
    }
    text = "a common beginning " * rng.randrange(8) + str(rng.randrange(1000))
    own: dict[str, Any]
    if rng.random() < 0.5:
        path, own = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
    else:
        path, own = "/v1/completions", {"prompt": [text] * rng.choice((1, 3))}
    body = json.dumps(common | own).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def leave(port: int, rng: random.Random) -> None:
    """Send some part of a request, read some part of its answer, go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    moment = rng.random()
    stays = moment >= 0.9
    data = body_of(rng, "close", max_tokens=40) if stays else body_of(rng)
    try:
        if moment < 0.1:
            writer.write(data[: rng.randrange(len(data))])
        else:
            writer.write(data)
        await writer.drain()
        if moment < 0.4:
            await asyncio.sleep(rng.random() * 0.02)
        elif not stays:
            await reader.read(rng.randrange(1, 20_000))
            await asyncio.sleep(rng.random() * 0.05)
        else:
            async with asyncio.timeout(PATIENCE_S):
                while await reader.read(65536):
                    if rng.random() < 0.2:
                        break
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def storm(port: int, total: int, seed: int) -> None:
    seeds = iter(range(seed, seed + total))

    async def client() -> None:
        for one in seeds:
            await leave(port, random.Random(one))

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))


async def ask(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields: dict[str, Any] = {"seed": 1, "max_tokens": 30, "stream": False, "n": 1}
    writer.write(body_of(random.Random(0), **fields))
    await reader.readuntil(b"\r\n\r\n")
    answer = json.loads(await reader.readuntil(b"}}}"))
    writer.close()
    await writer.wait_closed()
    choice = answer["choices"][0]
    return str(choice.get("text") or choice["message"]["content"])


def settle(server: RunningServer) -> None:
    limit = time.monotonic() + 20
    while True:
        stats = server.booted.engine.stats()
        held = stats.num_running, stats.num_waiting, stats.num_pinned_blocks
        connections = len(server.server.connections)
        if held == (0, 0, 0) and not connections and not server.service.num_deliveries:
            return
        assert time.monotonic() < limit, f"left over: {held}, {connections} connections"
        time.sleep(0.01)


def audit(server: RunningServer, before: tuple[int, int], right: str) -> None:
    settle(server)
    assert asyncio.run(ask(server.port)) == right
    settle(server)
    server.booted.engine.check()
    server.service.metrics.check()
    stats = server.booted.engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert holdings(server) == before


def holdings(server: RunningServer) -> tuple[int, int]:
    """Open files of the process, and tasks of the server's loop."""
    return len(os.listdir("/proc/self/fd")), server.num_tasks()


def run(booted: FakeBooted, total: int, seed: int) -> None:
    booted.executor.step_s = 0.0005
    with running_server(booted) as server:
        right = asyncio.run(ask(server.port))
        # Some things are made once, with the first stream.
        asyncio.run(storm(server.port, NUM_CLIENTS, seed=1_000_000))
        settle(server)
        before = holdings(server)
        asyncio.run(storm(server.port, total, seed))
        audit(server, before, right)


def test_clients_that_leave_leave_nothing() -> None:
    with formula_model(num_blocks=4096) as booted:
        run(booted, total=150, seed=0)


def test_nor_do_they_under_memory_pressure() -> None:
    """Few blocks and few places: clients leave while they wait, and while they are preempted."""
    scheduler = SchedulerConfig(max_running_seqs=24, admission="optimistic", step_tokens=64)
    with formula_model(num_blocks=200, scheduler=scheduler) as booted:
        run(booted, total=100, seed=10_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nor_do_thousands() -> None:
    scheduler = SchedulerConfig(max_running_seqs=48, admission="optimistic")
    with formula_model(num_blocks=512, scheduler=scheduler) as booted:
        run(booted, total=5_000, seed=100_000)
