"""Outcomes of requests that nobody sent."""

from array import array
from collections.abc import Sequence
from typing import Any

from headrace.bench.serve.client_watch import ClientFacts
from headrace.bench.serve.intervals import Distribution
from headrace.bench.serve.outcome import Outcome
from headrace.core.base.types import NS_PER_MS, Ns


def outcome(
    due_ms: float = 0.0, tokens_ms: Sequence[float] = (100.0, 150.0, 200.0), **facts: Any
) -> Outcome:
    """Sent when it was due, with an event for each token, unless `facts` say something else."""
    end_ms = tokens_ms[-1] if tokens_ms else due_ms + 1.0
    given = {
        "request_id": f"r{due_ms:g}",
        "sent_ns": ns(due_ms),
        "ended_ns": ns(end_ms),
        "asked_prompt_tokens": 8,
        "asked_output_tokens": 16,
        "num_prompt_tokens": 8,
        "num_usage_tokens": len(tokens_ms),
        **facts,
    }
    times = array("q", [ns(at_ms) for at_ms in tokens_ms])
    return Outcome(due_ns=ns(due_ms), token_times_ns=times, **given)


def ns(milliseconds: float) -> Ns:
    return Ns(round(milliseconds * NS_PER_MS))


def client_facts(*, loop_lag_ms: Sequence[float] = (0.1,)) -> ClientFacts:
    return ClientFacts(
        cpu_share=0.1,
        cpu_us_per_event=10.0,
        loop_lag_ms=Distribution.of(loop_lag_ms),
        most_in_flight=1,
    )
