"""Requests that are sent when their time has come, whatever became of those before (an open loop).

Decides when a request is sent; refuses to know what is asked of whoever answers.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.bench.client import Answer, complete, connect
from headrace.bench.loads import Target

if TYPE_CHECKING:
    import aiohttp

LEAD_S = 0.2  # before the first one, so that it is not late


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, greedy and past the end of text."""

    at_s: float  # after the begin
    prompt: str
    num_output_tokens: int


async def offer(target: Target, asks: Sequence[Ask]) -> list[Answer]:
    """The answers in the order of `asks`. HeadraceError where one was not given."""
    async with connect() as session:
        return await _offer(session, target, asks, LEAD_S)


async def offer_rounds(
    target: Target,
    rounds: Sequence[Sequence[Ask]],
    on_end: Callable[[], None] = lambda: None,
) -> list[list[Answer]]:
    """One after another, each when all of the one before are answered; `on_end` hears of each."""
    found: list[list[Answer]] = []
    async with connect() as session:
        for asks in rounds:
            found.append(await _offer(session, target, asks, 0.01))
            on_end()
    return found


async def _offer(
    session: "aiohttp.ClientSession", target: Target, asks: Sequence[Ask], lead_s: float
) -> list[Answer]:
    begin_s = time.perf_counter() + lead_s

    async def ask(one: Ask) -> Answer:
        await asyncio.sleep(max(0.0, begin_s + one.at_s - time.perf_counter()))
        body = {
            "model": target.model,
            "prompt": one.prompt,
            "max_tokens": one.num_output_tokens,
            "temperature": 0,
            **target.extra,
        }
        return await complete(session, target.url, body)

    return list(await asyncio.gather(*map(ask, asks)))
