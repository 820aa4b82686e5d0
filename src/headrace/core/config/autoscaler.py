"""The schema's section on how many workers there are."""

from dataclasses import dataclass

from headrace.core.config.field import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig:
    enabled: bool = setting(
        False,
        "start and end workers as the load demands; --workers, --prefill, --decode are the begin",
        flag="--autoscale",
    )
    min_replicas: int = setting(
        1,
        "fewest replicas of a pool; 0 = a pool may go to sleep",
        low=0,
        high=65_536,
        flag="--autoscaler-min-replicas",
    )
    max_replicas: int = setting(
        8,
        "most replicas of all pools together, those that still drain included",
        low=1,
        high=65_536,
        flag="--autoscaler-max-replicas",
    )
    max_gpus: int = setting(
        0,
        "most GPUs of all pools together; 0 = no limit but that of replicas",
        low=0,
        high=1_000_000,
        flag="--autoscaler-max-gpus",
    )
    percentile: str = setting(
        "p90",
        "share of requests that must keep the limits of TTFT and ITL",
        choices=("p50", "p90", "p99"),
        flag="--autoscaler-percentile",
    )
    margin: float = setting(
        0.1,
        "share of what replicas can do, and of each limit, that stays unplanned",
        low=0,
        high=0.9,
        flag="--autoscaler-margin",
    )
    predictor: str = setting(
        "auto",
        "how demand is predicted; auto = as was best so far, one step ahead",
        choices=("auto", "constant", "trend", "seasonal"),
        flag="--autoscaler-predictor",
    )
    season_s: float = setting(
        86_400.0,
        "after how long the load repeats itself, for `seasonal`",
        low=1,
        high=1e8,
        flag="--autoscaler-season-s",
    )
    start_up_s: float = setting(
        60.0,
        "from asking for a replica until it serves, before any start was seen",
        low=0,
        high=1e5,
        flag="--autoscaler-start-up-s",
    )
    warm_up_s: float = setting(
        30.0,
        "age below which what a replica shows does not count",
        low=0,
        high=1e5,
        flag="--autoscaler-warm-up-s",
    )
    load_interval_s: float = setting(
        5.0,
        "time between looks at queues and latencies",
        low=0.1,
        high=1e4,
        flag="--autoscaler-load-interval-s",
    )
    throughput_interval_s: float = setting(
        60.0,
        "time between predictions of demand",
        low=1,
        high=1e5,
        flag="--autoscaler-throughput-interval-s",
    )
    stale_s: float = setting(
        30.0,
        "age at which measurements count no more, and every pool stays as it is",
        low=0.1,
        high=1e5,
        flag="--autoscaler-stale-s",
    )
    min_samples: int = setting(
        100,
        "finished requests that measured latencies must come from",
        low=1,
        high=1_000_000,
        flag="--autoscaler-min-samples",
    )
    breach_s: float = setting(
        15.0,
        "how long measured limits must be missed before that counts",
        low=0,
        high=1e5,
        flag="--autoscaler-breach-s",
    )
    down_delay_s: float = setting(
        300.0,
        "how long fewer replicas must have been enough before one is drained",
        low=0,
        high=1e6,
        flag="--autoscaler-down-delay-s",
    )
    max_step_up: int = setting(
        4,
        "most replicas that one decision adds to a pool",
        low=1,
        high=65_536,
        flag="--autoscaler-max-step-up",
    )
    max_step_down: int = setting(
        1,
        "most replicas that one decision takes from a pool",
        low=1,
        high=65_536,
        flag="--autoscaler-max-step-down",
    )
    idle_s: float = setting(
        600.0,
        "how long nobody must have asked before a pool without a minimum goes to sleep",
        low=1,
        high=1e7,
        flag="--autoscaler-idle-s",
    )
    role_cooldown_s: float = setting(
        120.0,
        "time between switches of replicas from prefill to decode or back",
        low=0,
        high=1e6,
        flag="--autoscaler-role-cooldown-s",
    )
