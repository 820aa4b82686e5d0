"""What workers of a simulated cluster are and have in common; refuses to know what they do."""

from dataclasses import dataclass, field

from headrace.core.base.plan import WorkerSpec
from headrace.core.base.worker import Role
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.calibration import Residuals
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import CostModel
from headrace.sim.steps import Written
from headrace.sim.tiers import Tier

EVEN = Residuals()  # none: steps take what is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal workers."""

    num_workers: int
    role: Role = Role.MIXED
    config: WorkerConfig = field(default_factory=WorkerConfig)
    spec: WorkerSpec
    cost: CostModel  # how long steps take
    believed: FittedCostModel  # how long worker and router believe they take, before they learn
    kv_block_bytes: int = 0  # of a block on its way to another worker
    publishes_kv: bool = True
    tiers: tuple[Tier, ...] = ()  # below the device's KV
    residuals: Residuals = EVEN  # of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFaults:
    """What goes wrong, as shares of the messages to the front end."""

    kv_lost: float = 0.0
    kv_twice: float = 0.0
    kv_late: float = 0.0  # by up to `late_ms`, past others
    late_ms: float = 200.0
    stats_lost: float = 0.0
    stats_nan: float = 0.0

    @property
    def happen(self) -> bool:
        return any(share > 0.0 for share in (self.kv_lost, self.kv_twice, self.kv_late)) or (
            self.stats_lost > 0.0 or self.stats_nan > 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What workers of a cluster have in common."""

    stats_period_ms: float
    faults: MessageFaults
    seed: int
    is_checked: bool
    glides: bool
    skips_ticks: bool  # of loads, where nothing happens between
    tells_late: bool  # what becomes of blocks, where nobody asks before
    shows_plans: bool
    written: Written | None = None
