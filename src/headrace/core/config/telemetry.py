"""The schema's section on what is measured, recorded and logged."""

from dataclasses import dataclass

from headrace.core.base.request import Slo
from headrace.core.config.field import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    event_log: str = setting("", "file that records events and effects for replay; empty = off")
    record: str = setting(
        "", "file that records traffic for `sim`, without text and tokens; empty = off"
    )
    record_limit_bytes: int = setting(
        256 << 20,
        "most that a recording takes; beyond it the oldest half goes",
        low=1 << 16,
        high=1 << 50,
        flag="--record-limit",
    )
    workload: str = setting(
        "any",
        "kind of traffic that is expected, whose limits hold where no other is set",
        choices=("any", "chat", "agent", "rag"),
    )
    slo_ttft_ms: float = setting(500.0, "TTFT limit of a request that states none", low=0, high=1e9)
    slo_itl_ms: float = setting(50.0, "ITL limit of a request that states none", low=0, high=1e9)
    slo_tpot_ms: float = setting(
        0.0, "TPOT limit of a request that states none; 0 = none", low=0, high=1e9
    )
    slo_e2e_ms: float = setting(
        0.0, "E2E limit of a request that states none; 0 = none", low=0, high=1e9
    )
    log_level: str = setting(
        "warning",
        "least serious line that is logged to standard error; info = one line for every request;"
        " warning = also the few lines of workers that come back, restart or change their roles",
        choices=("debug", "info", "warning", "error"),
    )

    @property
    def slo(self) -> Slo:
        """Limits of a request that states none. A limit of 0 is no limit."""
        return Slo(
            ttft_ms=self.slo_ttft_ms or None,
            itl_ms=self.slo_itl_ms or None,
            tpot_ms=self.slo_tpot_ms or None,
            e2e_ms=self.slo_e2e_ms or None,
        )
