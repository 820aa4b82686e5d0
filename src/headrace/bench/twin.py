"""Live against simulated: the same requests through a real server and through the simulator.

    python -m headrace.bench.twin [--out FILE] [NAME ...]

calibrates servers of one and of three workers on the calibration load (`bench/calibrate.py`), then
offers loads that the calibration has not seen to real servers, in an open loop, and to the
simulator, with the same prompts, lengths and moments of sending. Decides the loads and how the two
sides are compared; refuses to know how either of them serves.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final

import msgspec

from headrace.bench.calibrate import fit, record
from headrace.bench.client import Answer
from headrace.bench.loads import WARM_UP, Target, warm_up
from headrace.bench.machine import Machine, machine
from headrace.bench.offered import Ask, offer
from headrace.bench.prompts import Encode, PromptWriter
from headrace.bench.server import served_model, serving
from headrace.bench.suite import tokenizer_of
from headrace.core.base.errors import HeadraceError
from headrace.core.base.metrics import per_second, percentile
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, SeqId
from headrace.core.base.worker import Role
from headrace.core.config.schema import ClusterConfig, RouterConfig
from headrace.core.cost.calibration import Calibration
from headrace.core.workload.source import Listed
from headrace.models.hub import resolve_model
from headrace.sim.cluster import Cluster, simulate_cluster
from headrace.sim.cluster_worker import Pool

# Of virtual time: when the server is warmed up, and when the load begins.
WARM_UP_S, BEGIN_S = 1.0, 20.0
WARM_UP_SEED: Final = 99
MEAN_LIMIT, TAIL_LIMIT = 0.10, 0.20  # of the relative error that is aimed at


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that come at random (Poisson), several at once where `burst` is more than 1."""

    name: str
    rate_per_s: float
    span_s: float = 36.0
    prompt: int = 110  # mean tokens; gamma distributed
    output: int = 32
    shared: int = 0  # tokens that all prompts of a group begin with
    num_groups: int = 4
    burst: int = 1
    seed: int = 7


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A load and what serves it."""

    load: Load
    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def num_workers(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def name(self) -> str:
        workers = f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.mixed}"
        return f"{self.load.name}, {workers}"

    @property
    def serve(self) -> list[str]:
        """Arguments of `headrace serve`."""
        if self.prefill:
            roles = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
            return [*roles, "--handoff", "always"]
        return ["--workers", str(self.mixed)]


CHAT: Final = Load(name="chat", rate_per_s=1.2)
SHARED: Final = Load(name="shared prefix", rate_per_s=1.2, prompt=60, shared=240, output=24)
LONG: Final = Load(name="long prompts", rate_per_s=0.6, prompt=500, output=16)
BURSTS: Final = Load(name="bursts", rate_per_s=0.25, burst=5, prompt=80)
BUSY: Final = Load(name="near saturation", rate_per_s=2.2)
SPLIT: Final = Load(name="split", rate_per_s=1.0)
CASES: Final = (
    Case(load=CHAT, mixed=1),
    Case(load=SHARED, mixed=1),
    Case(load=LONG, mixed=1),
    Case(load=BURSTS, mixed=1),
    Case(load=BUSY, mixed=1),
    Case(load=CHAT, mixed=3),
    Case(load=SHARED, mixed=3),
    Case(load=LONG, mixed=3),
    Case(load=BURSTS, mixed=3),
    Case(load=SPLIT, prefill=1, decode=1),
    Case(load=SPLIT, prefill=1, decode=2),
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
    def of(cls, served: Sequence["Served"]) -> "Figures":
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


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request of either side."""

    sent_ns: int
    ttft_ns: float
    tpot_ns: float
    e2e_ns: float
    num_output_tokens: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    num_requests: int
    load_average: float  # of the machine, before
    live: Figures
    simulated: Figures
    errors: dict[str, float]  # simulated over live, minus 1
    missed: tuple[str, ...]  # of these, beyond the limits


class TwinReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    calibrations: dict[str, Calibration]
    rows: list[Row]


def asks_of(load: Load, encode: Encode) -> list[Ask]:
    rng = Random(f"{load.seed}/{load.name}")
    writer = PromptWriter(encode, load.seed)
    shared = [writer.write(load.shared) if load.shared else "" for _ in range(load.num_groups)]
    asks: list[Ask] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(load.rate_per_s)) < load.span_s:
        for _ in range(load.burst):
            num_new = _draw(rng, load.prompt, 8)
            prompt = writer.write(load.shared + num_new, after=rng.choice(shared))
            num_output = _draw(rng, load.output, 8)
            asks.append(Ask(at_s=at_s, prompt=prompt, num_output_tokens=num_output))
    return asks


def _draw(rng: Random, mean: float, least: int) -> int:
    """Gamma distributed, standard deviation 0.6 of the mean, at most four times it."""
    return max(least, round(min(4 * mean, rng.gammavariate(2.8, mean / 2.8))))


def run_live(case: Case, asks: Sequence[Ask], encode: Encode, model: Path) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="headrace-twin-") as folder:
        words = [*case.serve, "--model", str(model)]
        with serving(words, Path(folder) / "server.log") as served:
            target = Target(served.url, served_model(served.url))
            asyncio.run(warm_up(target, PromptWriter(encode, WARM_UP_SEED)))
            return asyncio.run(offer(target, asks))


def run_simulated(
    case: Case, calibration: Calibration, prompts: Sequence[Sequence[int]], live: Sequence[Answer]
) -> list[Served]:
    """The requests at the moments at which they were really sent, after the same warm-up: engines
    learn from it how large their steps may be.
    """
    first_ns = min(answer.sent_ns for answer in live)
    begin_ns = round(BEGIN_S * NS_PER_S)
    asked = [
        (begin_ns + answer.sent_ns - first_ns, prompt, answer.num_output_tokens)
        for prompt, answer in zip(prompts, live, strict=True)
    ]
    specs = [
        SeqSpec(
            seq_id=SeqId(place),
            request_id=str(place),
            prompt_tokens=tuple(prompt),
            params=SamplingParams(max_tokens=num_output, ignore_eos=True),
            arrived_ns=Ns(at_ns),
        )
        for place, (at_ns, prompt, num_output) in enumerate(
            [*_warm_up(calibration.spec.vocab_size), *sorted(asked, key=lambda one: one[0])]
        )
    ]
    records = simulate_cluster(cluster_of(case, calibration, specs)).records
    return [
        Served(
            sent_ns=record.arrived_ns,
            ttft_ns=record.ttft_ns or 0.0,
            tpot_ns=record.tpot_ns or 0.0,
            e2e_ns=record.e2e_ns,
            num_output_tokens=record.num_output_tokens,
        )
        for record in records
        if record.arrived_ns >= begin_ns
    ]


def _warm_up(vocab_size: int) -> list[tuple[int, Sequence[int], int]]:
    """Its lengths; the tokens are nobody else's."""
    rng = Random(WARM_UP_SEED)
    return [
        (
            round(WARM_UP_S * NS_PER_S),
            rng.choices(range(vocab_size), k=WARM_UP.num_prompt_tokens),
            WARM_UP.num_output_tokens,
        )
        for _ in range(WARM_UP.num_requests)
    ]


def cluster_of(case: Case, calibration: Calibration, specs: Sequence[SeqSpec]) -> Cluster:
    roles = ((case.mixed, Role.MIXED), (case.prefill, Role.PREFILL), (case.decode, Role.DECODE))
    pools = [
        Pool(
            num_workers=number,
            role=role,
            config=calibration.config,
            spec=calibration.spec,
            cost=calibration.steps,
            believed=calibration.believed,
            kv_block_bytes=int(calibration.kv_link is not None),
        )
        for number, role in roles
        if number
    ]
    is_alone = case.num_workers == 1
    cluster = Cluster(
        pools=pools,
        source=Listed(specs),
        # An engine alone has no router before it that would let requests wait.
        router=RouterConfig(worker_queue_ms=1e9) if is_alone else RouterConfig(),
        front=ClusterConfig(handoff="always" if case.prefill else "auto"),
        message_ms=0.0 if is_alone else 0.2,
        host=calibration.host,
        sharing=case.num_workers,
        slow_down=calibration.slow_down,
    )
    return cluster if calibration.kv_link is None else replace(cluster, link=calibration.kv_link)


def compare(name: str, load_average: float, live: Sequence[Answer], sim: Sequence[Served]) -> Row:
    seen = Figures.of(
        [
            Served(
                sent_ns=answer.sent_ns,
                ttft_ns=answer.ttft_ns,
                tpot_ns=answer.tpot_ns or 0.0,
                e2e_ns=answer.last_token_ns - answer.sent_ns,
                num_output_tokens=answer.num_output_tokens,
            )
            for answer in live
        ]
    )
    said = Figures.of(sim)
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
        live=seen,
        simulated=said,
        errors=errors,
        missed=missed,
    )


def measure_all(names: Sequence[str], report: Callable[[Row], None]) -> TwinReport:
    """Every case, or those named. Takes a quarter of an hour on a laptop.

    Machines drift: servers are calibrated before the cases that they serve and after them.
    """
    facts = machine()
    path = resolve_model("")
    encode = tokenizer_of(path).encode
    calibrations: dict[str, Calibration] = {}
    rows: list[Row] = []
    for workers in (1, 3):
        cases = [
            case
            for case in CASES
            if (case.num_workers == 1) == (workers == 1) and (not names or case.name in names)
        ]
        if not cases:
            continue
        recorded = [record(["--workers", str(workers)])]
        served = []
        for case in cases:
            asks = asks_of(case.load, encode)
            load_average = os.getloadavg()[0]
            try:
                served.append((case, asks, load_average, run_live(case, asks, encode, path)))
            except HeadraceError as error:  # the other cases are worth having
                print(f"left out: {case.name}: {error}", file=sys.stderr)
        recorded.append(record(["--workers", str(workers)]))
        calibration = calibrations[f"{workers} workers"] = fit(recorded)
        for case, asks, load_average, live in served:
            sim = run_simulated(case, calibration, [encode(ask.prompt) for ask in asks], live)
            rows.append(compare(case.name, load_average, live, sim))
            report(rows[-1])
    return TwinReport(machine=facts, calibrations=calibrations, rows=rows)


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


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.twin", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; none = all")
    parser.add_argument("--out", type=Path, help="file for the JSON; the table lies beside it")
    asked = parser.parse_args(arguments)
    known = [case.name for case in CASES]
    if unknown := [name for name in asked.names if name not in known]:
        sys.exit(f"no such case: {unknown[0]}; known: {'; '.join(known)}")
    print(head(), flush=True)
    found = measure_all(asked.names, lambda row: print(line(row), flush=True))
    if asked.out:
        data = msgspec.json.format(msgspec.json.encode(found), indent=2)
        asked.out.write_bytes(data + b"\n")
        table = "\n".join([head(), *map(line, found.rows)])
        asked.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
