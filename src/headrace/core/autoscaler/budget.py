"""The budget: a hard limit on all pools together, after every other decision."""

from collections.abc import Mapping

from headrace.core.autoscaler.pool import Pool
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig


def grant(
    wanted: Mapping[Role, int], pools: Mapping[Role, Pool], config: AutoscalerConfig
) -> dict[Role, int]:
    """How many replicas each pool may have of those that it wants.

    Nobody keeps more than is wanted; where that is too much even so, whoever has the largest share
    of its wish gives. Then whoever has the smallest share gets, one replica at a time. What drains
    is paid for until it is gone, so it keeps others from coming.
    """
    granted = {role: min(num, pools[role].target or 0) for role, num in wanted.items()}

    def share(role: Role) -> float:
        return granted[role] / max(1, wanted[role])

    def fits(num: Mapping[Role, int], num_draining: Mapping[Role, int]) -> bool:
        held = {role: count + num_draining.get(role, 0) for role, count in num.items()}
        num_gpus = sum(count * pools[role].replica.num_gpus for role, count in held.items())
        is_paid = not config.max_gpus or num_gpus <= config.max_gpus
        return is_paid and sum(held.values()) <= config.max_replicas

    while not fits(granted, {}):
        granted[max(filter(granted.get, granted), key=share)] -= 1

    def draining(beside: Role) -> dict[Role, int]:
        """So do those that are only now to drain, but where they may switch to this pool."""
        return {
            role: pools[role].num_draining
            + (max(0, len(pools[role].active) - num) if Role.MIXED in {role, beside} else 0)
            for role, num in granted.items()
        }

    while True:
        for role in sorted(granted, key=share):
            more = {**granted, role: granted[role] + 1}
            if granted[role] < wanted[role] and fits(more, draining(role)):
                granted = more
                break
        else:
            return granted
