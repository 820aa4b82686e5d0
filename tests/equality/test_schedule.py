"""Same bytes, whatever the schedule: a request's output does not depend on its neighbours, on how
its prompt is cut, on what the cache holds, or on being preempted.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.base.events import StartStep
from headrace.live.event_log import EventLogReader
from headrace.live.generate import GenerateRequest
from headrace.live.replay import replay
from headrace.models.hub import ensure_default_model
from support.schedules import (
    MAX_MODEL_LEN,
    MAX_PROMPT,
    MAX_TOKENS,
    SMALL_POOL_BLOCKS,
    Output,
    block_bytes,
    draw_requests,
    run,
    run_alone,
    start,
)
from support.tiny_model import VOCAB, write_tiny_model

pytest.importorskip("headrace.ops.native._native")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return draw_requests(VOCAB, num_requests=32, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def alone_by_kv_dtype(
    tiny_model: Path, requests: list[GenerateRequest]
) -> Callable[[str], list[Output]]:
    @cache
    def alone(kv_dtype: str) -> list[Output]:
        outputs = run_alone(tiny_model, requests, kv_dtype)
        assert len({token for tokens, *_ in outputs for token in tokens}) > VOCAB / 2
        return outputs

    return alone


@pytest.fixture(scope="module")
def alone(alone_by_kv_dtype: Callable[[str], list[Output]]) -> list[Output]:
    return alone_by_kv_dtype("bf16")


def schedules() -> list[Any]:
    """(type of keys and values, chunk tokens, overlap): all of them, the slow ones marked."""
    cases = []
    for kv_dtype, chunk_tokens, overlap in product(
        ("bf16", "int8", "fp8"), (16, 64, 512), ("off", "on")
    ):
        case = kv_dtype, chunk_tokens, overlap
        is_quick = kv_dtype == "bf16" or case in (("int8", 64, "on"), ("fp8", 16, "off"))
        cases.append(pytest.param(*case, marks=[] if is_quick else pytest.mark.slow))
    return cases


@pytest.mark.parametrize("is_preempting", [False, True], ids=["roomy", "preempting"])
@pytest.mark.parametrize(("kv_dtype", "chunk_tokens", "overlap"), schedules())
def test_the_schedule_changes_no_byte(
    tiny_model: Path,
    requests: list[GenerateRequest],
    alone_by_kv_dtype: Callable[[str], list[Output]],
    kv_dtype: str,
    chunk_tokens: int,
    is_preempting: bool,
    overlap: str,
    tmp_path: Path,
) -> None:
    alone = alone_by_kv_dtype(kv_dtype)
    booted = start(
        tiny_model,
        chunk_tokens=chunk_tokens,
        num_blocks=SMALL_POOL_BLOCKS if is_preempting else 1024,
        block_bytes=block_bytes(kv_dtype),
        max_model_len=MAX_MODEL_LEN,
        kv_dtype=kv_dtype,
        overlap=overlap,
        event_log=str(tmp_path / "log"),
    )
    try:
        for num_concurrent in (1, 8, 32):
            for state in ("cold", "warm"):
                before = booted.engine.stats()
                # The salt is part of every block's name: another one finds nothing.
                outputs = run(
                    booted, requests, salt=str(num_concurrent), num_concurrent=num_concurrent
                )
                assert outputs == alone, f"{num_concurrent} at once, {state}"
                after = booted.engine.stats()
                if is_preempting and num_concurrent > 1:
                    assert after.num_preemptions > before.num_preemptions
                if not is_preempting:
                    assert after.num_preemptions == 0
                if not is_preempting and state == "warm":
                    num_hits = after.num_hit_tokens - before.num_hit_tokens
                    assert num_hits > sum(len(one.prompt_tokens) for one in requests) / 2
        booted.engine.check()
    finally:
        booted.close()
    report = replay(tmp_path / "log")
    assert report.is_equal, str(report.difference)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_end_changes_no_byte_of_others_and_nothing_follows_it(
    tiny_model: Path,
    requests: list[GenerateRequest],
    alone: list[Output],
    overlap: str,
    tmp_path: Path,
) -> None:
    """Ends that nobody sees coming: by a token, and by a string that the reader finds."""
    booted = start(
        tiny_model,
        chunk_tokens=64,
        num_blocks=SMALL_POOL_BLOCKS,
        block_bytes=block_bytes("bf16"),
        max_model_len=MAX_MODEL_LEN,
        overlap=overlap,
        event_log=str(tmp_path / "log"),
    )
    ended = []
    for index, (request, (tokens, *_, text)) in enumerate(zip(requests, alone, strict=True)):
        middle = tokens[len(tokens) // 2]
        if index % 3 == 0:
            params = msgspec.structs.replace(request.params, stop_token_ids=(middle,))
            request = replace(request, params=params, include_stop=True)
        elif index % 3 == 1:
            request = replace(request, stop=(text[len(text) // 2 :][:3],))
        ended.append(request)
    try:
        for num_concurrent in (1, 8, 32):
            deltas = list(booted.text_engine.stream_all(ended, max_open=num_concurrent))
            for index, (request, (tokens, *_, text)) in enumerate(zip(ended, alone, strict=True)):
                own = [delta for i, delta in deltas if i == index]
                found = tuple(token for delta in own for token in delta.token_ids)
                assert own[-1].finish is not None
                if request.params.stop_token_ids:
                    (stop,) = request.params.stop_token_ids
                    assert found == tokens[: tokens.index(stop) + 1]
                    assert own[-1].finish.reason == "stop"
                elif request.stop:
                    assert (
                        "".join(delta.text for delta in own) == text[: text.index(request.stop[0])]
                    )
                    assert own[-1].finish.reason == "stop"
                else:
                    assert found == tokens
        assert booted.engine.drain(20)
        booted.engine.check()
    finally:
        booted.close()
    with EventLogReader(tmp_path / "log") as log:
        effects = [effect for frame in log for effect in frame.effects]
    plans = [effect.plan for effect in effects if isinstance(effect, StartStep)]
    assert any(plan.is_ahead for plan in plans) == (overlap == "on")
    assert replay(tmp_path / "log").is_equal


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_the_schedule_changes_no_byte_of_the_default_model(chunk_tokens: int) -> None:
    path = ensure_default_model()
    requests = draw_requests(49_152, num_requests=8, max_prompt=200, max_tokens=40)
    block_bytes = 2 * 2 * 30 * 3 * 64 * 16
    roomy = start(
        path, chunk_tokens=512, num_blocks=512, block_bytes=block_bytes, max_model_len=256
    )
    alone = [run(roomy, [one], salt=one.request_id, num_concurrent=1)[0] for one in requests]
    roomy.close()
    small = start(
        path, chunk_tokens=chunk_tokens, num_blocks=18, block_bytes=block_bytes, max_model_len=256
    )
    try:
        for num_concurrent in (1, 8):
            assert run(small, requests, salt="", num_concurrent=num_concurrent) == alone
        assert small.engine.stats().num_preemptions > 0
        assert small.engine.stats().num_hit_tokens > 0
        small.engine.check()
    finally:
        small.close()
