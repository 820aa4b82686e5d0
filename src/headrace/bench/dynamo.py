"""NVIDIA Dynamo's index of KV blocks, where `ai-dynamo-runtime` is installed: a peer for our own.

Fills its radix tree with what the benchmark's workers have cached and asks it for the same
prompts. Its tree is Rust, on a thread of its own, and events reach it as JSON, which is how its
Python binding takes them and not how its router does: so only matches and memory are compared.
"""

import json
import time
from collections.abc import Iterable, Sequence
from importlib import import_module, metadata
from math import inf

import msgspec

from headrace.bench.loads import Spread
from headrace.bench.memory import resident_bytes
from headrace.core.base.errors import HeadraceError

PACKAGE = "ai-dynamo-runtime"


class DynamoReport(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    match_us: Spread  # on the wall, since it matches on another thread
    bytes_per_replica: float


def is_installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def measure_dynamo(
    stored: Iterable[tuple[int, Sequence[bytes]]],
    prompts: Sequence[Sequence[bytes]],
    num_hit_blocks: int,
    num_passes: int,
) -> DynamoReport:
    """`stored` are the workers' prompts. HeadraceError where a match is not of so many blocks."""
    tree = import_module("dynamo._core").RadixTree()
    before_bytes, num_replicas = resident_bytes(), 0
    for event_id, (index, names) in enumerate(stored):
        blocks = [{"block_hash": one, "tokens_hash": one} for one in _hashes(names)]
        event = {"event_id": event_id, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        tree.apply_event(index, json.dumps(event).encode())
        num_replicas += len(blocks)
    taken_us = [inf] * len(prompts)
    for _ in range(num_passes):
        for place, names in enumerate(prompts):
            hashes = _hashes(names)
            started = time.perf_counter_ns()
            scores = tree.find_matches(hashes).scores
            taken_us[place] = min(taken_us[place], (time.perf_counter_ns() - started) / 1e3)
            if max(scores.values()) != num_hit_blocks:
                raise HeadraceError("Dynamo's index does not hold what was put into it")
    return DynamoReport(
        version=metadata.version(PACKAGE),
        match_us=Spread.of(taken_us),
        bytes_per_replica=(resident_bytes() - before_bytes) / num_replicas,
    )


def _hashes(names: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(name[:8], "little") for name in names]
