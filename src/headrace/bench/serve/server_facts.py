"""What the server itself counted during a run: the difference of its /metrics page.

Knows headrace's names and those of vLLM; a server without either has no facts.
"""

from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S: Final = 5.0
MAX_PAGE_BYTES: Final = 16 << 20
# What is read: by names of headrace, then of vLLM. Histograms by their sum and count.
_NAMES: Final = {
    "queried": ("headrace_prefix_queried_tokens_total", "vllm:prefix_cache_queries_total"),
    "hit": ("headrace_prefix_hit_tokens_total", "vllm:prefix_cache_hits_total"),
    "queue_s": ("headrace_queue_seconds_sum", "vllm:request_queue_time_seconds_sum"),
    "queue_count": ("headrace_queue_seconds_count", "vllm:request_queue_time_seconds_count"),
    "ttft_s": ("headrace_ttft_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
    "ttft_count": ("headrace_ttft_seconds_count", "vllm:time_to_first_token_seconds_count"),
    "preemptions": ("headrace_preemptions_total", "vllm:num_preemptions_total"),
    "output_tokens": ("headrace_output_tokens_total", "vllm:generation_tokens_total"),
}

Totals = dict[str, float]


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of everything that the server did meanwhile, warm-up included. None = it does not say."""

    hit_rate: float | None  # prompt tokens found in the prefix cache, by those looked up
    queue_ms: float | None  # mean
    ttft_ms: float | None  # mean, from the server's side
    num_preemptions: int | None
    num_output_tokens: int | None


def totals_of(page: str) -> Totals:
    """Sums over all labels, by short name. Empty for a page that is none."""
    sums: Totals = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError):  # what the parser says of text of another kind
        return {}
    return {
        short: sums[name]
        for short, names in _NAMES.items()
        if (name := next((one for one in names if one in sums), None)) is not None
    }


def facts_between(before: Totals, after: Totals) -> ServerFacts | None:
    """None where nothing is known, or the server has begun to count anew."""
    more = {name: after[name] - before[name] for name in before if name in after}
    if not more or min(more.values()) < 0:
        return None

    def ratio(part: str, whole: str, scale: float = 1.0) -> float | None:
        return scale * more[part] / more[whole] if more.get(whole) and part in more else None

    def count(name: str) -> int | None:
        return round(more[name]) if name in more else None

    return ServerFacts(
        hit_rate=ratio("hit", "queried"),
        queue_ms=ratio("queue_s", "queue_count", 1000.0),
        ttft_ms=ratio("ttft_s", "ttft_count", 1000.0),
        num_preemptions=count("preemptions"),
        num_output_tokens=count("output_tokens"),
    )


async def read_totals(session: "aiohttp.ClientSession", url: str) -> Totals:
    """Empty where there is no such page."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(url, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                return {}
            page = await response.content.read(MAX_PAGE_BYTES)
            while piece := await response.content.read(MAX_PAGE_BYTES):
                page += piece
                if len(page) > MAX_PAGE_BYTES:
                    return {}
            return totals_of(page.decode("utf-8", "replace"))
    except (aiohttp.ClientError, OSError, TimeoutError):
        return {}
