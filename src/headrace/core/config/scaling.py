"""Whether the bounds of an autoscaler leave it anything to decide: settings that are each as they
may be, and together mean nothing.
"""

from collections.abc import Iterator, Mapping

from headrace.core.config.schema import Config
from headrace.core.config.settings import SETTINGS

MIN, MAX = "autoscaler.min_replicas", "autoscaler.max_replicas"
MAX_GPUS, ENABLED = "autoscaler.max_gpus", "autoscaler.enabled"
BEGIN = ("cluster.workers", "cluster.prefill", "cluster.decode")


def scaling_faults(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """Each with the values, where they come from and what helps; none where nothing is scaled.
    `sources` are of values by their keys, as far as they are known.
    """
    if not config.autoscaler.enabled:
        return
    if config.cluster.engines:
        yield (
            f"{_said(ENABLED, True, sources)}, and"
            f" {_said('cluster.engines', ' '.join(config.cluster.engines), sources)}: engines that"
            " run elsewhere cannot be started or ended here; leave out --autoscale, or --engine"
        )
        return
    scaler, cluster = config.autoscaler, config.cluster
    begin = max(cluster.num_workers, 1)
    num_pools = sum(count > 0 for count in (cluster.workers, cluster.prefill, cluster.decode)) or 1
    least = scaler.min_replicas * num_pools
    is_many = f" for each of {num_pools} pools, {least} in all" if num_pools > 1 else ""
    at_begin = " + ".join(
        _said(key, count, sources)
        for key in BEGIN
        if (count := getattr(cluster, key.partition(".")[2]))
    )
    for key, most in ((MAX, scaler.max_replicas), (MAX_GPUS, scaler.max_gpus)):
        if key == MAX_GPUS and not most:
            continue
        limit = _said(key, most, sources)
        flag = SETTINGS[key].flag
        if least > most:
            yield (
                f"{_said(MIN, scaler.min_replicas, sources)}{is_many}, and {limit}, which is less;"
                f" lower {SETTINGS[MIN].flag}, or raise {flag} to {least}"
            )
        if begin > most:
            yield (
                f"{begin} workers are there at the begin ({at_begin or 'one, by default'}), and"
                f" {limit}, which is less; begin with fewer, or raise {flag} to {begin}"
            )


def _said(key: str, value: object, sources: Mapping[str, str]) -> str:
    shown = str(value).lower()
    return f"{key} is {shown} ({sources[key]})" if key in sources else f"{key} is {shown}"
