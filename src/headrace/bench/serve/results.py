"""All that a benchmark found: as JSON, and request by request as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence

import msgspec

from headrace.bench.machine import Machine
from headrace.bench.serve.asked import Rules
from headrace.bench.serve.outcome import Latencies, Outcome
from headrace.bench.serve.report import Report
from headrace.bench.serve.run import SearchReport
from headrace.core.base.metrics import is_good
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S

COLUMNS = (
    "request_id",
    "due_s",
    "sent_s",
    "ended_s",
    "is_counted",
    "is_good",
    "fault",
    "detail",
    "ttft_ms",
    "tpot_ms",
    "max_itl_ms",
    "e2e_ms",
    "ttft_since_sent_ms",
    "e2e_since_sent_ms",
    "lag_ms",
    "asked_prompt_tokens",
    "prompt_tokens",
    "cached_tokens",
    "asked_output_tokens",
    "output_tokens",
    "events",
)


class ServeResults(msgspec.Struct, frozen=True, kw_only=True):
    """Of a search, `report` is the run of the highest load that held."""

    machine: Machine  # the client's
    url: str
    model: str
    endpoint: str
    asked: dict[str, object]  # every flag
    traffic: str  # in words
    seed: int
    num_left_out: int  # requests of the trace that the server would not take
    slo: Slo
    importance: str  # of the workload's figures, in words
    report: Report | None
    search: SearchReport | None

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def requests_csv(outcomes: Sequence[Outcome], rules: Rules) -> str:
    """A line for each request in the order in which they were due; latencies count from then, where
    nothing else is said. What was not measured is empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in sorted(outcomes, key=lambda one: one.due_ns):
        writer.writerow(_cells(one, rules))
    return text.getvalue()


def _cells(one: Outcome, rules: Rules) -> Iterable[object]:
    due, sent = Latencies.since(one.due_ns, one), Latencies.since(one.sent_ns, one)
    return (
        one.request_id,
        *(f"{at_ns / NS_PER_S:.6f}" for at_ns in (one.due_ns, one.sent_ns, one.ended_ns)),
        int(one.due_ns >= rules.warm_up_s * NS_PER_S),
        int(is_good(due, rules.slo)),
        one.fault,
        one.detail,
        *map(_ms, (due.ttft_ns, due.tpot_ns, due.max_itl_ns, due.e2e_ns)),
        *map(_ms, (sent.ttft_ns, sent.e2e_ns, one.lag_ns)),
        one.asked_prompt_tokens,
        one.num_prompt_tokens,
        one.num_cached_tokens,
        one.asked_output_tokens,
        one.num_output_tokens,
        one.num_events,
    )


def _ms(value_ns: float | None) -> str:
    return "" if value_ns is None else f"{value_ns / NS_PER_MS:.3f}"
