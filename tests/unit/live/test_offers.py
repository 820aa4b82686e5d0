"""Deltas that are taken in the turn of the loop that brings them."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from headrace.live.choice import ChoiceDelta
from headrace.live.generate import TextEngine
from support.scripted import assert_idle, collect, request, text_engine, texts_of


class Offered:
    """Takes what it is offered, or some of it."""

    def __init__(self, takes: Callable[[ChoiceDelta], bool] = lambda delta: True) -> None:
        self.deltas: list[ChoiceDelta] = []
        self._takes = takes

    def __call__(self, delta: ChoiceDelta) -> bool:
        takes = self._takes(delta)
        if takes:
            self.deltas.append(delta)
        return takes


def test_what_comes_while_a_stream_is_waited_for_is_offered_first() -> None:
    with text_engine("abcdef", is_free=False) as (engine, executor):

        async def read(offered: Offered, rest: list[ChoiceDelta]) -> None:
            note = rest.append  # each as it comes

            async def iterate() -> None:
                async for delta in engine.stream(request(), offered):
                    note(delta)

            reading = asyncio.create_task(iterate())
            for num_steps in range(1, 8):
                await asyncio.to_thread(executor.next)
                while len(offered.deltas) + len(rest) < num_steps:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0)  # so that it waits again
            await reading

        # The first token comes with the word that the sequence is admitted, which wakes the reader.
        offered = Offered(lambda delta: delta.text not in "ac")
        rest: list[ChoiceDelta] = []
        asyncio.run(read(offered, rest))
        assert [delta.text for delta in offered.deltas] == [*"bdef"]
        assert [delta.text for delta in rest] == ["a", "c", ""]
        assert rest[-1].finish is not None
        assert rest[-1].finish.num_output_tokens == 7
        executor.release()
        assert_idle(engine.engine)


def test_an_end_is_never_offered() -> None:
    with text_engine("one two three") as (engine, _):
        offered = Offered()
        taken = offered.deltas  # and those that are read, in their order
        ends: list[bool] = []  # of those that are read

        async def read() -> None:
            async for delta in engine.stream(request(stop=["two"], max_tokens=200), offered):
                taken.append(delta)
                ends.append(delta.finish is not None)

        asyncio.run(read())
        assert texts_of(taken) == {0: "one "}
        assert sum(delta.finish is not None for delta in taken) == sum(ends) == 1
        assert taken[-1].finish is not None
        assert taken[-1].finish.stop_reason == "two"
        assert_idle(engine.engine)


def test_an_offer_that_fails_is_the_readers_own_trouble() -> None:
    def fail(delta: ChoiceDelta) -> bool:
        raise ValueError("no more")

    with text_engine("abcdef" * 30) as (engine, _):

        async def read_both() -> list[ChoiceDelta]:
            broken = asyncio.create_task(collect(engine.stream(request(), fail)))
            whole = await collect(engine.stream(request()))
            with pytest.raises(ValueError, match="no more"):
                await broken
            return whole

        assert texts_of(asyncio.run(read_both())) == {0: ("abcdef" * 30)[:20]}
        assert_idle(engine.engine)


def test_words_of_steps_may_be_said_in_the_loop_that_reads_them() -> None:
    tellers: set[str] = set()
    offerers: set[str] = set()
    observers: set[str] = set()
    text = ""

    def offer(delta: ChoiceDelta) -> bool:
        nonlocal text
        offerers.add(threading.current_thread().name)
        text += delta.text
        return True

    async def read(engine: TextEngine) -> None:
        nonlocal text
        engine.speak_in(asyncio.get_running_loop())
        async for delta in engine.stream(request(max_tokens=100), offer):
            text += delta.text

    with text_engine("abcdef" * 30) as (engine, _):
        engine.engine.after_words(lambda: tellers.add(threading.current_thread().name))
        engine.engine.observe(lambda *_: observers.add(threading.current_thread().name))
        for _ in range(2):  # by the second time the first loop is closed
            text = ""
            asyncio.run(read(engine))
            assert text == ("abcdef" * 30)[:100]
        assert texts_of(list(engine.stream_sync(request()))) == {0: ("abcdef" * 30)[:20]}
        assert_idle(engine.engine)
    assert offerers == {threading.current_thread().name}
    assert threading.current_thread().name in tellers
    assert observers == {"headrace-engine"}
