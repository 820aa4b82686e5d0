"""Runs: one, or as many as a search takes.

Decides how a run is set up and taken down; refuses to know what its figures are shown as.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from headrace.bench.client import connect, now
from headrace.bench.serve.asked import Rules, Target, Traffic
from headrace.bench.serve.asker import Asker
from headrace.bench.serve.client_watch import ClientWatch
from headrace.bench.serve.discovery import is_gone
from headrace.bench.serve.driver import Driver
from headrace.bench.serve.intervals import Estimate
from headrace.bench.serve.outcome import Latencies, Outcome
from headrace.bench.serve.report import Report, report_of
from headrace.bench.serve.search import Search
from headrace.bench.serve.server_facts import facts_between, read_totals
from headrace.bench.serve.source import source_of
from headrace.bench.serve.verdict import GONE, none_good, slow_client
from headrace.bench.serve.wording import Wording
from headrace.core.base.metrics import is_good
from headrace.core.base.types import NS_PER_S
from headrace.server.listener import file_limit

TELL_EVERY_S = 1.0  # how far a run is, also while no request ends
SETTLE_S = 0.5  # between trials, for the server to notice that clients have left
SPARE_FILES = 64  # besides those of connections
RATE, CONCURRENCY = "rate", "concurrency"
NO_ANSWER = ("no connection", "broken off", "timed out")  # what a server that has died leaves


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    label: str
    num_ended: int
    num_good: int
    num_failed: int
    num_in_flight: int
    num_planned: int


OnProgress = Callable[[Progress], None]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a search."""

    level: float
    seed: int
    holds: bool
    is_cut_short: bool  # so many were not good that the rest could not have saved it
    num_counted: int
    attainment: Estimate
    ttft_ms_p99: float | None
    tpot_ms_p99: float | None
    faults: list[str]  # for which it does not hold either


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The bracket around the highest load that keeps the limits, and all that was tried."""

    of: str  # rate, in requests per second; or concurrency
    demanded_attainment: float
    held: float | None
    failed: float | None
    is_settled: bool  # or else the trials were used up, or the client was too slow
    trials: list[Trial]
    stopped_by: str = ""  # a client that was too slow, a server that is gone, or whoever runs it


@dataclass
class Bench:
    """Runs against one target, under one set of rules."""

    target: Target
    rules: Rules
    words: Sequence[str]
    metrics_url: str
    on_progress: OnProgress
    outcomes: list[Outcome] = field(default_factory=list)  # of the last run
    stopped_by: str = ""
    _driver: Driver | None = field(default=None, init=False)

    def stop(self, reason: str) -> None:
        """End early, with the figures of what has been answered."""
        self.stopped_by = reason
        if self._driver is not None:
            self._driver.stop()

    async def measure(self, traffic: Traffic, label: str = "") -> Report:
        """One run to its end."""
        report, _ = await self._run(traffic, label, gives_up=False)
        if fault := none_good(report.num_counted, report.since_due.num_good, report.faults):
            report.faults.append(fault)
        return report

    async def search(
        self, traffic: Traffic, of: str, start: float, num_trials: int
    ) -> tuple[SearchReport, Report | None, list[Outcome]]:
        """The bracket, and the run of the highest level that held with its outcomes. Each trial has
        a seed of its own, so that nothing of it is in a prefix cache yet.
        """
        search = Search(start, num_trials=num_trials, is_whole=of == CONCURRENCY)
        trials: list[Trial] = []
        best: tuple[Report | None, list[Outcome]] = (None, [])
        stopped_by = ""
        while (level := search.next_level()) is not None and not (stopped_by or self.stopped_by):
            seed = traffic.seed + len(trials)
            trial_traffic = (
                traffic.at_rate(level, seed)
                if of == RATE
                else traffic.at_concurrency(round(level), seed)
            )
            report, is_cut = await self._run(trial_traffic, f"{of} {level:.3g}", gives_up=True)
            if self.stopped_by:
                break  # its last trial has no end, and is none
            trial = self._trial(level, seed, report, is_cut_short=is_cut)
            trials.append(trial)
            search.tell(level, holds=trial.holds)
            if trial.holds:
                best = report, self.outcomes
            stopped_by = slow_client(report.client, self.rules)
            stopped_by = GONE if GONE in report.faults else stopped_by
            await asyncio.sleep(SETTLE_S)
        found = SearchReport(
            of=of,
            demanded_attainment=self.rules.attainment,
            held=search.held,
            failed=search.failed,
            is_settled=search.is_settled,
            trials=trials,
            stopped_by=self.stopped_by or stopped_by,
        )
        return found, *best

    def _trial(self, level: float, seed: int, report: Report, *, is_cut_short: bool) -> Trial:
        ttft, tpot = report.since_due.ttft_ms.p99, report.tpot_ms.p99
        attainment = report.since_due.attainment
        return Trial(
            level=level,
            seed=seed,
            holds=not is_cut_short
            and not report.faults
            and attainment.value >= self.rules.attainment,
            is_cut_short=is_cut_short,
            num_counted=report.num_counted,
            attainment=attainment,
            ttft_ms_p99=ttft.value if ttft else None,
            tpot_ms_p99=tpot.value if tpot else None,
            faults=report.faults,
        )

    async def _run(self, traffic: Traffic, label: str, *, gives_up: bool) -> tuple[Report, bool]:
        """The report, and whether the run was cut short because it could not hold any more."""
        wording = Wording(self.words)
        source = source_of(traffic, wording)
        room = min(self.target.max_in_flight, file_limit() - SPARE_FILES)
        target = self.target
        async with connect(
            timeout_s=target.timeout_s, is_reused=target.reuses_connections
        ) as session:
            before = await read_totals(session, self.metrics_url)
            async with ClientWatch(self.rules.warm_up_s) as watch:
                asker = Asker(session, target, wording, now())
                tally = _Tally(traffic, self.rules, label, self.on_progress)
                driver = Driver(
                    asker, traffic, source, wording, on_end=tally.add, max_in_flight=room
                )
                tally.driver, tally.gives_up = driver, gives_up
                self._driver = driver
                async with tally.telling():
                    if not self.stopped_by:
                        await driver.run()
            after = await read_totals(session, self.metrics_url)
        self.outcomes = driver.outcomes
        client = watch.facts(
            num_events=sum(one.num_events for one in driver.outcomes),
            most_in_flight=driver.most_in_flight,
        )
        server = facts_between(before, after)
        report = report_of(
            driver.outcomes, traffic, self.rules, client, server, num_left=driver.num_left
        )
        if self.stopped_by:
            report.warnings.insert(0, _cut_words(self.stopped_by, driver.num_left))
        elif any(one.fault in NO_ANSWER for one in driver.outcomes) and await is_gone(target):
            report.faults.append(GONE)
        return report, tally.has_given_up


def _cut_words(stopped_by: str, num_left: int) -> str:
    return (
        f"the run was ended early by {stopped_by}: requests under way ({num_left}), the "
        "slow ones more than others, are in no figure"
    )


class _Tally:
    """Hears of every end; stops a run that cannot hold any more."""

    driver: Driver

    def __init__(self, traffic: Traffic, rules: Rules, label: str, on_progress: OnProgress) -> None:
        self._rules = rules
        self._label = label
        self._on_progress = on_progress
        self._warm_up_ns = rules.warm_up_s * NS_PER_S
        self._num_planned = traffic.num_planned
        # How many requests there will be is known only where their number is what ends the run.
        self._most_bad = (
            (1.0 - rules.attainment) * traffic.num_planned
            if traffic.duration_s is None
            else float("inf")
        )
        self._num_ended = self._num_good = self._num_failed = self._num_bad = 0
        self.gives_up = False
        self.has_given_up = False

    def add(self, one: Outcome) -> None:
        good = is_good(Latencies.since(one.due_ns, one), self._rules.slo)
        self._num_ended += 1
        self._num_good += good
        self._num_failed += bool(one.fault)
        self._num_bad += not good and one.due_ns >= self._warm_up_ns
        if self.gives_up and self._num_bad > self._most_bad:
            self.has_given_up = True
            self.driver.stop()
        self._tell()

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        async def now_and_then() -> None:
            while True:
                await asyncio.sleep(TELL_EVERY_S)
                self._tell()

        task = asyncio.create_task(now_and_then())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _tell(self) -> None:
        self._on_progress(
            Progress(
                label=self._label,
                num_ended=self._num_ended,
                num_good=self._num_good,
                num_failed=self._num_failed,
                num_in_flight=self.driver.num_in_flight,
                num_planned=self._num_planned,
            )
        )
