"""What readers of a simulated cluster saw: tokens, refusals, and where requests went."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.base.events import Arrive, Emit, Finish, Reject
from headrace.core.base.types import Ns, SeqId, WorkerId
from headrace.core.router.events import WorkerUp
from headrace.core.router.front_events import Forward, FrontEffect, FrontEvent
from headrace.sim.cluster import Cluster, ClusterReport, simulate_cluster


@dataclass
class Fates:
    tokens: dict[SeqId, list[int]] = field(default_factory=dict)
    rejects: dict[SeqId, Reject] = field(default_factory=dict)
    places: dict[SeqId, list[str]] = field(default_factory=dict)  # names of workers, in order
    names: dict[WorkerId, str] = field(default_factory=dict)
    report: ClusterReport = field(init=False)

    def observe(self, now: Ns, event: FrontEvent, effects: Sequence[FrontEffect]) -> None:
        if isinstance(event, WorkerUp):
            self.names[event.worker_id] = event.name
        for effect in effects:
            match effect:
                case Forward(worker_id, Arrive(seqs)):
                    for spec in seqs:
                        self.places.setdefault(spec.seq_id, []).append(self.names[worker_id])
                case Emit(seq_id, new):
                    self.tokens.setdefault(seq_id, []).extend(new)
                case Finish(seq_id):
                    assert len(self.tokens[seq_id]) == effect.num_output_tokens
                case Reject(seq_id):
                    self.rejects[seq_id] = effect
                case _:
                    pass


def fates_of(cluster: Cluster) -> Fates:
    fates = Fates()
    fates.report = simulate_cluster(cluster, observe=fates.observe)
    return fates
