"""Requests as unlike each other as possible, and engines that run them under any schedule."""

from dataclasses import replace
from pathlib import Path
from random import Random

from headrace.cluster.boot import BootedCluster
from headrace.core.base.plan import TokenLogprob
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig, SchedulerConfig
from headrace.core.config.telemetry import TelemetryConfig
from headrace.live.boot import Booted, boot
from headrace.live.generate import GenerateRequest
from headrace.ops.interface import KvLayout, KvType
from support.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS

Output = tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...], str]

MAX_PROMPT, MAX_TOKENS, MAX_MODEL_LEN = 120, 24, 160  # of requests to the tiny model
SMALL_POOL_BLOCKS = 24
TWO_THREADS = DeviceConfig(backend="native", threads=2)


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
    kv_dtype: str = "bf16",
    device: DeviceConfig = TWO_THREADS,
) -> Booted:
    return boot(
        Config(
            model=ModelConfig(path=str(path), max_model_len=max_model_len),
            device=device,
            kv=KvConfig(memory_bytes=num_blocks * block_bytes, dtype=kv_dtype),
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
    booted: Booted | BootedCluster,
    requests: list[GenerateRequest],
    *,
    salt: str,
    num_concurrent: int,
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


def block_bytes(kv_dtype: str) -> int:
    return KvLayout(LAYERS, KV_HEADS, HIDDEN // HEADS, 1, dtype=KvType(kv_dtype)).block_bytes


def run_alone(
    path: Path,
    requests: list[GenerateRequest],
    kv_dtype: str,
    device: DeviceConfig = TWO_THREADS,
) -> list[Output]:
    """Every request by itself, its prompt in one piece, with an empty cache."""
    booted = start(
        path,
        chunk_tokens=512,
        num_blocks=64,
        block_bytes=block_bytes(kv_dtype),
        max_model_len=MAX_MODEL_LEN,
        kv_dtype=kv_dtype,
        device=device,
    )
    outputs = [
        run(booted, [request], salt=request.request_id, num_concurrent=1)[0] for request in requests
    ]
    booted.close()
    # Outputs that are all alike would be equal whatever went wrong.
    assert len({tokens for tokens, *_ in outputs}) == len(outputs)
    return outputs
