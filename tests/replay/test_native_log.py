"""The simulator takes the decisions of an engine that computed, with the times that it took."""

from pathlib import Path

import pytest

from headrace.core.base.events import StartStep
from headrace.core.engine.trace import Frame
from headrace.live.event_log import EventLogReader
from headrace.sim.recorded import recorded_setup
from headrace.sim.world import World, simulate
from support.schedules import (
    MAX_MODEL_LEN,
    MAX_PROMPT,
    MAX_TOKENS,
    SMALL_POOL_BLOCKS,
    block_bytes,
    draw_requests,
    run,
    start,
)
from support.tiny_model import VOCAB, write_tiny_model

pytest.importorskip("headrace.ops.native._native")


@pytest.mark.parametrize("overlap", ["off", "auto", "on"])
def test_a_native_run_is_simulated_decision_for_decision(tmp_path: Path, overlap: str) -> None:
    requests = draw_requests(VOCAB, num_requests=32, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)
    path = tmp_path / "log"
    booted = start(
        write_tiny_model(tmp_path / "tiny.gguf"),
        chunk_tokens=64,
        num_blocks=SMALL_POOL_BLOCKS,
        block_bytes=block_bytes("bf16"),
        max_model_len=MAX_MODEL_LEN,
        overlap=overlap,
        event_log=str(path),
    )
    try:
        run(booted, requests, salt="", num_concurrent=8)
        stats = booted.engine.stats()
    finally:
        booted.close()
    with EventLogReader(path) as log:
        header, frames = log.header, list(log)
    simulated: list[Frame] = []
    simulate(
        World(workers=(recorded_setup(header.config, header.spec, header.cost, frames),)),
        lambda _, now, event, effects: simulated.append(Frame(now, event, tuple(effects))),
    )
    assert simulated == frames
    plans = [e.plan for frame in frames for e in frame.effects if isinstance(e, StartStep)]
    assert len(plans) == stats.num_steps > 100
    assert stats.num_preemptions > 0
    assert any(plan.is_ahead for plan in plans) == (overlap != "off")
