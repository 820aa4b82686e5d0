"""The load of `headrace sim`: what was asked, and why a run may have had less.

Decides which words contradict each other; refuses to know how requests are made.
"""

from typing import Final, Protocol

from headrace.core.base.errors import ConfigError
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.workload.profiles import WorkloadProfile
from headrace.sim.summary import Summary

# Beyond that, chance is not why the load differs.
NEAR: Final = 0.05


class LoadAsked(Protocol):
    """What names say of how requests come."""

    @property
    def trace(self) -> str: ...
    @property
    def speed(self) -> float: ...
    @property
    def load(self) -> float | None: ...
    @property
    def concurrency(self) -> int | None: ...
    @property
    def burstiness(self) -> float: ...
    @property
    def rates(self) -> tuple[tuple[float, float], ...]: ...
    @property
    def prompt(self) -> int | None: ...
    @property
    def output(self) -> int | None: ...
    @property
    def spread(self) -> float | None: ...
    @property
    def shared(self) -> float | None: ...


def check_load(asked: LoadAsked) -> None:
    """Raises ConfigError for words of which one would have to be ignored."""
    if asked.trace:
        own = {
            "--load": asked.load,
            "--rates": asked.rates or None,
            "--burstiness": asked.burstiness if asked.burstiness != 1.0 else None,
            "--prompt": asked.prompt,
            "--output": asked.output,
            "--spread": asked.spread,
            "--shared": asked.shared,
        }
        for name, value in own.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, and the trace has its own",
                    hint="--speed changes how fast a trace comes; without --trace,"
                    f" {name} describes a workload",
                )
    elif asked.speed != 1.0:
        raise ConfigError(
            f"--speed is {asked.speed:g}, and there is no trace", hint="say --load, or --trace"
        )
    if asked.rates and asked.load is not None:
        raise ConfigError(
            f"--load is {asked.load:g}, and rates are given too", hint="leave out one of them"
        )
    if asked.concurrency is not None:
        times = {
            "--load": asked.load,
            "rates": asked.rates or None,
            "--burstiness": asked.burstiness if asked.burstiness != 1.0 else None,
            "--speed": asked.speed if asked.speed != 1.0 else None,
        }
        for name, value in times.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, and --concurrency lets requests come as others end",
                    hint="leave out one of them",
                )


def half_of_capacity(profile: WorkloadProfile, cost: CostModel, num_workers: int) -> float:
    """By the time that a request's prompt and its part of decode steps of 32 take."""
    num_new = max(1, round(profile.prompt_tokens * (1.0 - profile.shared_share)))
    context = round(profile.prompt_tokens + profile.output_tokens / 2)
    prefill_ns = cost.step_ns(StepShape(num_new, 1, 1, num_new * context, context))
    decode_ns = cost.step_ns(StepShape(32, 32, 32, 32 * context, 32 * context))
    per_request_ns = prefill_ns + decode_ns / 32 * profile.output_tokens
    return num_workers / per_request_ns * 1e9 / 2


def load_words(found: Summary, asked_per_s: float | None, profile: WorkloadProfile) -> str:
    """The load that there was; and where it is not the one that was asked for, why."""
    words = f"{found.load_per_s:.2f} requests/s"
    if asked_per_s is None or abs(found.load_per_s / asked_per_s - 1.0) <= NEAR:
        return words
    words += f", {asked_per_s:.2f} asked for"
    if profile.turns == 1:
        return words + " (few requests: chance)"
    return (
        words + f" (sessions of {profile.turns} turns follow their answers, and begin and end"
        " within the run; with more --requests it comes nearer)"
    )
