"""The same session in the simulator, on a machine that its pieces of the calibration tell of.

Decides which speed a part is simulated at; refuses to know how a simulation decides anything.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

import msgspec

from headrace.bench.calibrate import calibration_of
from headrace.bench.client import Answer
from headrace.bench.loads import WARM_UP
from headrace.bench.twin.cases import Case
from headrace.bench.twin.session import WARM_UP_SEED, Session
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.base.worker import Role
from headrace.core.config.schema import ClusterConfig, RouterConfig
from headrace.core.cost.calibration import Calibration
from headrace.core.cost.contention import slowness
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.source import Listed
from headrace.live.step_log import LoggedTimes
from headrace.sim.cluster import Cluster, simulate_cluster
from headrace.sim.pool import Pool

# Of virtual time: when the server is warmed up, and when the first piece begins.
WARM_UP_S, BEGIN_S = 1.0, 20.0
NUM_SEEDS: Final = 5
PATIENCE_NS: Final = NS_PER_S  # behind the last word to a client, for the last step to be logged

Sent = tuple[Answer, Sequence[int]]
"""A request that was answered, and its prompt's tokens."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A case's load as simulated, and what it was simulated with."""

    runs: list[list[RequestRecord]]  # by seeds, which draw how long single steps take
    calibration: Calibration  # of all pieces together
    slowness: list[float]  # of each piece, relative to all of them


def simulate_session(
    case: Case,
    session: Session,
    times: LoggedTimes,
    pieces: Sequence[Sequence[Sequence[int]]],
    parts: Sequence[Sequence[Sequence[int]]],
) -> Simulated:
    """`pieces` and `parts` hold the prompts' tokens. Each part is simulated with all that came
    before it, at the mean speed of the two pieces around it.
    """
    windows = [_within(times, answers) for answers in session.pieces]
    calibration = calibration_of(
        LoggedTimes.joined(windows),
        [answer for answers in session.pieces for answer in answers],
        num_workers=case.num_workers,
        source="the pieces around the parts of a load",
    )
    slow_downs = calibration.slow_down, calibration.slow_down_large
    slow = [slowness(one.steps, calibration.steps, *slow_downs) for one in windows]
    sent: list[Sent] = []
    runs: list[list[RequestRecord]] = [[] for _ in range(NUM_SEEDS)]
    for place, answers in enumerate(session.parts):
        sent += zip(session.pieces[place], pieces[place], strict=True)
        first = len(sent)
        sent += zip(answers, parts[place], strict=True)
        speed = (slow[place] + slow[place + 1]) / 2
        steps = calibration.steps.slower(speed)
        slowed = msgspec.structs.replace(calibration, steps=steps)
        for seed, records in enumerate(runs):
            records += run_simulated(case, slowed, sent, first, seed)
    return Simulated(runs=runs, calibration=calibration, slowness=slow)


def _within(times: LoggedTimes, answers: Sequence[Answer]) -> LoggedTimes:
    begin_ns = min(answer.sent_ns for answer in answers)
    end_ns = max(answer.last_token_ns for answer in answers)
    return times.between(begin_ns, Ns(end_ns + PATIENCE_NS))


def run_simulated(
    case: Case, calibration: Calibration, sent: Sequence[Sent], first: int, seed: int = 0
) -> list[RequestRecord]:
    """The requests at the moments at which they were really sent, after the same warm-up: engines
    learn from it how large their steps may be. Records of those from place `first` on.
    """
    begin_ns = round(BEGIN_S * NS_PER_S) - min(answer.sent_ns for answer, _ in sent)
    asked = [
        (begin_ns + answer.sent_ns, prompt, answer.num_output_tokens, str(place))
        for place, (answer, prompt) in enumerate(sent)
    ]
    specs = [
        SeqSpec(
            seq_id=SeqId(place),
            request_id=name,
            prompt_tokens=tuple(prompt),
            params=SamplingParams(max_tokens=num_output, ignore_eos=True),
            arrived_ns=Ns(at_ns),
        )
        for place, (at_ns, prompt, num_output, name) in enumerate(
            [*_warm_up(calibration.spec.vocab_size), *sorted(asked)]
        )
    ]
    records = simulate_cluster(cluster_of(case, calibration, specs, seed)).records
    return [record for record in records if record.request_id and int(record.request_id) >= first]


def _warm_up(vocab_size: int) -> list[tuple[int, Sequence[int], int, str]]:
    """Its lengths; the tokens are nobody else's."""
    rng = Random(WARM_UP_SEED)
    return [
        (
            round(WARM_UP_S * NS_PER_S),
            rng.choices(range(vocab_size), k=WARM_UP.num_prompt_tokens),
            WARM_UP.num_output_tokens,
            "",
        )
        for _ in range(WARM_UP.num_requests)
    ]


def cluster_of(
    case: Case, calibration: Calibration, specs: Sequence[SeqSpec], seed: int
) -> Cluster:
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
            residuals=calibration.residuals,
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
        slow_down_large=calibration.slow_down_large,
        seed=seed,
    )
    return cluster if calibration.kv_link is None else replace(cluster, link=calibration.kv_link)
