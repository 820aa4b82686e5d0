"""What `headrace top` shows of a gateway, which computes nothing itself: its engines, and what it
adds to them.
"""

from typing import Any

from headrace.cli.top_reading import Reading, Span, number, percent
from headrace.core.base.names import one_line

_UP, _IN_FLIGHT = "headrace_engine_up", "headrace_engine_requests_in_flight"


def is_gateway(now: Reading) -> bool:
    return any(name == _UP for name, _ in now.samples)


def figures(now: Reading, before: Reading | None) -> dict[str, Any]:
    """As `top.figures`."""
    span = Span(now, before)
    engines = [
        {
            "name": name,
            "is_up": bool(now.value(_UP, engine=name)),
            "num_requests": round(now.value(_IN_FLIGHT, engine=name)),
        }
        for name in now.labels_of(_UP, "engine")
    ]
    return {
        "num_requests": sum(engine["num_requests"] for engine in engines),
        "num_waiting_requests": round(now.value("headrace_router_waiting_requests")),
        "requests_per_s": span.rate("headrace_router_dispatched_requests_total"),
        "prefix_hit_ratio": span.share(
            "headrace_router_hit_blocks_total", "headrace_router_queried_blocks_total"
        ),
        "num_indexed_blocks": round(now.value("headrace_router_indexed_blocks")),
        "first_byte_ms_mean": span.mean_ms("headrace_first_byte_seconds"),
        "num_retries": round(now.value("headrace_retries_total")),
        "num_broken_answers": round(now.value("headrace_broken_answers_total")),
        "num_rejected": round(now.value("headrace_router_rejected_requests_total")),
        "num_open_breakers": round(now.value("headrace_router_open_breakers")),
        "engines": engines,
    }


def facts(shown: dict[str, Any]) -> dict[str, dict[str, str]]:
    """In words."""
    return {
        "work": {
            "requests": f"{shown['num_requests']} at engines,"
            f" {shown['num_waiting_requests']} waiting,"
            f" {number(shown['requests_per_s'])}/s sent on",
            "KV": f"{percent(shown['prefix_hit_ratio'])} of prompts found,"
            f" {shown['num_indexed_blocks']} blocks known",
        },
        "latency": {"first byte": f"{number(shown['first_byte_ms_mean'])} ms"},
        "since start": {
            "asked again elsewhere": str(shown["num_retries"]),
            "broken answers": str(shown["num_broken_answers"]),
            "refused": str(shown["num_rejected"]),
        },
        "engines": {
            one_line(engine["name"]): f"{'up' if engine['is_up'] else 'down'},"
            f" {engine['num_requests']} requests"
            for engine in shown["engines"]
        }
        | (
            {"cut off after failures": str(shown["num_open_breakers"])}
            if shown["num_open_breakers"]
            else {}
        ),
    }
