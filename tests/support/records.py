"""Records of requests, where a test cares for some of their fields only."""

from typing import Any

from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import Ns, SeqId
from headrace.core.telemetry.parts import TimeParts
from headrace.core.telemetry.record import ItlSummary, RequestRecord


def record_of(seq_id: SeqId, **fields: Any) -> RequestRecord:
    """Of a request that ended with one token, and of whose times nothing is known."""
    known: dict[str, Any] = {
        "request_id": "r",
        "seq_id": seq_id,
        "arrived_ns": Ns(0),
        "admitted_ns": None,
        "first_token_ns": None,
        "finished_ns": Ns(0),
        "reason": FinishReason.STOP,
        "num_prompt_tokens": 10,
        "num_output_tokens": 1,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "ttft_ns": None,
        "tpot_ns": None,
        "e2e_ns": Ns(0),
        "itl": ItlSummary(0, Ns(0), Ns(0), ()),
        "slo": Slo(),
        "time": TimeParts(),
        "ttft_time": None,
        "worst_gap_time": None,
    }
    return RequestRecord(**{**known, **fields})
