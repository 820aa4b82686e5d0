"""Kinds of traffic by name, so that planner, benchmark, simulator and server mean the same.

A profile is a starting point: lengths are means of published traces, and what those do not record
(turns, pauses, sharing) is an assumption that `source` calls so. Refuses to know when requests
arrive.
"""

from enum import StrEnum
from typing import Final

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo


class Importance(StrEnum):
    """What a figure means to whoever waits."""

    CRITICAL = "critical"
    MATTERS = "matters"
    MINOR = "minor"


class WorkloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of traffic. Tokens are means of one request, history included."""

    name: str
    purpose: str
    prompt_tokens: int
    output_tokens: int
    turns: int = 1  # requests of one session, each with the history of those before
    pause_s: float = 0.0  # between an answer and the next request of its session
    shared_share: float = 0.0  # of prompt tokens that an earlier request had as its prefix
    importance: dict[str, Importance] = {}  # by figure: ttft, tpot, e2e, throughput, goodput
    slo: Slo = Slo()
    source: str = "given by the operator"


CHAT: Final = WorkloadProfile(
    name="chat",
    purpose="people who read along",
    prompt_tokens=1155,
    output_tokens=211,
    turns=4,
    pause_s=20.0,
    shared_share=0.5,
    importance={
        "ttft": Importance.CRITICAL,
        "tpot": Importance.CRITICAL,
        "e2e": Importance.MINOR,
        "throughput": Importance.MATTERS,
        "goodput": Importance.CRITICAL,
    },
    slo=Slo(ttft_ms=500.0, tpot_ms=50.0),
    source="lengths: means of the Azure 2023 conversation trace; turns, pauses, sharing: assumed",
)
AGENT: Final = WorkloadProfile(
    name="agent",
    purpose="programs that call tools and act on whole answers",
    prompt_tokens=8596,
    output_tokens=182,
    turns=10,
    pause_s=2.0,
    shared_share=0.6,
    importance={
        "ttft": Importance.MATTERS,
        "tpot": Importance.MATTERS,
        "e2e": Importance.CRITICAL,
        "throughput": Importance.MATTERS,
        "goodput": Importance.CRITICAL,
    },
    slo=Slo(ttft_ms=2000.0, e2e_ms=15000.0),
    source="lengths: means of the Mooncake tool and agent trace; turns, pauses, sharing: assumed",
)
RAG: Final = WorkloadProfile(
    name="rag",
    purpose="answers from documents that were found",
    prompt_tokens=2588,
    output_tokens=291,
    shared_share=0.1,
    importance={
        "ttft": Importance.CRITICAL,
        "tpot": Importance.MATTERS,
        "e2e": Importance.MATTERS,
        "throughput": Importance.MINOR,
        "goodput": Importance.MATTERS,
    },
    slo=Slo(ttft_ms=2000.0, tpot_ms=80.0),
    source="lengths: means of the arXiv summaries that Vidur evaluates; the rest: assumed",
)
PROFILES: Final = {profile.name: profile for profile in (CHAT, AGENT, RAG)}


def importance_words(profile: WorkloadProfile) -> str:
    """critical: TTFT, TPOT; matters: throughput; minor: E2E."""
    parts = []
    for rank in Importance:
        names = [name for name, own in profile.importance.items() if own is rank]
        if names:
            upper = [name.upper() if name in ("ttft", "tpot", "e2e") else name for name in names]
            parts.append(f"{rank.value}: {', '.join(upper)}")
    return "; ".join(parts)


def profile_named(name: str) -> WorkloadProfile:
    """Raises ConfigError that lists the names."""
    if (found := PROFILES.get(name.lower())) is None:
        raise ConfigError(f"unknown workload {name!r}", hint="known: " + ", ".join(PROFILES))
    return found
