"""What an engine's /metrics page says about its load, in the words of several makers.

Decides which figures are believed. One that is missing or no number makes the load unknown: it is
never taken for zero.
"""

import re
from math import isfinite
from typing import Final, NamedTuple

from headrace.cluster.gateway.ask import TOKENS_PER_BLOCK
from headrace.core.router.events import WorkerLoad


class _Words(NamedTuple):
    """Names of gauges. `pool` holds the size of the KV pool in tokens, or its labels do."""

    running: str
    waiting: str
    usage: str = ""  # of the pool, 0..1
    used: str = ""  # of the pool, in tokens
    pool: str = ""


_MAKERS: Final = (
    # headrace shows vLLM's names too.
    _Words(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        usage="vllm:kv_cache_usage_perc",
        pool="vllm:cache_config_info",
    ),
    _Words(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        used="sglang:num_used_tokens",
        pool="sglang:max_total_num_tokens",
    ),
    _Words("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    _Words("lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting"),
    _Words("trtllm_num_requests_running", "trtllm_num_requests_waiting"),
    _Words("tgi_batch_current_size", "tgi_queue_size"),
)
_NAMES: Final = sorted({name for words in _MAKERS for name in words if name})
_SAMPLE: Final = re.compile(
    rf"^({'|'.join(map(re.escape, _NAMES))})(?:\{{(.*)\}})?[ \t]+(\S+)", re.MULTILINE
)
_LABEL: Final = re.compile(r'(\w+)="(\d{1,15})"')


def load_of(page: str) -> WorkerLoad | None:
    """Samples of one name are those of the engine's parts: they add up, a usage is that of the
    fullest. None = unknown.
    """
    samples: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in _SAMPLE.findall(page):
        try:
            samples.setdefault(name, []).append((labels, float(value)))
        except ValueError:
            return None
    for words in _MAKERS:
        running, waiting = _sum(samples, words.running), _sum(samples, words.waiting)
        if running is not None and waiting is not None:
            used, total = _pool(samples, words)
            is_known = used is not None and total is not None
            return WorkerLoad(
                num_running=running,
                num_waiting=waiting,
                num_queued_prefill_tokens=None,
                num_kv_tokens=used if is_known else None,
                num_free_blocks=(
                    max(0.0, total - used) // TOKENS_PER_BLOCK
                    if total is not None and used is not None
                    else None
                ),
                num_cached_blocks=0,
                num_pinned_blocks=0,
            )
    return None


def _pool(
    samples: dict[str, list[tuple[str, float]]], words: _Words
) -> tuple[float | None, float | None]:
    """Tokens held and in all; None where not known."""
    total = _sum(samples, words.pool)
    if words.usage:
        usages = [value for _, value in samples.get(words.usage, ())]
        sizes = [
            int(labels["num_gpu_blocks"]) * int(labels["block_size"])
            for text, _ in samples.get(words.pool, ())
            if {"num_gpu_blocks", "block_size"} <= (labels := dict(_LABEL.findall(text))).keys()
        ]
        if not (usages and sizes and isfinite(max(usages))):
            return None, None
        return max(usages) * sum(sizes), float(sum(sizes))
    return _sum(samples, words.used), total


def _sum(samples: dict[str, list[tuple[str, float]]], name: str) -> float | None:
    found = [value for _, value in samples.get(name, ())]
    return sum(found) if found and all(isfinite(v) and v >= 0 for v in found) else None
