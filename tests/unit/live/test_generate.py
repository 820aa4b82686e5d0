"""TextEngine: choices, stops, refusals, cancellation, and one wake-up for one step."""

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.base.request import FinishReason
from headrace.live.choice import ChoiceDelta
from headrace.live.generate import TextEngine
from support.fake_engine import IM_END as EOS
from support.live import ManualExecutor
from support.scripted import assert_idle, collect, request, text_engine, texts_of


def test_a_text_streams_to_a_thread_and_to_a_loop() -> None:
    with text_engine("héllo") as (engine, _):
        for deltas in (
            list(engine.stream_sync(request())),
            asyncio.run(collect(engine.stream(request()))),
        ):
            assert texts_of(deltas) == {0: "héllo"}
            assert [delta.text for delta in deltas] == [*"héllo", ""]
            finish = deltas[-1].finish
            assert finish is not None
            assert (finish.reason, finish.stop_reason) == (FinishReason.STOP, None)
            assert (finish.num_prompt_tokens, finish.num_output_tokens) == (3, 7)
        assert_idle(engine.engine)


def test_choices_arrive_together_and_end_one_by_one() -> None:
    with text_engine("first", "second one") as (engine, _):
        deltas = list(engine.stream_sync(request(n=2)))
        assert texts_of(deltas) == {0: "first", 1: "second one"}
        assert [delta.index for delta in deltas if delta.finish is not None] == [0, 1]
        assert_idle(engine.engine)


def test_a_stop_string_ends_the_sequence_in_the_engine_too() -> None:
    with text_engine("one two three four five six", is_free=False) as (engine, executor):
        seen = list[ChoiceDelta]()
        reader = threading.Thread(
            target=lambda: seen.extend(engine.stream_sync(request(stop=["two"], max_tokens=200)))
        )
        reader.start()
        while reader.is_alive():
            executor.next()
            reader.join(0.01)
        assert texts_of(seen) == {0: "one "}
        finish = seen[-1].finish
        assert finish is not None
        assert (finish.reason, finish.stop_reason, finish.num_output_tokens) == (
            FinishReason.STOP,
            "two",
            7,
        )
        executor.release()
        assert_idle(engine.engine)
        assert executor.num_started < 20


def test_each_choice_has_its_own_stop() -> None:
    with text_engine("abXcd", "abcdXe", "abc") as (engine, _):
        deltas = list(engine.stream_sync(request(n=3, stop=["X"])))
        assert texts_of(deltas) == {0: "ab", 1: "abcd", 2: "abc"}
        reasons = {delta.index: delta.finish.stop_reason for delta in deltas if delta.finish}
        assert reasons == {0: "X", 1: "X", 2: None}


def test_out_of_bounds_is_refused_before_anything_starts() -> None:
    with text_engine("x") as (engine, executor):
        for fields, param in (
            ({"temperature": float("nan")}, "temperature"),
            ({"n": 65}, "n"),
            ({"prompt": ()}, "prompt"),
            ({"max_tokens": 254}, "max_tokens"),
        ):
            with pytest.raises(RequestError) as caught:
                engine.stream(request(**fields))
            assert caught.value.param == param
            with pytest.raises(RequestError):
                engine.stream_sync(request(**fields))
        with pytest.raises(RequestError):
            engine.stream_all([request(), request(n=0)])
        assert executor.num_started == 0


def test_what_the_engine_refuses_is_raised_before_the_first_delta() -> None:
    with text_engine("x", num_blocks=2) as (engine, _):
        with pytest.raises(RequestError, match="KV") as caught:
            list(engine.stream_sync(request(max_tokens=100)))
        assert caught.value.code == "kv_pool_too_small"
        with pytest.raises(RequestError, match="KV"):
            asyncio.run(collect(engine.stream(request(max_tokens=100, n=4))))
        assert_idle(engine.engine)


def test_a_full_queue_is_overload_for_the_whole_request() -> None:
    with text_engine("x", max_waiting_seqs=2, max_running_seqs=1) as (engine, _):
        with pytest.raises(OverloadError) as caught:
            list(engine.stream_sync(request(n=8)))
        assert caught.value.status_hint == 429
        assert caught.value.retry_after_s > 0
        assert_idle(engine.engine)
        with pytest.raises(OverloadError) as caught:
            list(engine.stream_sync(request()))
        assert caught.value.status_hint == 503


def test_closing_the_iterator_cancels() -> None:
    with text_engine("abcdef" * 30, is_free=False) as (engine, executor):

        async def read_one() -> None:
            async with aclosing(engine.stream(request(max_tokens=200, n=2))) as stream:
                async for delta in stream:
                    assert delta.text == "a"
                    return

        threading.Thread(target=executor.next).start()
        asyncio.run(read_one())
        executor.next()
        assert_idle(engine.engine)
        assert executor.num_started == 2


def test_a_thread_that_stops_reading_cancels() -> None:
    with text_engine("abcdef" * 30) as (engine, executor):
        for delta in engine.stream_sync(request(max_tokens=200)):
            assert delta.text == "a"
            break
        assert_idle(engine.engine)
        assert executor.num_started < 200


def test_cancelling_the_task_cancels() -> None:
    with text_engine("abcdef" * 30, is_free=False) as (engine, executor):

        async def cancel_at_once() -> None:
            task = asyncio.create_task(collect(engine.stream(request(max_tokens=200))))
            await asyncio.to_thread(executor.next)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel_at_once())
        executor.release()
        assert_idle(engine.engine)
        assert executor.num_started <= 3


def test_a_loop_that_has_gone_cancels() -> None:
    with text_engine("abcdef" * 30, is_free=False) as (engine, executor):
        loop = asyncio.new_event_loop()
        stream = engine.stream(request(max_tokens=200))
        pending = loop.create_task(anext(stream))
        loop.run_until_complete(asyncio.sleep(0))
        # The loop goes away without letting the stream say goodbye.
        loop.stop()
        loop.run_forever()
        loop.close()
        executor.release()
        assert_idle(engine.engine)
        assert executor.num_started < 20
        pending._log_destroy_pending = False  # type: ignore[attr-defined]


def test_one_step_wakes_a_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_wakes = 0

    async def read_many(engine: TextEngine, executor: ManualExecutor) -> int:
        nonlocal num_wakes
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_wakes
            if threading.current_thread().name == "headrace-engine":
                num_wakes += 1
            return wake(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        tasks = [asyncio.create_task(collect(engine.stream(request(n=2)))) for _ in range(16)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
        for task in tasks:
            assert texts_of(task.result()) == {0: "hello", 1: "hello"}
        return executor.num_started

    with text_engine("hello") as (engine, executor):
        num_steps = asyncio.run(read_many(engine, executor))
    # 32 sequences of 6 tokens: 192 emits and 64 other words, in one wake for each step and each of
    # 16 arrivals.
    assert num_wakes <= num_steps + 16


def test_many_requests_run_within_a_window() -> None:
    with text_engine("abc") as (engine, _):
        most = 0

        def watch(*_: object) -> None:
            nonlocal most
            stats = engine.engine.stats()
            most = max(most, stats.num_running + stats.num_waiting)

        engine.engine.observe(watch)
        texts = [""] * 20
        for index, delta in engine.stream_all([request() for _ in texts], max_open=3):
            texts[index] += delta.text
        assert texts == ["abc"] * 20
        assert most == 3


def test_log_probabilities_stay_beside_their_tokens() -> None:
    with text_engine("aé") as (engine, _):
        deltas = list(engine.stream_sync(request(logprobs=0)))
        assert [delta.token_ids for delta in deltas] == [(97,), tuple("é".encode()), (EOS,)]
        for delta in deltas:
            assert tuple(logprob.token_id for logprob in delta.logprobs) == delta.token_ids


def test_closing_the_engine_ends_its_streams() -> None:
    with text_engine("abcdef" * 30, is_free=False) as (engine, executor):
        stream = engine.stream_sync(request(max_tokens=200))
        executor_runs = threading.Thread(target=executor.next)
        executor_runs.start()
        assert next(stream).text == "a"
        executor.release()
        engine.engine.close()
        rest = list(stream)
        assert rest[-1].finish is not None
        assert rest[-1].finish.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        with pytest.raises(OverloadError):
            list(engine.stream_sync(request()))
