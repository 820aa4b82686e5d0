"""A cluster that somebody describes in a few figures: which workers, which limits, which faults.

Decides what stands for a device in a simulation; refuses to know what requests are.
"""

from dataclasses import replace

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import Slo
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig, SchedulerConfig, WorkerConfig
from headrace.core.cost.calibration import Calibration, Host, Residuals
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.cost.model import CostModel
from headrace.core.workload.source import Source
from headrace.plan.steps import kv_room_bytes
from headrace.sim.cluster import NO_LIMITS, Cluster, random_deaths
from headrace.sim.pool import EVEN, Pool
from headrace.sim.scaling import Autoscale
from headrace.sim.watched import WatchedCost

VOCAB = 1 << 15
FAULTS_UNTIL_S = 86_400.0  # workers die up to this time


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is, whatever its role."""

    cost: CostModel
    believed: FittedCostModel
    num_blocks: int
    block_size: int
    kv_block_bytes: int  # on the wire
    max_model_len: int
    scheduler: SchedulerConfig = SchedulerConfig()  # but for what a Layout says
    # What was measured around steps, where somebody measured it.
    host: Host = Host()
    sharing: int = 1  # workers on the cores of one machine
    slow_down: tuple[float, ...] = ()  # by how many of them are in a step
    slow_down_large: tuple[float, ...] = ()  # of large steps
    residuals: Residuals = EVEN
    kv_link: Link | None = None

    @classmethod
    def of_data_sheet(
        cls,
        cost: DataSheetCostModel,
        *,
        block_size: int = 16,
        max_model_len: int = 1 << 17,
        num_blocks: int | None = None,
    ) -> "Device":
        """Without a number of blocks, KV takes what weights and activations leave; with pipeline
        stages, the part of it that one of the batches under way in them has. Raises ConfigError
        where that is nothing.
        """
        per_block = cost.kv_bytes_per_gpu(block_size)
        if num_blocks is None:
            num_blocks = int(kv_room_bytes(cost) // per_block) // cost.layout.pp
        if num_blocks < 1:
            raise ConfigError(
                f"{cost.model.name} leaves no room for KV: {cost.accelerator.name}, {cost.layout}",
                hint="`headrace plan parallel` lists the layouts that fit",
            )
        layout = cost.layout
        return cls(
            cost=cost,
            believed=FittedCostModel.like(cost),
            num_blocks=num_blocks,
            block_size=block_size,
            kv_block_bytes=round(per_block * layout.tp * layout.pp),
            max_model_len=min(max_model_len, num_blocks * block_size),
        )

    @classmethod
    def of_calibration(cls, found: Calibration, *, sharing: int | None = None) -> "Device":
        """Without a number, as many workers share a machine as did when it was calibrated."""
        return cls(
            cost=WatchedCost(found.steps, found.seen.largest),
            believed=found.believed,
            num_blocks=found.spec.num_blocks,
            block_size=found.spec.block_size,
            kv_block_bytes=int(found.kv_link is not None),
            max_model_len=found.spec.max_model_len,
            scheduler=found.config.scheduler,
            host=found.host,
            sharing=sharing or found.num_workers,
            slow_down=found.slow_down,
            slow_down_large=found.slow_down_large,
            residuals=found.residuals,
            kv_link=found.kv_link,
        )

    def pool(self, num_workers: int, role: Role, scheduler: SchedulerConfig) -> Pool:
        return Pool(
            num_workers=num_workers,
            role=role,
            config=WorkerConfig(scheduler=scheduler),
            spec=WorkerSpec(
                model_digest="00" * 32,
                kv_dtype="bf16",
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                max_model_len=self.max_model_len,
                vocab_size=VOCAB,
            ),
            cost=self.cost,
            believed=self.believed,
            kv_block_bytes=self.kv_block_bytes,
            residuals=self.residuals,
        )


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers of each role, and how they schedule."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0
    step_tokens: int = 0  # 0 = what the device's scheduler has
    prefill_step_tokens: int = 0  # of prefill workers; 0 = the same
    budget: str = "itl"

    @property
    def num_workers(self) -> int:
        return self.mixed + self.prefill + self.decode

    def pools(
        self, device: Device, slo: Slo, prefill: Device | None = None, *, are_alike: bool = False
    ) -> tuple[Pool, ...]:
        """`prefill` is what prefill workers are, where they are something else. Workers that may
        change their roles are alike: all schedule as those that decode. Raises ConfigError where
        nobody would decode.
        """
        if min(self.mixed, self.prefill, self.decode) < 0 or not self.mixed + self.decode:
            raise ConfigError(
                "there must be workers that decode", hint="say --mixed N, or --prefill and --decode"
            )
        step_tokens = self.step_tokens or device.scheduler.step_tokens
        scheduler = replace(
            device.scheduler, step_tokens=step_tokens, chunk_tokens=0, budget=self.budget
        )
        limit_ms = slo.itl_ms or slo.tpot_ms
        if limit_ms is not None:
            scheduler = replace(scheduler, itl_target_ms=limit_ms)
        num_alone = self.prefill_step_tokens or step_tokens
        alone = replace(scheduler, step_tokens=num_alone, budget="fixed")
        parts = (
            (device, self.mixed, Role.MIXED, scheduler),
            (prefill or device, self.prefill, Role.PREFILL, scheduler if are_alike else alone),
            (device, self.decode, Role.DECODE, scheduler),
        )
        return tuple(one.pool(number, role, how) for one, number, role, how in parts if number)


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Workers die after `mean_life_s` on average (0 = never), and are back after `start_up_s`."""

    mean_life_s: float = 0.0
    start_up_s: float = 30.0


def build_cluster(
    device: Device,
    layout: Layout,
    source: Source,
    *,
    prefill_device: Device | None = None,
    router: RouterConfig | None = None,
    handoff: str = "auto",
    slo: Slo = NO_LIMITS,
    link: Link | None = None,
    faults: Faults | None = None,
    autoscale: Autoscale | None = None,
    message_ms: float = 0.2,
    seed: int = 0,
) -> Cluster:
    """`slo` holds for requests that state no limits; `link` is each worker's, for KV."""
    faults = faults or Faults()
    if autoscale is not None and prefill_device is not None:
        raise ConfigError(
            "workers that change their roles are all of one kind",
            hint="leave out what prefill workers are, or the autoscaler",
        )
    cluster = Cluster(
        pools=layout.pools(device, slo, prefill_device, are_alike=autoscale is not None),
        source=source,
        router=router or RouterConfig(),
        front=ClusterConfig(handoff=handoff),
        default_slo=slo,
        autoscale=autoscale,
        message_ms=message_ms,
        host=device.host,
        sharing=device.sharing,
        slow_down=device.slow_down,
        slow_down_large=device.slow_down_large,
        seed=seed,
    )
    link = device.kv_link or link
    if link is not None:
        cluster = replace(cluster, link=link)
    if faults.mean_life_s > 0.0:
        deaths = random_deaths(
            layout.num_workers,
            mean_life_s=faults.mean_life_s,
            start_up_s=faults.start_up_s,
            until_s=FAULTS_UNTIL_S,
            seed=seed,
        )
        cluster = replace(cluster, deaths=deaths)
    return cluster
