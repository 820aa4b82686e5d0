"""A worker set up as it once ran: recorded arrivals, recorded results, recorded step times."""

from collections.abc import Iterable

from headrace.adapters.executors.sim import RecordedSteps, StepOutcome
from headrace.core.base.events import Arrive, Cancel, StartStep, StepDone, StepFailed, Timer
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import Ns, StepId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.model import CostModel
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
