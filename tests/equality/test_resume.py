"""A sequence that began elsewhere goes on to the same tokens, wherever it was cut."""

from pathlib import Path
from queue import SimpleQueue

import pytest

from headrace.core.base.events import Emit, EngineEffect, Finish
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import SeqId
from headrace.live.boot import Booted
from support.schedules import (
    MAX_MODEL_LEN,
    MAX_PROMPT,
    MAX_TOKENS,
    block_bytes,
    draw_requests,
    start,
)
from support.tiny_model import VOCAB, write_tiny_model

pytest.importorskip("headrace.ops.native._native")


def outputs_of(booted: Booted, specs: list[SeqSpec]) -> list[tuple[list[Emit], Finish]]:
    effects: SimpleQueue[EngineEffect] = SimpleQueue()
    booted.engine.submit(specs, effects.put)
    emits: dict[SeqId, list[Emit]] = {spec.seq_id: [] for spec in specs}
    ends: dict[SeqId, Finish] = {}
    while len(ends) < len(specs):
        match effects.get(timeout=20):
            case Emit(seq_id) as emit:
                emits[seq_id].append(emit)
            case Finish(seq_id) as finish:
                ends[seq_id] = finish
            case _:
                pass
    return [(emits[spec.seq_id], ends[spec.seq_id]) for spec in specs]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_sequence_goes_on_as_if_it_had_begun_here(tmp_path: Path, overlap: str) -> None:
    requests = draw_requests(VOCAB, num_requests=16, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)
    booted = start(
        write_tiny_model(tmp_path / "tiny.gguf"),
        chunk_tokens=64,
        num_blocks=256,
        block_bytes=block_bytes("bf16"),
        max_model_len=MAX_MODEL_LEN,
        overlap=overlap,
    )

    def spec(index: int, salt: str, output: tuple[int, ...] = ()) -> SeqSpec:
        request = requests[index]
        (seq_id,) = booted.engine.next_seq_ids(1)
        return SeqSpec(
            seq_id=SeqId(seq_id),
            request_id=request.request_id,
            prompt_tokens=tuple(request.prompt_tokens),
            output_tokens=output,
            params=request.params,
            salt=salt,
        )

    try:
        wholes = outputs_of(booted, [spec(index, "whole") for index in range(len(requests))])
        for salt, cut in (("start", 1), ("middle", 7), ("last", -1), ("whole", 11)):
            rests = outputs_of(
                booted,
                [
                    spec(index, salt, tuple(t for emit in emits for t in emit.tokens)[:cut])
                    for index, (emits, _) in enumerate(wholes)
                ],
            )
            for (emits, end), (rest, rest_end) in zip(wholes, rests, strict=True):
                tokens = [token for emit in emits for token in emit.tokens]
                logprobs = [one for emit in emits for one in emit.logprobs]
                assert [token for emit in rest for token in emit.tokens] == tokens[cut:]
                assert [one for emit in rest for one in emit.logprobs] == logprobs[cut:]
                assert rest_end.reason == end.reason
                assert rest_end.num_output_tokens == end.num_output_tokens == len(tokens)
                assert rest_end.num_prompt_tokens == end.num_prompt_tokens
        booted.engine.check()
    finally:
        booted.close()
