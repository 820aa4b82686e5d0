"""Recordings of traffic that never was, on workers whose steps cost what a line says."""

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.base.worker import Role
from headrace.core.config.schema import SchedulerConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.workload.recording import (
    KEY_BYTES,
    Begin,
    Line,
    Namer,
    PoolFacts,
    Pools,
    Recorded,
    encode_line,
)

BLOCK = 16
# A millisecond for a step, and 0.1 ms for each token.
COST = FittedCostModel(
    name="a line",
    knot_ns=tuple(1e6 + 1e5 * n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    seq_ns=0.0,
    logit_row_ns=0.0,
    attention_pair_ns=0.0,
    kv_token_ns=0.0,
    links={"memory": Link(latency_ns=5_000.0, byte_ns=0.1)},
    num_samples=100,
)
NAMER = Namer(bytes(KEY_BYTES), BLOCK)


def pool(num_workers: int = 1, *, role: Role = Role.MIXED, num_blocks: int = 4096) -> PoolFacts:
    return PoolFacts(
        role=role,
        num_workers=num_workers,
        spec=WorkerSpec(
            model_digest="00" * 32,
            kv_dtype="bf16",
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_model_len=8192,
            vocab_size=1000,
        ),
        config=WorkerConfig(scheduler=SchedulerConfig()),
        cost=COST,
        kv_block_bytes=1 << 14,
    )


def line(
    number: int,
    at_s: float,
    prompt: Sequence[int],
    output: Sequence[int] = (1, 2, 3),
    **known: Any,
) -> Recorded:
    chain = NAMER.chain("", (*prompt, *output))
    told = {
        "end": "length",
        "max_tokens": len(output),
        "ttft_ns": Ns(1_000_000),
        "e2e_ns": Ns(5_000_000),
        "max_itl_ns": Ns(2_000_000),
        **known,
    }
    return Recorded(
        request=number,
        arrived_ns=Ns(round(at_s * NS_PER_S)),
        prompt_tokens=len(prompt),
        output_tokens=len(output),
        blocks=chain,
        tail=NAMER.tail("", prompt, chain),
        **told,
    )


def lines_of(requests: Iterable[Recorded], *pools: PoolFacts, **begin: Any) -> list[bytes]:
    head: list[Line] = [Begin(block_tokens=BLOCK, recording_id="r", **begin)]
    head.append(Pools(at_ns=Ns(0), pools=pools or (pool(),)))
    return [encode_line(one) + b"\n" for one in (*head, *requests)]
