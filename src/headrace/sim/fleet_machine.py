"""Machines that were calibrated, as workers of a fleet.

Decides what bounds and simulations are told of them; refuses to know what is searched.
"""

from math import inf

from headrace.core.cost.calibration import Calibration
from headrace.core.cost.datasheet import StepTimes
from headrace.core.cost.hardware import Layout
from headrace.core.cost.model import StepShape
from headrace.plan.fleet import Constraint, Demand, Fault, Kind, WorkerKind
from headrace.plan.queueing import SPLIT
from headrace.sim.setup import Device
from headrace.sim.watched import WatchedCost

ONE_TOKEN = StepShape(1, 1, 1, 1, 1)


class CalibratedKind:
    """A machine with as many engines as it was calibrated with, which share its cores."""

    layout = Layout()
    num_gpus = 1  # a machine counts as one device

    def __init__(self, name: str, file: str, found: Calibration, usd_per_hour: float) -> None:
        self.name = name
        self.file = file
        self.found = found
        self.usd_per_hour = usd_per_hour
        self.device = Device.of_calibration(found)
        self._fixed_ns = found.steps.step_ns(ONE_TOKEN)

    @property
    def accelerator(self) -> str:
        return self.name

    @property
    def num_engines(self) -> int:
        return self.found.num_workers

    @property
    def parallelism(self) -> float:
        """In the best company, and by the steps that slow down least: bounds favour the fleet."""
        num = self.num_engines
        figures = [one for one in (self.found.slow_down, self.found.slow_down_large) if one]
        return max(
            busy / figure for one in figures for busy, figure in enumerate(one[:num], start=1)
        )

    @property
    def link_bytes_per_s(self) -> float:
        """Copies take what was measured of them."""
        return inf

    def times(self, shape: StepShape) -> StepTimes:
        """What no step can do without is overhead; the rest counts as arithmetic."""
        whole_ns = float(self.found.steps.step_ns(shape))
        fixed_ns = min(whole_ns, self._fixed_ns)
        return StepTimes(
            flop_ns=whole_ns - fixed_ns, memory_ns=0.0, link_ns=0.0, overhead_ns=fixed_ns
        )

    def seqs_that_fit(self, tokens_per_seq: float) -> int:
        spec = self.found.spec
        return int(spec.num_blocks * spec.block_size // tokens_per_seq)

    def fault(self, demand: Demand, mode: str) -> Fault | None:
        longest, most = demand.prompt_tokens + demand.output_tokens, self.device.max_model_len
        if longest > most:
            words = f"requests of {longest:,.0f} tokens: it takes {most:,}"
            return Fault(Constraint.MEMORY, words)
        if mode == SPLIT and self.found.kv_link is None:
            return Fault(
                Constraint.LINK,
                "copies of KV were not measured: calibrate with --serve='--prefill 1 --decode 1 "
                "--handoff always'",
            )
        return None

    def beyond(self) -> list[str]:
        """In words, which simulated steps were larger than any that was measured."""
        assert isinstance(self.device.cost, WatchedCost)
        return self.device.cost.beyond()

    def __str__(self) -> str:
        return self.name


def device_of(kind: WorkerKind, block_size: int) -> Device:
    """What an engine of it is in a simulation; one that was calibrated has its own blocks."""
    match kind:
        case CalibratedKind():
            return kind.device
        case Kind():
            return Device.of_data_sheet(kind.cost, block_size=block_size)
        case _:
            raise TypeError(f"no device is known for {kind}")
