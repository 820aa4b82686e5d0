"""`headrace plan claims`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import msgspec
from rich.table import Table

from headrace.cli.output import report_note
from headrace.cli.plan_answer import check_plot, give, right_aligned
from headrace.cli.plan_flags import AnswerFlags
from headrace.cli.plan_target import check_range
from headrace.cli.sim import read_trace
from headrace.cli.sim_progress import showing
from headrace.core.base.errors import ConfigError
from headrace.plan.picture import Span, SpanChart
from headrace.sim.claims import Claim, Effort, batching
from headrace.sim.claims_apart import distserve
from headrace.sim.claims_splitwise import splitwise
from headrace.sim.claims_traces import hits, mooncake, routing
from headrace.sim.progress import Seen

CLAIMS: Final[dict[str, Callable[[Effort], Iterator[Claim]]]] = {
    "batching": batching,
    "distserve": distserve,
    "splitwise": splitwise,
    "mooncake": mooncake,
    "routing": routing,
    "hits": hits,
}
OF_TRACES: Final = ("mooncake", "hits")


def claims(
    names: Sequence[str], trace: str | None, requests: int, seed: int, answer: AnswerFlags
) -> int:
    check_plot(answer)
    check_range("--requests", requests, 20, 1e7)
    for name in names:
        if name not in CLAIMS:
            raise ConfigError(f"unknown claim {name!r}", hint="known: " + ", ".join(CLAIMS))
        if name in OF_TRACES and trace is None:
            raise ConfigError(
                f"{name} is about Mooncake's conversation trace", hint="name its file by --trace"
            )
    if not names:
        names = [name for name in CLAIMS if trace is not None or name not in OF_TRACES]
    read = tuple(read_trace(trace)) if trace is not None else ()
    effort = Effort(num_requests=requests, seed=seed, trace=read)
    found: list[Claim] = []
    for name in names:
        report_note(f"{name} …")
        watched = msgspec.structs.replace(effort, watching=partial(_showing, name))
        found += CLAIMS[name](watched)
    figures = {"requests": requests, "seed": seed, "claims": found}
    code = give(figures, [claim_table(found)], claim_chart(found), answer)
    if not answer.json:
        for claim in found:
            report_note(f"{claim.name}: {claim.setting}. {claim.gap}. [{claim.source}]")
    return code


def _showing(claim: str, run: str, num_requests: int) -> AbstractContextManager[Seen]:
    return showing(f"{claim}, {run}", num_requests)


def claim_table(found: Sequence[Claim]) -> Table:
    table = right_aligned(
        "what the field claims, and the simulator says", "claim", "published", "here"
    )
    for claim in found:
        table.add_row(claim.name, claim.published, f"{claim.ours:.2f} {claim.unit}")
    return table


def claim_chart(found: Sequence[Claim]) -> SpanChart:
    return SpanChart(
        title="What the field claims, and the simulator says",
        x_label="how many times as much; shares in per cent",
        range_label="published",
        figure_label="here",
        spans=[
            Span(
                label=claim.name,
                low=min(claim.published_figures),
                high=max(claim.published_figures),
                at=claim.ours,
                words=f"{claim.ours:.2f} {claim.unit}",
            )
            for claim in found
        ],
    )
