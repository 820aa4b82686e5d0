"""From the flags of `headrace bench serve` to what its runs take. Raises ConfigError."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headrace.bench.serve.asked import PATHS, Rules, Target, Traffic
from headrace.bench.serve.run import CONCURRENCY, RATE
from headrace.bench.serve.source import shorter_profile, shorter_trace
from headrace.bench.serve.wording import common_words, single_tokens
from headrace.bench.suite import tokenizer_of
from headrace.cli.bench_serve_flags import JudgeFlags, ServerFlags, TrafficFlags
from headrace.cli.plan_target import check_range
from headrace.cli.sim import limits, profile_of, read_trace
from headrace.core.base.errors import ConfigError
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.traces import TraceRequest, spread

NUM_REQUESTS = 200
ENDLESS = 1_000_000  # requests, where the time is what ends a run
START_RATE_PER_S, START_CLIENTS = 1.0, 8  # of a search


@dataclass(frozen=True)
class _Asked:
    """What `profile_of` and `limits` read."""

    workload: str
    prompt: int | None
    output: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    itl_ms: float | None
    e2e_ms: float | None


def target_of(url: str, flags: ServerFlags) -> Target:
    """A server without its model, which it may have to be asked for."""
    if flags.endpoint not in PATHS:
        raise ConfigError(f"--endpoint is {flags.endpoint!r}", hint="known: " + ", ".join(PATHS))
    try:
        extra = msgspec.json.decode(flags.extra_body, type=dict)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body is no JSON object: {error}") from error
    check_range("--timeout-s", flags.timeout_s, 0.1, 1e5)
    check_range("--max-in-flight", flags.max_in_flight, 1, 1 << 20)
    _refuse_credentials("--metrics", flags.metrics)
    return Target(
        url=base_of(url),
        model=flags.model,
        endpoint=flags.endpoint,
        api_key=_key_of(flags),
        extra_body=extra,
        asks_usage=flags.usage,
        reuses_connections=not flags.new_connections,
        timeout_s=flags.timeout_s,
        max_in_flight=flags.max_in_flight,
    )


def base_of(url: str) -> str:
    """The server's address, whether it was given with the API's path or without."""
    if not url:
        raise ConfigError("there is no server to load", hint="--url http://127.0.0.1:8000")
    try:
        parts = urlsplit(url)
        _ = parts.port  # looked at only when it is asked for
        is_good = parts.scheme in ("http", "https") and parts.hostname and not parts.query
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"--url is {url!r}", hint="--url http://127.0.0.1:8000")
    _refuse_credentials("--url", url)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _refuse_credentials(flag: str, url: str) -> None:
    """Addresses stand in what is printed and written. Raises ConfigError, which shows none."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError(f"{flag} has credentials", hint="--api-key or OPENAI_API_KEY")


def _key_of(flags: ServerFlags) -> str:
    """Raises ConfigError, which must not show the key."""
    key = flags.api_key or os.environ.get("OPENAI_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "the key has a character that no header takes",
            hint="--api-key or OPENAI_API_KEY: printable ASCII, no end of line",
        )
    return key


def words_of(tokenizer: str | None) -> Sequence[str]:
    words = common_words()
    if tokenizer is None:
        return words
    encode = tokenizer_of(Path(tokenizer).expanduser()).encode
    return single_tokens(words, encode)


def traffic_of(flags: TrafficFlags, judged: JudgeFlags) -> Traffic:
    """Not yet fitted to what the server takes."""
    _check(flags, judged)
    trace = _trace_of(flags)
    profile = _profile_of(flags, judged)
    think_s = 0.0 if _is_closed(flags, judged) and flags.think_s is None else flags.think_s
    traffic = Traffic(
        profile=profile,
        trace=tuple(trace),
        speed=flags.speed,
        arrivals=_arrivals_of(flags),
        concurrency=flags.concurrency or 0,
        is_burst=flags.burst,
        num_requests=flags.requests or _number_of(flags, trace),
        duration_s=flags.duration_s,
        think_s=think_s,
        seed=secrets.randbits(31) if flags.seed is None else flags.seed,
    )
    if trace and flags.rate is not None:
        return traffic.at_rate(flags.rate, traffic.seed)
    return traffic


def rules_of(flags: TrafficFlags, judged: JudgeFlags) -> Rules:
    return Rules(
        slo=_profile_of(flags, judged).slo,
        attainment=check_range("--attainment", judged.attainment, 0.01, 1.0),
        warm_up_s=check_range("--warm-up-s", judged.warm_up_s, 0.0, flags.duration_s or 1e6),
        max_lag_ms=check_range("--max-lag-ms", judged.max_lag_ms, 0.1, 1e6),
    )


def start_of(flags: TrafficFlags, judged: JudgeFlags) -> float:
    """Where a search begins."""
    if judged.search == CONCURRENCY:
        return flags.concurrency or START_CLIENTS
    return flags.rate or START_RATE_PER_S


def _check(flags: TrafficFlags, judged: JudgeFlags) -> None:
    ways = {
        "--rate": flags.rate is not None,
        "--ramp": flags.ramp is not None,
        "--concurrency": flags.concurrency is not None,
        "--burst": flags.burst,
    }
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} say different times", hint="give one of them")
    if judged.search is not None:
        if judged.search not in (RATE, CONCURRENCY):
            raise ConfigError(f"--search is {judged.search!r}", hint="known: rate, concurrency")
        if given and given != [f"--{judged.search}"]:
            raise ConfigError(f"--search {judged.search} and {given[0]} say different times")
    elif not given and not flags.trace:
        raise ConfigError(
            "nothing says when requests come",
            hint="--rate 1, --ramp 0:1,60:10, --concurrency 8, --burst, --trace FILE or --search",
        )
    if flags.trace and flags.ramp:
        raise ConfigError("a trace has times of its own", hint="leave --ramp out, or say --speed")
    for name, value, low, high in (
        ("--requests", flags.requests, 1, 10_000_000),
        ("--duration-s", flags.duration_s, 0.1, 1e6),
        ("--rate", flags.rate, 1e-4, 1e5),
        ("--burstiness", flags.burstiness, 0.0, 1e4),
        ("--concurrency", flags.concurrency, 1, 1 << 16),
        ("--think-s", flags.think_s, 0.0, 1e5),
        ("--speed", flags.speed, 1e-6, 1e6),
        ("--turns", flags.turns, 1, 1000),
        ("--length-scale", flags.length_scale, 1e-4, 1e3),
        ("--max-length", flags.max_length, 2, 1 << 24),
        ("--seed", flags.seed, 0, 1 << 62),
        ("--trials", judged.trials, 1, 100),
    ):
        if value is not None:
            check_range(name, value, low, high)


def _is_closed(flags: TrafficFlags, judged: JudgeFlags) -> bool:
    return flags.concurrency is not None or judged.search == CONCURRENCY


def _profile_of(flags: TrafficFlags, judged: JudgeFlags) -> WorkloadProfile:
    asked = _Asked(
        workload=flags.workload,
        prompt=flags.prompt,
        output=flags.output,
        ttft_ms=judged.ttft_ms,
        tpot_ms=judged.tpot_ms,
        itl_ms=judged.itl_ms,
        e2e_ms=judged.e2e_ms,
    )
    profile = profile_of(asked)
    turns = profile.turns if flags.turns is None else flags.turns
    profile = msgspec.structs.replace(profile, turns=turns, slo=limits(asked, profile))
    return shorter_profile(profile, flags.length_scale)


def _trace_of(flags: TrafficFlags) -> list[TraceRequest]:
    """Times that were rounded are spread in the same way each time: they are the trace's."""
    if not flags.trace:
        return []
    requests = spread(read_trace(flags.trace), seed=0)
    return shorter_trace(islice(requests, flags.requests), flags.length_scale)


def _number_of(flags: TrafficFlags, trace: Sequence[TraceRequest]) -> int:
    if trace:
        return len(trace)
    return NUM_REQUESTS if flags.duration_s is None else ENDLESS


def _arrivals_of(flags: TrafficFlags) -> Arrivals | None:
    if flags.ramp is not None:
        return Arrivals(rates=_ramp_of(flags.ramp), burstiness=flags.burstiness)
    # A search sets the rate, and keeps the burstiness.
    return Arrivals.steady(flags.rate or START_RATE_PER_S, burstiness=flags.burstiness)


def _ramp_of(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [[float(number) for number in pair.split(":")] for pair in text.split(",")]
        rates = tuple((second, rate) for second, rate in pairs)
    except ValueError as error:
        raise ConfigError(
            f"--ramp is {text!r}", hint="SECOND:RATE,SECOND:RATE,… as in 0:1,60:10"
        ) from error
    if not all(abs(number) < inf for pair in rates for number in pair):
        raise ConfigError(f"--ramp is {text!r}", hint="its numbers are finite")
    return rates
