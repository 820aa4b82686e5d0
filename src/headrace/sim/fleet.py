"""The search for a fleet: the cheapest workers that keep the limits of a traffic, by simulation.

Bounds refuse what cannot do (plan/fleet.py) and say where to begin; a walk over all seeds finds the
cheapest workers of each shape that hold; the best of these are looked at with their neighbours and
under other policies. Decides the order of trials; refuses to know how a fleet runs.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Final

import msgspec

from headrace.core.base.metrics import Metric
from headrace.core.telemetry import Cause
from headrace.plan.fleet import Bound, Refusal, Shape, bound
from headrace.plan.queueing import SPLIT
from headrace.sim.fleet_answer import FleetAnswer, answer_of, main_constraint
from headrace.sim.fleet_trial import (
    Cut,
    Fleet,
    Measured,
    Misses,
    Traffic,
    run_fleet,
    together,
)
from headrace.sim.progress import Watching, unwatched
from headrace.sim.summary import Summary

SLACK: Final = 1.25  # of the best fleet's price; what costs more than that is not looked at
NUM_AROUND: Final = 3  # shapes whose neighbours are measured
NUM_PAIRS: Final = 4  # of unlike workers that are looked at
MOST_IDLE: Final = 4  # times the workers that the bound asks for; more of them do not help


class FleetQuestion(msgspec.Struct, frozen=True, kw_only=True):
    shapes: tuple[Shape, ...]
    traffic: Traffic
    attainment: float = 0.95  # share of requests that keep every limit
    seeds: tuple[int, ...] = (0, 1, 2)
    policies: tuple[str, ...] = ("kv", "least_loaded", "round_robin")  # the search uses the first
    step_tokens: int = 2048
    block_size: int = 16
    max_gpus: int = 64
    kv_link_bytes_per_s: float = 0.0  # of each worker; 0 = as the data sheet says
    num_pairs: int = NUM_PAIRS


class _OutOfTime(Exception):
    pass


def search_fleet(
    question: FleetQuestion,
    say: Callable[[str], None] = lambda _: None,
    is_late: Callable[[], bool] = lambda: False,
    watching: Watching = unwatched,
) -> FleetAnswer:
    """`say` hears of each trial, `watching` of each run's requests. `is_late` is asked before each
    run; an answer that it cut short says so.
    """
    search = _Search(question, say, is_late, watching)
    is_complete = True
    try:
        search.run()
    except _OutOfTime:
        is_complete = False
    return answer_of(
        question.traffic,
        question.attainment,
        question.seeds,
        list(search.measured.values()),
        search.bounds,
        search.refused,
        num_runs=search.num_runs,
        is_complete=is_complete,
    )


class _Search:
    def __init__(
        self,
        question: FleetQuestion,
        say: Callable[[str], None],
        is_late: Callable[[], bool],
        watching: Watching,
    ) -> None:
        self.refused: list[Refusal] = []
        self.bounds: dict[str, Bound] = {}  # by the shape's name
        self.measured: dict[str, Measured] = {}  # by the fleet's name
        self.num_runs = 0
        self._question, self._say, self._is_late = question, say, is_late
        self._watching = watching
        self._tried: dict[str, Measured | Cut] = {}  # by the fleet's name
        self._runs: dict[tuple[str, int], Summary] = {}  # by the fleet's name and the seed

    def run(self) -> None:
        found: list[Fleet] = []
        for one in self._possible():
            least = min((fleet.usd_per_hour for fleet in found), default=inf)
            if one.usd_per_hour > least * SLACK:
                words = f"at least ${one.usd_per_hour:.2f} an hour; others hold for ${least:.2f}"
                self._refuse(one.shape, "price", words)
                continue
            fleet = self._fewest(one, least * SLACK)
            if fleet is not None:
                found.append(fleet)
        found.sort(key=lambda fleet: fleet.usd_per_hour)
        for fleet in found[:NUM_AROUND]:
            self._measure_around(fleet, SLACK * found[0].usd_per_hour)
        self._try_policies()

    def _possible(self) -> list[Bound]:
        """Cheapest first, so that dear ones are refused early. Of pairs of unlike workers, which
        are many, those that cannot be have no line of their own: what one side lacks is said where
        all are like it.
        """
        limit = self._question.max_gpus
        pairs: list[Bound] = []
        num_asked = 0
        for shape in self._question.shapes:
            found = bound(shape, self._question.traffic.demand)
            if shape.is_pair:
                num_asked += 1
                if isinstance(found, Bound) and found.num_gpus <= limit:
                    pairs.append(found)
            elif isinstance(found, Refusal):
                self.refused.append(found)
            elif found.num_gpus > limit:
                words = f"needs at least {found.num_gpus} devices, {limit} are allowed"
                self._refuse(shape, found.constraint, words)
            else:
                self.bounds[str(shape)] = found
        pairs.sort(key=lambda one: (one.usd_per_hour, one.usd_needed))
        kept = pairs[: self._question.num_pairs]
        self._refuse_pairs(num_asked - len(pairs), len(pairs) - len(kept))
        self.bounds |= {str(one.shape): one for one in kept}
        return sorted(self.bounds.values(), key=lambda one: one.usd_per_hour)

    def _refuse_pairs(self, num_impossible: int, num_dear: int) -> None:
        for number, constraint, reason in (
            (num_impossible, "either side", "what one of both cannot do, they cannot"),
            (num_dear, "price", f"the bounds of {self._question.num_pairs} others are lower"),
        ):
            if number:
                name = f"{number} pairs of unlike workers"
                self.refused.append(Refusal(shape=name, constraint=constraint, reason=reason))

    def _fewest(self, one: Bound, dearest: float) -> Fleet | None:
        """The cheapest numbers of workers that hold: up from the bound, where the misses say it is
        needed, down again, and sideways where prompts and answers are apart.
        """
        question = self._question
        fleet = Fleet(
            shape=one.shape,
            prefill_workers=one.prefill_workers,
            decode_workers=one.decode_workers,
            policy=question.policies[0],
            step_tokens=question.step_tokens,
            block_size=question.block_size,
            kv_link_bytes_per_s=question.kv_link_bytes_per_s,
        )
        while not self._holds(fleet):
            misses = self._tried[str(fleet)].misses
            larger = grown(fleet, misses)
            if excess := self._excess(larger, one, dearest):
                cost = f"{fleet.num_gpus} devices for ${fleet.usd_per_hour:.2f} an hour do not hold"
                self._refuse(one.shape, main_constraint(misses), f"{cost}; {excess}")
                return None
            fleet = larger
        while less := next(filter(self._holds, self._cheaper(fleet)), None):
            fleet = less
        return fleet

    def _excess(self, fleet: Fleet, one: Bound, dearest: float) -> str:
        """Why a fleet is not worth a trial; "" = it is."""
        if fleet.usd_per_hour > dearest:
            return "more cost more than others that hold"
        if fleet.num_gpus > self._question.max_gpus:
            return f"more than {self._question.max_gpus} are not allowed"
        if fleet.num_workers > MOST_IDLE * one.num_workers:
            return "and more would idle"
        return ""

    def _smaller(self, fleet: Fleet) -> Iterator[Fleet]:
        """With a worker less of a kind, where the bound allows it."""
        least = self.bounds[str(fleet.shape)]
        prefill, decode = fleet.prefill_workers, fleet.decode_workers
        if prefill > least.prefill_workers:
            yield fleet.resized(prefill - 1, decode)
        if decode > least.decode_workers:
            yield fleet.resized(prefill, decode - 1)

    def _cheaper(self, fleet: Fleet) -> Iterator[Fleet]:
        """Smaller ones, and of other splits nearby the largest that cost less."""
        yield from self._smaller(fleet)
        if not fleet.prefill_workers:
            return
        least, shape = self.bounds[str(fleet.shape)], fleet.shape
        for more in (-1, 1, -2, 2):
            prefill = fleet.prefill_workers + more
            left = fleet.usd_per_hour * (1.0 - 1e-9) - shape.usd_per_hour(prefill, 0)
            decode = int(left // shape.usd_per_hour(0, 1))
            if prefill >= least.prefill_workers and decode >= least.decode_workers:
                yield fleet.resized(prefill, decode)

    def _measure_around(self, fleet: Fleet, dearest: float) -> None:
        """What a front of cost against attainment needs: a worker less, and one more."""
        for smaller in self._smaller(fleet):
            self._measure(smaller)
        prefill, decode = fleet.prefill_workers, fleet.decode_workers
        larger = [fleet.resized(prefill, decode + 1)]
        if prefill:
            larger.append(fleet.resized(prefill + 1, decode))
        for one in larger:
            is_worth_it = one.usd_per_hour <= dearest and one.num_gpus <= self._question.max_gpus
            if is_worth_it and self._measure(fleet).attainment.mean < 1.0:
                self._measure(one)

    def _try_policies(self) -> None:
        """Under the best fleet, and under smaller ones that hold with them."""
        best = self._best()
        if best is None:
            return
        if best.num_engines < 2:
            self._refuse(best.shape, "policy", "one engine: every policy does the same")
            return
        for policy in self._question.policies[1:]:
            other = msgspec.structs.replace(best, policy=policy)
            self._measure(other)
            while less := next(filter(self._holds, self._cheaper(other)), None):
                other = less
        # What binds is seen with a worker less.
        if (last := self._best()) is not None and last != best:
            for smaller in self._smaller(last):
                self._measure(smaller)

    def _best(self) -> Fleet | None:
        target = self._question.attainment
        holding = [one for one in self.measured.values() if one.holds(target)]
        return min(holding, key=lambda one: one.rank).fleet if holding else None

    # ---- trials

    def _holds(self, fleet: Fleet) -> bool:
        """Over all seeds; given up when so many have missed that the rest could not save it."""
        question, name = self._question, str(fleet)
        if name not in self._tried:
            most = question.traffic.num_may_miss(question.attainment, len(question.seeds))
            self._try(fleet, most)
        found = self._tried[name]
        return isinstance(found, Measured) and found.holds(question.attainment)

    def _measure(self, fleet: Fleet) -> Measured:
        if str(fleet) not in self.measured:
            self._try(fleet, inf)
        return self.measured[str(fleet)]

    def _try(self, fleet: Fleet, num_may_miss: float) -> None:
        name, runs = str(fleet), list[Summary]()
        for seed in self._question.seeds:
            run = self._runs.get((name, seed)) or self._run(fleet, seed, num_may_miss)
            if isinstance(run, Cut):
                misses = (run.misses, *(one.num_misses_by_metric_and_cause for one in runs))
                self._tried[name] = Cut(misses=together(misses))
                self._say(f"{name}: < {self._question.attainment:.1%}")
                return
            num_may_miss -= run.num_requests - run.num_good
            runs.append(run)
            self._runs[name, seed] = run
        one = self._tried[name] = self.measured[name] = Measured(fleet=fleet, runs=tuple(runs))
        self._say(f"{name}: {one.attainment.mean:.1%} over {len(runs)} seeds")

    def _run(self, fleet: Fleet, seed: int, num_may_miss: float) -> Summary | Cut:
        if self._is_late():
            raise _OutOfTime
        self.num_runs += 1
        return run_fleet(
            fleet,
            self._question.traffic,
            seed,
            num_may_miss=num_may_miss,
            watching=self._watching,
        )

    def _refuse(self, shape: Shape, constraint: str, reason: str) -> None:
        self.refused.append(Refusal(shape=str(shape), constraint=str(constraint), reason=reason))


def grown(fleet: Fleet, misses: Misses) -> Fleet:
    """With a quarter more workers, at least one, of the kind that would mend most misses."""
    more = max(1, fleet.num_workers // 4)
    prefill, decode = fleet.prefill_workers, fleet.decode_workers
    if fleet.shape.mode != SPLIT:
        return fleet.resized(0, decode + more)
    num_decode = num_prefill = 0
    for metric, causes in misses.items():
        for cause, count in causes.items():
            is_decode = metric in (Metric.TPOT, Metric.ITL) or cause in (
                Cause.DECODE,
                Cause.DECODE_INTERFERENCE,
            )
            num_decode += count * is_decode
            num_prefill += count * (not is_decode)
    if num_decode > num_prefill:
        return fleet.resized(prefill, decode + more)
    return fleet.resized(prefill + more, decode)
