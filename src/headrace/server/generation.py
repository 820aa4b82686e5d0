"""Runs the prompts of one request and hands their deltas to a writer.

A writer turns deltas into bytes: one event after another, or a single body at the end. This is the
only difference between a streamed answer and a whole one.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import msgspec

from headrace.core.base.request import FinishReason
from headrace.live.choice import ChoiceDelta
from headrace.live.generate import GenerateRequest, Offer, TextEngine
from headrace.server.errors import failure_of_finish
from headrace.server.wire import PromptTokensDetails, Usage

Deltas = AsyncGenerator[tuple[int, ChoiceDelta], None]


class Writer(Protocol):
    def add(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The bytes that this delta makes; none where the answer is sent whole."""
        ...

    def end(self) -> bytes:
        """The last bytes, when every choice has finished."""
        ...


class Outlet(Protocol):
    """Where an answer's bytes go, past whoever else waits for them."""

    @property
    def is_open(self) -> bool:
        """Whether bytes would go out at once, behind all that were made before."""
        ...

    def send(self, chunk: bytes) -> None:
        """Only while it is open."""
        ...


@dataclass(slots=True)
class Tally:
    """Tokens of a request, counted as they come; a prompt once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, delta: ChoiceDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.finish is not None:
            self.finish_reasons.append(delta.finish.reason.value)
            if delta.index == 0:  # the other choices find what this one computed
                self.cached_tokens += delta.finish.num_cached_tokens

    def usage(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        details = PromptTokensDetails(self.cached_tokens)
        return Usage(self.prompt_tokens, self.completion_tokens, total, details)


async def write(
    engine: TextEngine,
    requests: Sequence[GenerateRequest],
    tally: Tally,
    writer: Writer,
    *,
    outlet: Outlet | None = None,
    discard_output: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Bytes of the answer, except for those that the outlet takes, in the turn of the loop that
    brings their tokens. Closing the generator cancels all that still runs.

    `discard_output`: the client wants no token at all (only its prompt scored), which the engine
    serves as one. Raises what the engine refuses with, and an error where a sequence did not end by
    itself.
    """

    def offer(delta: ChoiceDelta) -> bool:
        if outlet is None or discard_output or not outlet.is_open:
            return False
        tally.add(delta)
        if chunk := writer.add(0, delta):
            outlet.send(chunk)
        return True

    async with aclosing(_deltas(engine, requests, offer)) as deltas:
        async for prompt_index, delta in deltas:
            if delta.finish is not None:
                error = failure_of_finish(delta.finish.reason, delta.finish.error)
                if error is not None:
                    tally.finish_reasons.append(delta.finish.reason.value)
                    raise error
            if discard_output:
                delta = _without_output(delta)
            tally.add(delta)
            yield writer.add(prompt_index, delta)
    yield writer.end()


def _without_output(delta: ChoiceDelta) -> ChoiceDelta:
    finish = delta.finish
    if finish is not None:
        finish = replace(finish, reason=FinishReason.LENGTH, num_output_tokens=0, stop_reason=None)
    return msgspec.structs.replace(delta, text="", token_ids=(), logprobs=(), finish=finish)


async def _deltas(engine: TextEngine, requests: Sequence[GenerateRequest], offer: Offer) -> Deltas:
    # `stream` refuses what is out of bounds when it is called, so nothing has started by then.
    is_one = len(requests) == 1
    streams = [engine.stream(request, offer if is_one else None) for request in requests]
    if is_one:
        async with aclosing(_closable(streams[0])) as stream:
            async for delta in stream:
                yield 0, delta
        return
    async with aclosing(_merged(streams)) as merged:
        async for item in merged:
            yield item


async def _merged(streams: Sequence[AsyncIterator[ChoiceDelta]]) -> Deltas:
    """Deltas of several streams as they come. The first error ends them all."""
    # Unbounded by itself: it holds at most the tokens that were asked for.
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | Exception | None] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterator[ChoiceDelta]) -> None:
        try:
            async with aclosing(_closable(stream)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            match await queue.get():
                case Exception() as error:
                    raise error
                case None:
                    num_open -= 1
                case item:
                    yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _closable(stream: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[ChoiceDelta, None]:
    return cast("AsyncGenerator[ChoiceDelta, None]", stream)
