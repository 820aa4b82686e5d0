"""Clusters of one worker that computes one sequence at a time, and an autoscaler in a hurry."""

from dataclasses import replace

from headrace.cluster.boot import BootedCluster
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.port import PoolStatus

BUDGET = 2
HASTY = AutoscalerConfig(
    enabled=True,
    max_replicas=BUDGET,
    predictor="constant",
    margin=0.8,  # the tiny model's cost is too small to be predicted well
    start_up_s=1,
    warm_up_s=0,
    load_interval_s=0.2,
    throughput_interval_s=1,
    breach_s=0.4,
    down_delay_s=1,
    idle_s=1,
)


def hasty(config: Config) -> Config:
    return replace(
        config,
        cluster=replace(config.cluster, workers=1),
        scheduler=SchedulerConfig(max_running_seqs=1),
        autoscaler=HASTY,
    )


def pool(cluster: BootedCluster) -> PoolStatus:
    """The only one, or the first."""
    return cluster.engine.pools()[0]
