"""What an event log tells a simulation: a worker as it once ran, or what its steps took.

A simulation of it meets the recorded inputs, and its steps take what they took; everything else is
decided again.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from headrace.adapters.executors.sim import RecordedSteps, StepOutcome
from headrace.core.base.errors import ConfigError
from headrace.core.base.events import (
    Arrive,
    Cancel,
    EngineEffect,
    EngineEvent,
    StartStep,
    StepDone,
    StepFailed,
    Timer,
)
from headrace.core.base.plan import StepPlan, WorkerSpec
from headrace.core.base.types import Ns, StepId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.engine.trace import Frame
from headrace.sim.progress import Seen, unseen
from headrace.sim.world import WorkerSetup, World, simulate

_encode = msgspec.msgpack.Encoder().encode
_LOG_ENDS = "the log ends before this step does"


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """A log decided again, up to the first turn that is not as recorded; None stands for a turn
    that is missing on that side.
    """

    num_events: int  # alike
    num_steps: int  # planned within them
    is_equal: bool
    recorded: Frame | None = None
    simulated: Frame | None = None


class _Differs(Exception):
    """The simulation need not go on."""


class _Ended(Exception):
    """So does the log, in the middle of a step, as by a crash."""


def rerun(
    config: WorkerConfig,
    spec: WorkerSpec,
    cost: CostModel,
    frames: Sequence[Frame],
    seen: Seen = unseen,
) -> Rerun:
    """Simulate a recorded worker, and compare every event, its time and its effects."""
    alike: list[Frame] = []
    differing: list[Frame] = []

    def observe(_: int, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        frame = Frame(now, event, tuple(effects))
        place = len(alike)
        if place == len(frames) and isinstance(event, StepFailed) and event.error == _LOG_ENDS:
            raise _Ended
        # Bytes, since they also tell 1 from 1.0 and find a NaN equal to itself.
        if place == len(frames) or _encode(frame) != _encode(frames[place]):
            differing.append(frame)
            raise _Differs
        alike.append(frame)
        seen(Ns(now - frames[0].now))  # the recorded clock began long before

    try:
        world = World(workers=(recorded_setup(config, spec, cost, frames),), is_checked=False)
        simulate(world, observe)
    except (_Differs, _Ended):
        pass
    num = len(alike)
    is_equal = not differing and num == len(frames)
    return Rerun(
        num_events=num,
        num_steps=sum(isinstance(effect, StartStep) for one in alike for effect in one.effects),
        is_equal=is_equal,
        recorded=frames[num] if num < len(frames) else None,
        simulated=differing[0] if differing else None,
    )


def recorded_setup(
    config: WorkerConfig, spec: WorkerSpec, cost: CostModel, frames: Iterable[Frame]
) -> WorkerSetup:
    """What reached the recorded worker from outside, over an executor that repeats its steps.

    A step takes from the event that started it, or that ended the step before it, to the event that
    ended it, as the driver saw them; so a simulation under the recorded configuration meets every
    event in the recorded order. What the log does not see the end of ends, badly, after it.
    """
    inputs: list[tuple[Ns, Arrive | Cancel | Timer]] = []
    started_ns: dict[StepId, Ns] = {}
    outcomes: dict[StepId, StepOutcome] = {}
    ended_ns = now = Ns(0)  # the last step; the last frame
    for frame in frames:
        now = frame.now
        match frame.event:
            case Arrive() | Cancel() | Timer():
                inputs.append((frame.now, frame.event))
            case StepDone() | StepFailed():
                event = frame.event
                step_id = event.result.step_id if isinstance(event, StepDone) else event.step_id
                if step_id not in started_ns:
                    raise ConfigError(
                        f"the log is damaged: it has the end of step {step_id}, and no begin"
                    )
                outcomes[step_id] = event, Ns(frame.now - max(ended_ns, started_ns[step_id]))
                ended_ns = frame.now
        for effect in frame.effects:
            if isinstance(effect, StartStep):
                started_ns[effect.plan.step_id] = frame.now
    for step_id in started_ns.keys() - outcomes.keys():
        left_ns = Ns(now + 1 - max(ended_ns, started_ns[step_id]))
        outcomes[step_id] = StepFailed(step_id, _LOG_ENDS), left_ns
    return WorkerSetup(
        config=config,
        spec=spec,
        cost=cost,
        inputs=inputs,
        steps=RecordedSteps(outcomes),
        has_timers=False,  # they are among the inputs, at the times at which they rang
    )


def step_samples(frames: Iterable[Frame]) -> Iterator[tuple[StepShape, Ns]]:
    """Shape and duration of each step that ended well."""
    plans: dict[StepId, StepPlan] = {}
    for frame in frames:
        match frame.event:
            case StepDone(result):
                if (plan := plans.pop(result.step_id, None)) is not None:
                    yield StepShape.of(plan), result.elapsed_ns
            case StepFailed(step_id):
                plans.pop(step_id, None)
        for effect in frame.effects:
            if isinstance(effect, StartStep):
                plans[effect.plan.step_id] = effect.plan
