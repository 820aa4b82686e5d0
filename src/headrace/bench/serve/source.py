"""Traffic as a Source of requests (core/workload), fitted to what the server takes."""

from collections.abc import Iterable, Sequence
from itertools import chain
from math import ceil

import msgspec

from headrace.bench.serve.asked import Traffic
from headrace.bench.serve.wording import Wording
from headrace.core.base.errors import ConfigError
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.replay import TraceSource
from headrace.core.workload.source import Source
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.core.workload.traces import TraceRequest

_AT_SOME_TIME = Arrivals.steady(1.0)  # where times are not looked at
FEWEST_BLOCK_TOKENS = 2  # by which texts are told apart


def source_of(traffic: Traffic, wording: Wording) -> Source:
    """Raises ConfigError where there are more texts than the words can tell apart."""
    profile = traffic.profile
    num_texts = num_texts_of(traffic)
    # Where the time ends a run, its number of requests is a bound that is not reached.
    if num_texts > wording.num_texts and (traffic.trace or traffic.duration_s is None):
        raise ConfigError(
            f"there are {num_texts} different texts, of which {wording.vocab_size} words tell "
            f"{wording.num_texts} apart",
            hint="--requests asks for fewer, or for the first ones of a trace only",
        )
    if traffic.trace:
        return TraceSource(
            traffic.trace,
            slo=profile.slo,
            speed=traffic.speed,
            vocab_size=wording.vocab_size,
            seed=traffic.seed,
        )
    pause_s = profile.pause_s if traffic.think_s is None else traffic.think_s
    return SyntheticSource(
        Synthetic(
            profile=msgspec.structs.replace(profile, pause_s=pause_s),
            arrivals=traffic.arrivals or _AT_SOME_TIME,
            num_requests=min(traffic.num_requests, wording.num_texts - profile.turns),
            max_tokens=traffic.max_tokens,
            vocab_size=wording.vocab_size,
            seed=traffic.seed,
        )
    )


def num_texts_of(traffic: Traffic) -> int:
    """Blocks and own texts of a trace; what each request brings, and the shared beginning."""
    if traffic.trace:
        return len({block for one in traffic.trace for block in one.blocks}) + len(traffic.trace)
    return traffic.num_planned + 1


def shorter_profile(profile: WorkloadProfile, scale: float) -> WorkloadProfile:
    """Prompts and answers `scale` times as long."""
    return msgspec.structs.replace(
        profile,
        prompt_tokens=max(1, round(profile.prompt_tokens * scale)),
        output_tokens=max(1, round(profile.output_tokens * scale)),
    )


def shorter_trace(requests: Iterable[TraceRequest], scale: float) -> list[TraceRequest]:
    """Lengths `scale` times as long, with the same blocks in common."""
    return [
        msgspec.structs.replace(
            one,
            prompt_tokens=ceil(one.prompt_tokens * scale),
            output_tokens=max(1, round(one.output_tokens * scale)),
            block_tokens=max(FEWEST_BLOCK_TOKENS, round(one.block_tokens * scale)),
        )
        for one in requests
    ]


def fitting(requests: Sequence[TraceRequest], max_tokens: int) -> tuple[TraceRequest, ...]:
    """Those that are no longer than this, from time 0 on, with blocks numbered in the order in
    which they are first seen: published names are hashes, or go on from where a longer trace was.

    Raises ConfigError where none is left.
    """
    kept = [one for one in requests if one.prompt_tokens + one.output_tokens <= max_tokens]
    if not kept:
        raise ConfigError(
            f"all {len(requests)} requests of the trace are longer than {max_tokens} tokens",
            hint="--length-scale 0.1 makes them a tenth as long",
        )
    names = dict.fromkeys(chain.from_iterable(one.blocks for one in kept))
    number_by_name = {name: number for number, name in enumerate(names)}
    first_s = kept[0].arrival_s
    return tuple(
        msgspec.structs.replace(
            one,
            arrival_s=one.arrival_s - first_s,
            blocks=tuple(number_by_name[name] for name in one.blocks),
        )
        for one in kept
    )
