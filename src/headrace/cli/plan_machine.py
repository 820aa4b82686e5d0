"""What serves in a capacity question: a device of a data sheet, or a machine that was calibrated.

Decides what both are asked in the same words; refuses to know the question.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from headrace.cli.sim_cost import provenance_of, with_beyond
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.calibration import LARGE_STEP_TOKENS, Calibration
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.model import CostModel, StepShape
from headrace.live.cost_file import read_calibration
from headrace.plan.engines import Engine, Provenance
from headrace.plan.roofline import memory_warnings
from headrace.plan.service import ServiceTimes
from headrace.sim.watched import WatchedCost

if TYPE_CHECKING:
    from headrace.sim.setup import Device

USUAL_GPUS: Final = 12
USUAL_BATCH_SEQS: Final = 128
ROOM_BLOCKS: Final = 1 << 18  # of a simulated worker of a data sheet: 4M tokens


class Machine(Protocol):
    """Workers that are alike."""

    @property
    def cost(self) -> CostModel: ...
    @property
    def gpus_per_worker(self) -> int: ...
    @property
    def usual_gpus(self) -> int: ...
    @property
    def usual_batch_seqs(self) -> int: ...

    def kv_copy_s(self, prompt_tokens: int) -> float | None:
        """The hand-off of a prompt's KV, where it was measured."""
        ...

    def device(self) -> "Device": ...

    def warnings(self, service: ServiceTimes, num_seqs: float) -> tuple[str, ...]:
        """Of so many sequences that decode together on one worker."""
        ...

    def provenance(self, service: ServiceTimes) -> Provenance:
        """Once all that is asked was asked."""
        ...


@dataclass(frozen=True)
class DataSheetMachine:
    engine: Engine
    cost: DataSheetCostModel
    usual_gpus: int = USUAL_GPUS
    usual_batch_seqs: int = USUAL_BATCH_SEQS

    @property
    def gpus_per_worker(self) -> int:
        return self.cost.layout.tp

    def kv_copy_s(self, prompt_tokens: int) -> float | None:
        return None

    def device(self) -> "Device":
        """As the other models, the simulated workers have room for all KV."""
        from headrace.sim.setup import Device

        return Device.of_data_sheet(self.cost, num_blocks=ROOM_BLOCKS)

    def warnings(self, service: ServiceTimes, num_seqs: float) -> tuple[str, ...]:
        kv_bytes = num_seqs * self.cost.kv_bytes_per_gpu(service.context_tokens)
        return memory_warnings(self.cost, kv_bytes)

    def provenance(self, service: ServiceTimes) -> Provenance:
        return self.engine.provenance(
            self.cost,
            concurrency=service.design_batch_seqs,
            context_tokens=service.context_tokens,
        )


class InCompany:
    """The CostModel of a calibrated worker while so many are in a step on its machine."""

    def __init__(self, found: Calibration, num_workers: int) -> None:
        self._steps = found.steps
        small, large = found.slow_down, found.slow_down_large or found.slow_down
        place = min(num_workers, len(small)) - 1
        self._slow_down, self._slow_down_large = small[place], large[place]

    def step_ns(self, shape: StepShape) -> Ns:
        is_large = shape.num_tokens >= LARGE_STEP_TOKENS
        slow_down = self._slow_down_large if is_large else self._slow_down
        return Ns(round(self._steps.step_ns(shape) * slow_down))

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        return self._steps.copy_ns(num_bytes, link)


class CalibratedMachine:
    """Workers as they were calibrated, of which as many share the cores of a machine as did then.

    The formulas take all of these for busy: a step takes as long as in full company. A simulation
    sees who is in a step.
    """

    gpus_per_worker = 1

    def __init__(self, file: str, num_workers: int | None) -> None:
        self._found = read_calibration(Path(file).expanduser())
        self._file = file
        self._sharing = min(self._found.num_workers, num_workers or self._found.num_workers)
        self.cost = WatchedCost(InCompany(self._found, self._sharing), self._found.seen.largest)
        self._simulated: WatchedCost | None = None

    @property
    def usual_gpus(self) -> int:
        return self._found.num_workers

    @property
    def usual_batch_seqs(self) -> int:
        return min(USUAL_BATCH_SEQS, self._found.seen.largest.num_seqs)

    def kv_copy_s(self, prompt_tokens: int) -> float | None:
        link = self._found.kv_link
        if link is None:
            return None
        num_blocks = ceil(prompt_tokens / self._found.spec.block_size)
        return (link.latency_ns + num_blocks * link.byte_ns) / NS_PER_S

    def device(self) -> "Device":
        """With the memory that it has."""
        from headrace.sim.setup import Device

        device = Device.of_calibration(self._found, sharing=self._sharing)
        assert isinstance(device.cost, WatchedCost)
        self._simulated = device.cost
        return device

    def warnings(self, service: ServiceTimes, num_seqs: float) -> tuple[str, ...]:
        spec, longest = self._found.spec, service.prompt_tokens + service.output_tokens
        if longest > spec.max_model_len:
            return (f"requests of {longest:,} tokens: it takes {spec.max_model_len:,}",)
        room, tokens = spec.num_blocks * spec.block_size, num_seqs * service.context_tokens
        if tokens > room:
            return (f"{tokens:,.0f} tokens of KV do not fit: there is room for {room:,}",)
        return ()

    def provenance(self, service: ServiceTimes) -> Provenance:
        told = provenance_of(self._found, self._file, self._sharing)
        asked = self.cost.largest
        if self._simulated is not None:
            asked = asked.or_more(self._simulated.largest)
        return with_beyond(told, asked.beyond(self._found.seen.largest))
