"""The one way to build a worker's core: the live driver and the simulator both call it, and nobody
else builds one.
"""

from headrace.core.base.plan import WorkerSpec
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.model import CostModel
from headrace.core.engine.core import EngineCore
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.scheduler import Scheduler


def build_worker(config: WorkerConfig, spec: WorkerSpec, cost: CostModel) -> EngineCore:
    """An EngineCore for an executor of the given spec; `cost` answers the policies' predictions."""
    kv = KvManager(
        spec.num_blocks,
        spec.block_size,
        prefix_cache=config.kv.prefix_cache,
        can_copy=spec.can_copy_blocks,
    )
    return EngineCore(config, spec, kv, Scheduler(config.scheduler, kv, cost))
