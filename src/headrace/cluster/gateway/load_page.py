"""What an engine's /metrics page says about its load, in the words of several makers.

Decides which figures are believed: one that is missing or makes no sense is unknown, and never
taken for zero.
"""

import re
from collections.abc import Callable
from math import isfinite
from typing import Final, NamedTuple

from headrace.cluster.gateway.ask import TOKENS_PER_BLOCK
from headrace.core.router.events import WorkerLoad

# Values with their labels, by name. An engine of several parts shows one of each part.
Samples = dict[str, list[tuple[str, float]]]


class Pool(NamedTuple):
    """A KV pool, in tokens."""

    used: float
    total: float


class _Maker(NamedTuple):
    running: str
    waiting: str
    pool: Callable[[Samples], Pool | None] = lambda samples: None


def load_of(page: str) -> WorkerLoad | None:
    """None = unknown."""
    samples: Samples = {}
    for name, labels, text in _SAMPLE.findall(page):
        samples.setdefault(name, []).append((labels, _number(text)))
    for maker in _MAKERS:
        running, waiting = _sum(samples, maker.running), _sum(samples, maker.waiting)
        if running is None or waiting is None:
            continue
        pool = maker.pool(samples)
        return WorkerLoad(
            num_running=running,
            num_waiting=waiting,
            num_queued_prefill_tokens=None,
            num_kv_tokens=pool and pool.used,
            num_free_blocks=pool and max(0.0, pool.total - pool.used) // TOKENS_PER_BLOCK,
            num_cached_blocks=0,  # engines count what is cached as free
            num_pinned_blocks=0,
        )
    return None


def _vllm_pool(samples: Samples) -> Pool | None:
    """The usage is that of the fullest part."""
    total = 0
    for text, _ in samples.get("vllm:cache_config_info", ()):
        labels = dict(_WHOLE_LABEL.findall(text))
        total += int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
    name = "vllm:kv_cache_usage_perc"
    if not total or _sum(samples, name) is None:
        return None
    return Pool(max(usage for _, usage in samples[name]) * total, total)


def _sglang_pool(samples: Samples) -> Pool | None:
    used, total = (_sum(samples, name) for name in _SGLANG_POOL)
    return None if used is None or total is None else Pool(used, total)


def _sum(samples: Samples, name: str) -> float | None:
    found = [value for _, value in samples.get(name, ())]
    return sum(found) if found and all(isfinite(v) and v >= 0 for v in found) else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


_SGLANG_POOL: Final = ("sglang:num_used_tokens", "sglang:max_total_num_tokens")
_MAKERS: Final = (
    # headrace shows vLLM's names too.
    _Maker("vllm:num_requests_running", "vllm:num_requests_waiting", _vllm_pool),
    _Maker("sglang:num_running_reqs", "sglang:num_queue_reqs", _sglang_pool),
    _Maker("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    _Maker("lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting"),
    _Maker("trtllm_num_requests_running", "trtllm_num_requests_waiting"),
    _Maker("tgi_batch_current_size", "tgi_queue_size"),
)
_NAMES: Final = (
    *(name for maker in _MAKERS for name in (maker.running, maker.waiting)),
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    *_SGLANG_POOL,
)
_SAMPLE: Final = re.compile(
    rf"^({'|'.join(map(re.escape, _NAMES))})(?:\{{(.*)\}})?[ \t]+(\S+)", re.MULTILINE
)
_WHOLE_LABEL: Final = re.compile(r'(\w+)="(\d{1,15})"')
