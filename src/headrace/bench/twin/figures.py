"""What both sides came to, side by side: figures, their errors, and a table of them.

Decides what is compared and when it is near enough; refuses to know where requests were served.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Final

import msgspec

from headrace.bench.client import Answer
from headrace.core.base.metrics import per_second, percentile
from headrace.core.base.types import NS_PER_MS, Ns
from headrace.core.telemetry import RequestRecord

MEAN_LIMIT, TAIL_LIMIT = 0.10, 0.20  # of the relative error that is aimed at


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request of either side."""

    sent_ns: int
    ttft_ns: float
    tpot_ns: float
    e2e_ns: float
    num_output_tokens: int

    @classmethod
    def of_answer(cls, answer: Answer) -> "Served":
        return cls(
            sent_ns=answer.sent_ns,
            ttft_ns=answer.ttft_ns,
            tpot_ns=answer.tpot_ns or 0.0,
            e2e_ns=answer.last_token_ns - answer.sent_ns,
            num_output_tokens=answer.num_output_tokens,
        )

    @classmethod
    def of_record(cls, record: RequestRecord) -> "Served":
        return cls(
            sent_ns=record.arrived_ns,
            ttft_ns=record.ttft_ns or 0.0,
            tpot_ns=record.tpot_ns or 0.0,
            e2e_ns=record.e2e_ns,
            num_output_tokens=record.num_output_tokens,
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one side; means and 99th percentiles over requests."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    output_tokens_per_s: float
    ttft_ms_p99: float
    tpot_ms_p99: float
    e2e_ms_p99: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> "Figures":
        def both(values: Sequence[float]) -> tuple[float, float]:
            return fmean(values), float(percentile(sorted(values), 0.99))

        ttft = both([one.ttft_ns / NS_PER_MS for one in served])
        tpot = both([one.tpot_ns / NS_PER_MS for one in served])
        e2e = both([one.e2e_ns / NS_PER_MS for one in served])
        span_ns = max(o.sent_ns + o.e2e_ns for o in served) - min(o.sent_ns for o in served)
        num_tokens = sum(one.num_output_tokens for one in served)
        return cls(
            ttft_ms=ttft[0],
            tpot_ms=tpot[0],
            e2e_ms=e2e[0],
            output_tokens_per_s=per_second(num_tokens, Ns(round(span_ns))),
            ttft_ms_p99=ttft[1],
            tpot_ms_p99=tpot[1],
            e2e_ms_p99=e2e[1],
        )

    @classmethod
    def folded(
        cls, fold: Callable[[Iterable[float]], float], several: Sequence["Figures"]
    ) -> "Figures":
        return cls(
            **{
                name: fold([getattr(one, name) for one in several])
                for name in cls.__struct_fields__
            }
        )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    num_requests: int
    load_average: float  # of the machine, before
    slowness: list[float]  # of each piece of the calibration, relative to all of them
    live: Figures
    simulated: Figures  # means over seeds
    simulated_low: Figures  # each the least of a seed
    simulated_high: Figures
    errors: dict[str, float]  # simulated over live, minus 1
    missed: tuple[str, ...]  # of these, beyond the limits


def compare(
    name: str,
    live: Sequence[Served],
    sim: Sequence[Sequence[Served]],
    *,
    load_average: float = 0.0,
    slowness: Sequence[float] = (),
) -> Row:
    """`sim` holds the same requests as often as there were seeds."""
    seen, runs = Figures.of(live), [Figures.of(one) for one in sim]
    said = Figures.folded(fmean, runs)
    errors = {
        figure: getattr(said, figure) / getattr(seen, figure) - 1.0
        for figure in Figures.__struct_fields__
    }
    missed = tuple(
        figure
        for figure, error in errors.items()
        if abs(error) > (TAIL_LIMIT if figure.endswith("p99") else MEAN_LIMIT)
    )
    return Row(
        case=name,
        num_requests=len(live),
        load_average=load_average,
        slowness=list(slowness),
        live=seen,
        simulated=said,
        simulated_low=Figures.folded(min, runs),
        simulated_high=Figures.folded(max, runs),
        errors=errors,
        missed=missed,
    )


COLUMNS: Final = {
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "e2e_ms": "E2E ms",
    "output_tokens_per_s": "tokens/s",
    "ttft_ms_p99": "TTFT p99",
    "tpot_ms_p99": "TPOT p99",
    "e2e_ms_p99": "E2E p99",
}


def head() -> str:
    """Of a table in Markdown; each cell is live, simulated, and the error in per cent."""
    names = ["load, workers", "requests", *COLUMNS.values()]
    return "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|"


def line(row: Row) -> str:
    cells = [row.case, str(row.num_requests)]
    for figure in COLUMNS:
        live, said = getattr(row.live, figure), getattr(row.simulated, figure)
        digits = 0 if live >= 100 else 1
        cell = f"{live:,.{digits}f} · {said:,.{digits}f} · {100 * row.errors[figure]:+.0f}"
        cells.append(f"**{cell}**" if figure in row.missed else cell)
    return "| " + " | ".join(cells) + " |"


def hits(rows: Sequence[Row]) -> str:
    """How many cells are near enough."""
    words = []
    for what, is_tail in (("means and throughput", False), ("p99", True)):
        figures = [figure for figure in COLUMNS if figure.endswith("p99") == is_tail]
        near = sum(figure not in row.missed for row in rows for figure in figures)
        limit = TAIL_LIMIT if is_tail else MEAN_LIMIT
        words.append(f"{near} of {len(rows) * len(figures)} cells of {what} within {limit:.0%}")
    return "; ".join(words)
