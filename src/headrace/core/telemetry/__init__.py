"""Pure folds of events and effects into latencies, goodput and the cause of every SLO miss."""

from headrace.core.telemetry.answers import Answers, ClientWait
from headrace.core.telemetry.counters import Counters
from headrace.core.telemetry.fold import Telemetry
from headrace.core.telemetry.joined import ClusterTelemetry
from headrace.core.telemetry.parts import Cause, TimeParts
from headrace.core.telemetry.record import ItlSummary, RequestRecord, SloMiss
from headrace.core.telemetry.windows import GoodputWindow, WindowRates

__all__ = [
    "Answers",
    "Cause",
    "ClientWait",
    "ClusterTelemetry",
    "Counters",
    "GoodputWindow",
    "ItlSummary",
    "RequestRecord",
    "SloMiss",
    "Telemetry",
    "TimeParts",
    "WindowRates",
]
