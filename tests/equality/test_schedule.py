"""Same bytes, whatever the schedule: a request's output does not depend on its neighbours, on how
its prompt is cut, on what the cache holds, or on being preempted.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from headrace.core.base.events import StartStep
from headrace.core.base.plan import TokenLogprob
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.schema import (
    Config,
    DeviceConfig,
    KvConfig,
    ModelConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from headrace.live.boot import Booted, boot
from headrace.live.event_log import EventLogReader
from headrace.live.generate import GenerateRequest
from headrace.live.replay import replay
from headrace.models.hub import ensure_default_model
from support.tiny_model import BLOCK_BYTES, VOCAB, write_tiny_model

pytest.importorskip("headrace.ops.native._native")

Output = tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...], str]

SMALL_POOL_BLOCKS = 24


def draw_requests(
    vocab_size: int, *, num_requests: int, max_prompt: int, max_tokens: int
) -> list[GenerateRequest]:
    """Prompts that share beginnings; half greedy, half seeded, some with everything that sampling
    can be asked for.
    """
    rng = Random(1)
    stems = [[rng.randrange(2, vocab_size) for _ in range(max_prompt // 2)] for _ in range(3)]
    requests = []
    for index in range(num_requests):
        stem = stems[index % 3][: rng.randrange(max_prompt // 2 + 1)]
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randrange(1, max_prompt // 2))]
        requests.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt_tokens=stem + own,
                params=SamplingParams(
                    temperature=0.0 if index % 2 else 0.9,
                    top_p=0.95 if index % 3 else 1.0,
                    top_k=40 if index % 4 == 0 else 0,
                    min_p=0.01 if index % 6 == 0 else 0.0,
                    seed=index,
                    presence_penalty=0.5 if index % 5 == 0 else 0.0,
                    repetition_penalty=1.1 if index % 7 == 0 else 1.0,
                    max_tokens=rng.randrange(max_tokens // 2, max_tokens + 1),
                    ignore_eos=True,
                    logprobs=3,
                    prompt_logprobs=1 if index % 8 == 0 else None,
                ),
            )
        )
    return requests


def start(
    path: Path,
    *,
    chunk_tokens: int,
    num_blocks: int,
    block_bytes: int,
    max_model_len: int,
    overlap: str = "off",
    event_log: str = "",
) -> Booted:
    return boot(
        Config(
            model=ModelConfig(path=str(path), max_model_len=max_model_len),
            device=DeviceConfig(backend="native", threads=2),
            kv=KvConfig(memory_bytes=num_blocks * block_bytes),
            scheduler=SchedulerConfig(
                step_tokens=max(chunk_tokens, 64),
                chunk_tokens=chunk_tokens,
                admission="optimistic",
                overlap=overlap,
            ),
            telemetry=TelemetryConfig(event_log=event_log),
        )
    )


def run(
    booted: Booted, requests: list[GenerateRequest], *, salt: str, num_concurrent: int
) -> list[Output]:
    salted = [replace(request, salt=salt) for request in requests]
    deltas = list(booted.text_engine.stream_all(salted, max_open=num_concurrent))
    outputs: list[Output] = []
    for index in range(len(requests)):
        own = [delta for i, delta in deltas if i == index]
        assert own[-1].finish is not None
        assert own[-1].finish.reason == "length"
        outputs.append(
            (
                tuple(token for delta in own for token in delta.token_ids),
                tuple(logprob for delta in own for logprob in delta.logprobs),
                tuple(logprob for delta in own for logprob in delta.prompt_logprobs),
                "".join(delta.text for delta in own),
            )
        )
    return outputs


MAX_PROMPT, MAX_TOKENS, MAX_MODEL_LEN = 120, 24, 160


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return draw_requests(VOCAB, num_requests=32, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def alone(tiny_model: Path, requests: list[GenerateRequest]) -> list[Output]:
    """Every request by itself, its prompt in one piece, with an empty cache."""
    booted = start(
        tiny_model,
        chunk_tokens=512,
        num_blocks=64,
        block_bytes=BLOCK_BYTES,
        max_model_len=MAX_MODEL_LEN,
    )
    outputs = [
        run(booted, [request], salt=request.request_id, num_concurrent=1)[0] for request in requests
    ]
    booted.close()
    # Outputs that are all alike would be equal whatever went wrong.
    assert len({tokens for tokens, *_ in outputs}) == len(outputs)
    assert len({token for tokens, *_ in outputs for token in tokens}) > VOCAB / 2
    return outputs


@pytest.mark.parametrize("is_preempting", [False, True], ids=["roomy", "preempting"])
@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_schedule_changes_no_byte(
    tiny_model: Path,
    requests: list[GenerateRequest],
    alone: list[Output],
    chunk_tokens: int,
    is_preempting: bool,
    overlap: str,
    tmp_path: Path,
) -> None:
    booted = start(
        tiny_model,
        chunk_tokens=chunk_tokens,
        num_blocks=SMALL_POOL_BLOCKS if is_preempting else 1024,
        block_bytes=BLOCK_BYTES,
        max_model_len=MAX_MODEL_LEN,
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
        block_bytes=BLOCK_BYTES,
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
