"""What each pool did since the last look, as an autoscaler wants to know it.

Decides what counts for which pool and which worker; refuses to know what follows from it. Pure. A
request of n choices counts as n: what they share shows as a hit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headrace.core.autoscaler.events import PoolWindow, Quantiles, ReplicaLoad
from headrace.core.base.events import Admitted, Arrive, EngineEffect, EngineEvent, Reject
from headrace.core.base.metrics import percentile
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.telemetry import RequestRecord, Telemetry

_SHARES: Final = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class _Life:
    """A sequence that has not ended."""

    num_prompt: int
    role: Role  # of the pool where it is, or waits
    counted: set[Role] = field(default_factory=set)  # pools to which it has come
    workers: dict[Role, WorkerId] = field(default_factory=dict)  # the last one of each


@dataclass(slots=True)
class _Tally:
    """Of a pool, since the last window."""

    begin_ns: Ns
    last_hit_rate: float
    num_arrivals: int = 0
    num_prompt: int = 0  # tokens that arrived
    num_queried: int = 0  # prompt tokens of those that were admitted
    num_hits: int = 0
    num_ended: int = 0
    num_output: int = 0
    samples: dict[WorkerId, list[RequestRecord]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_queried if self.num_queried else self.last_hit_rate


class PoolWindows:
    """Sequences count for the pool that answers requests as soon as they arrive, and for another
    one when they are sent there. `observe` is an Engine's observer; `slo` judges requests that
    state no limits.
    """

    def __init__(self, now: Ns, roles: Collection[Role], slo: Slo) -> None:
        self.home: Final = Role.MIXED if Role.MIXED in roles else Role.DECODE
        self._tallies = {role: _Tally(now, 0.0) for role in roles}
        self._lives: dict[SeqId, _Life] = {}
        self._telemetry = Telemetry(slo, FittedCostModel.prior())

    def sent(self, worker_id: WorkerId, role: Role, seqs: Sequence[SeqSpec]) -> None:
        """These go to this worker, of that role."""
        for spec in seqs:
            life = self._life(spec)
            life.role, life.workers[role] = role, worker_id
            self._arrive(life)

    def observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        self.note(event, effects)
        for record in self._telemetry.observe(now, event, effects):
            self.end(record)

    def note(self, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        """For whoever has records: all but what requests were when they ended."""
        if isinstance(event, Arrive):
            for spec in event.seqs:
                self._arrive(self._life(spec))
        for effect in effects:
            if isinstance(effect, Admitted) and (life := self._lives.get(effect.seq_id)):
                tally = self._tallies[life.role]
                tally.num_queried += life.num_prompt
                tally.num_hits += effect.num_cached_tokens
            elif isinstance(effect, Reject):
                self._lives.pop(effect.seq_id, None)

    def end(self, record: RequestRecord) -> None:
        life = self._lives.pop(record.seq_id, None)
        for role, worker_id in life.workers.items() if life else ():
            tally = self._tallies[role]
            tally.num_ended += 1
            tally.num_output += record.num_output_tokens
            tally.samples.setdefault(worker_id, []).append(record)

    def close(
        self,
        now: Ns,
        role: Role,
        loads: Mapping[WorkerId, ReplicaLoad],
        *,
        num_waiting: int,
        num_starting: int,
        num_draining: int,
    ) -> PoolWindow:
        """The window that ends now; the next one begins. `loads` are of the workers that serve."""
        tally = self._tallies[role]
        self._tallies[role] = _Tally(now, tally.hit_rate)
        return PoolWindow(
            role=role,
            span_ns=Ns(now - tally.begin_ns),
            num_arrivals=tally.num_arrivals,
            prompt_tokens=tally.num_prompt / max(1, tally.num_arrivals),
            output_tokens=tally.num_output / max(1, tally.num_ended),
            hit_rate=tally.hit_rate,
            num_waiting=num_waiting,
            num_starting=num_starting,
            num_draining=num_draining,
            replicas=tuple(
                _with_latencies(load, tally.samples.get(worker_id, []))
                for worker_id, load in loads.items()
            ),
        )

    def _life(self, spec: SeqSpec) -> _Life:
        return self._lives.setdefault(spec.seq_id, _Life(len(spec.prompt_tokens), self.home))

    def _arrive(self, life: _Life) -> None:
        if life.role not in life.counted:
            life.counted.add(life.role)
            tally = self._tallies[life.role]
            tally.num_arrivals += 1
            tally.num_prompt += life.num_prompt


def _with_latencies(load: ReplicaLoad, records: Sequence[RequestRecord]) -> ReplicaLoad:
    """ITL is a request's mean gap."""
    return msgspec.structs.replace(
        load,
        num_samples=len(records),
        num_good=sum(record.good for record in records),
        ttft_ms=_quantiles([one.ttft_ns for one in records if one.ttft_ns is not None]),
        itl_ms=_quantiles([one.tpot_ns for one in records if one.tpot_ns is not None]),
    )


def _quantiles(values_ns: Sequence[float]) -> Quantiles | None:
    if not values_ns:
        return None
    ordered = sorted(values_ns)
    return Quantiles(*(percentile(ordered, share) / NS_PER_MS for share in _SHARES))
