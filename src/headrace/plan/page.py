"""The goodput calculator of a public teaching page, to the last printed digit.

Sojourn times of M/M/1 over all workers, the decode batch frozen at the design, and a tax on
co-location that is fitted, not derived. Three things the page leaves open:

- the tax: an exponent of exactly 2 needs a factor from 3.000 to 3.007, others fit with other
  factors; 3·ρ² is the natural one;
- the growth of the disaggregated TPOT: at ρ = 0.418 between 1.9 and 3.5 %; here 0.15·ρ²;
- whether sustainable loads are scanned on a grid of 0.1 requests per second or rounded down to it,
  which is the same.
"""

from typing import Final

from headrace.plan.service import Latencies, ServiceTimes

LOAD_GRID_PER_S: Final = 0.1
COLOCATION_TAX: Final = 3.0
DECODE_GROWTH: Final = 0.15


def colocated(service: ServiceTimes, load_per_s: float) -> Latencies | None:
    """Prefill and decode share every worker, and slow each other by 1 + 3·ρ²."""
    rho = load_per_s / service.capacity_per_s
    if rho >= 1:
        return None
    tax = 1 + COLOCATION_TAX * rho**2
    return Latencies(
        ttft_s=service.prefill_s * tax / (1 - rho),
        tpot_s=service.design_step_s * tax,
        decode_seqs=float(service.design_batch_seqs),
    )


def disaggregated(service: ServiceTimes, load_per_s: float) -> Latencies | None:
    """Workers split in proportion to the work; hand-off of KV takes no time."""
    rho = load_per_s / service.capacity_per_s
    if rho >= 1:
        return None
    return Latencies(
        ttft_s=service.prefill_s / (1 - rho),
        tpot_s=service.design_step_s * (1 + DECODE_GROWTH * rho**2),
        decode_seqs=float(service.design_batch_seqs),
    )
