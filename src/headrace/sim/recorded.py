"""What an event log tells a simulation: a worker as it once ran, or what its steps took."""

from collections.abc import Iterable, Iterator

from headrace.adapters.executors.sim import RecordedSteps, StepOutcome
from headrace.core.base.events import Arrive, Cancel, StartStep, StepDone, StepFailed, Timer
from headrace.core.base.plan import StepPlan, WorkerSpec
from headrace.core.base.types import Ns, StepId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.engine.trace import Frame
from headrace.sim.world import WorkerSetup


def recorded_setup(
    config: WorkerConfig, spec: WorkerSpec, cost: CostModel, frames: Iterable[Frame]
) -> WorkerSetup:
    """What reached the recorded worker from outside, over an executor that repeats its steps.

    A step takes from the event that started it, or that ended the step before it, to the event that
    ended it, as the driver saw them; so a simulation under the recorded configuration meets every
    event in the recorded order.
    """
    inputs: list[tuple[Ns, Arrive | Cancel | Timer]] = []
    started_ns: dict[StepId, Ns] = {}
    outcomes: dict[StepId, StepOutcome] = {}
    ended_ns = Ns(0)  # the last step
    for frame in frames:
        match frame.event:
            case Arrive() | Cancel() | Timer():
                inputs.append((frame.now, frame.event))
            case StepDone() | StepFailed():
                event = frame.event
                step_id = event.result.step_id if isinstance(event, StepDone) else event.step_id
                outcomes[step_id] = event, Ns(frame.now - max(ended_ns, started_ns[step_id]))
                ended_ns = frame.now
        for effect in frame.effects:
            if isinstance(effect, StartStep):
                started_ns[effect.plan.step_id] = frame.now
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
