"""Same bytes with prefill and decode in processes of their own, whatever the schedule of either."""

from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.boot import boot_cluster
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig, SchedulerConfig
from headrace.live.generate import GenerateRequest
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
)
from support.tiny_model import VOCAB, write_tiny_model

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

ROOMY_BLOCKS = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return draw_requests(VOCAB, num_requests=64, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def alone(model: Path, requests: list[GenerateRequest]) -> list[Output]:
    return run_alone(model, requests, "bf16")


def schedules() -> list[Any]:
    """(chunk tokens, blocks of each pool): all of them, the slow ones marked."""
    quick = ((16, SMALL_POOL_BLOCKS), (64, ROOMY_BLOCKS))
    return [
        pytest.param(*case, marks=[] if case in quick else pytest.mark.slow)
        for case in product((16, 64, 512), (SMALL_POOL_BLOCKS, ROOMY_BLOCKS))
    ]


@pytest.mark.parametrize(("chunk_tokens", "num_blocks"), schedules())
def test_a_hand_off_changes_no_byte_under_any_schedule(
    model: Path,
    requests: list[GenerateRequest],
    alone: list[Output],
    chunk_tokens: int,
    num_blocks: int,
) -> None:
    config = Config(
        model=ModelConfig(path=str(model), max_model_len=MAX_MODEL_LEN),
        device=DeviceConfig(threads=1),
        kv=KvConfig(memory_bytes=num_blocks * block_bytes("bf16")),
        scheduler=SchedulerConfig(
            step_tokens=max(chunk_tokens, 64), chunk_tokens=chunk_tokens, admission="optimistic"
        ),
        cluster=ClusterConfig(prefill=1, decode=1, handoff="always"),
    )
    with closing(boot_cluster(config)) as cluster:
        for num_concurrent in (1, 8, 64):
            for state in ("cold", "warm"):
                before = cluster.engine.stats()
                outputs = run(
                    cluster, requests, salt=str(num_concurrent), num_concurrent=num_concurrent
                )
                assert outputs == alone, f"{num_concurrent} at once, {state}"
                assert cluster.engine.stats().num_handoffs == before.num_handoffs + len(requests)
        stats = cluster.engine.stats()
        assert (stats.num_preemptions > 0) is (num_blocks == SMALL_POOL_BLOCKS)
        assert stats.num_hit_tokens > 0
        cluster.engine.check()
