"""What replicas can do within the limits, by the cost model.

Decides which count of replicas is enough for a rate of requests; refuses to know how many there
are, and what they did.

A replica works in steps. What fits beside the decoding sequences into a step that keeps the limit
of ITL is the pace of prefill: requests that come at a rate x, each with u uncached prompt tokens,
keep it busy for a share ρ of the time. Steps are as long as that limit then, and short otherwise; a
request with g output tokens stays for g steps, so as many sequences decode at once as come in that
time (Little's law), and both settle together. Prompts wait as customers do for N servers with one
queue (Erlang C; replicas share one, since each request goes where least is due). So limits are kept
at a percentile, and a smaller fleet is judged under the whole load.
"""

from collections.abc import Callable
from math import ceil, log, sqrt
from typing import Final, NamedTuple

import msgspec

from headrace.core.autoscaler.events import Constraint, Forecast
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.model import CostModel, StepShape

# Standard deviations above the mean below which a normal variable stays that often.
DEVIATIONS: Final = {"p50": 0.0, "p90": 1.2816, "p99": 2.3263}
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# A fixed point that was not reached by then is beyond any limit.
MAX_ROUNDS: Final = 100
# What a wait without end is written as: a month and more.
HOPELESS_MS: Final = 1e10


def fewest(is_enough: Callable[[int], bool], low: int, high: int) -> int:
    """The least n within `low` to `high` that is enough, where more than enough is enough too;
    `high` where nothing less is.
    """
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica of a pool is, to a planner."""

    cost: CostModel
    num_gpus: int = 1  # devices that it takes from the budget, whatever they are
    step_tokens: int = 512  # most tokens of a step
    max_running_seqs: int = 256
    num_kv_tokens: int = 1 << 40  # that fit into its blocks

    @classmethod
    def of(cls, cost: CostModel, scheduler: SchedulerConfig, spec: WorkerSpec) -> "Replica":
        """A worker that is built of these."""
        return cls(
            cost=cost,
            step_tokens=scheduler.step_tokens,
            max_running_seqs=scheduler.max_running_seqs,
            num_kv_tokens=spec.num_blocks * spec.block_size,
        )


class Traffic(msgspec.Struct, frozen=True):
    """A mean request. A prefill pool sees no output, a decode pool no prompt to compute.

    Lengths are taken to spread like an exponential's (cv 1).
    """

    prompt_tokens: float
    uncached_tokens: float
    output_tokens: float

    @property
    def mean_kv_tokens(self) -> float:
        """Of a sequence while it decodes. Long outputs are met more often."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_position(self) -> float:
        """Of a prompt token that is computed. Most are of long prompts."""
        return 2.0 * self.prompt_tokens - self.uncached_tokens


class _Prefill(NamedTuple):
    """Of a mean prompt beside so many decoding sequences."""

    decode_ms: float  # a step without prefill
    step_ms: float  # a step with as much of it as may be
    service_ms: float  # for which it keeps others from theirs
    latency_ms: float  # until its end, if nobody else waits


class Capacity:
    """The answers for one kind of replica under one kind of traffic.

    A limit that a single request misses on an idle replica is missed by any number of replicas, so
    it asks for none (`unreachable`).
    """

    def __init__(
        self, replica: Replica, traffic: Traffic, slo: Slo, *, percentile: str, margin: float
    ) -> None:
        self._replica = replica
        self._traffic = traffic
        self._share = SHARES[percentile]
        self._deviations = DEVIATIONS[percentile]
        self.room = 1.0 - margin
        self._prefills: dict[int, _Prefill] = {}  # by sequences that decode, as far as was asked
        self._itl_ms, self._ttft_ms = slo.itl_ms, slo.ttft_ms
        self.unreachable: set[Constraint] = set()
        if self._itl_ms is not None and self._decode_ms(1) > self._itl_ms * self.room:
            self.unreachable.add(Constraint.ITL)
            self._itl_ms = None
        if self._ttft_ms is not None and self._prefill(0).latency_ms > self._ttft_ms * self.room:
            self.unreachable.add(Constraint.TTFT)
            self._ttft_ms = None

    # ---- queries

    def forecast(self, rate_per_s: float, num_replicas: int) -> Forecast:
        """What `num_replicas` >= 1 make of so many requests per second to all of them."""
        rate = rate_per_s / num_replicas
        num_decoding = self._num_decoding(rate)
        peak = num_decoding + self._deviations * sqrt(num_decoding)
        prefill = self._prefill(round(num_decoding))
        utilisation = rate * prefill.service_ms / 1e3
        wait_ms = self._wait_ms(num_replicas, utilisation, prefill.service_ms)
        ttft_ms = prefill.latency_ms + wait_ms
        itl_ms = self._decode_ms(round(peak)) if self._traffic.output_tokens else 0.0
        pressures = self._pressures(ttft_ms, itl_ms, peak, peak * self._traffic.mean_kv_tokens)
        pressures[Constraint.RATE] = utilisation
        constraint = max(pressures, key=pressures.__getitem__)
        return Forecast(
            num_replicas=num_replicas,
            rate_per_s=rate_per_s,
            utilisation=utilisation,
            ttft_ms=ttft_ms,
            itl_ms=itl_ms,
            pressure=pressures[constraint],
            constraint=constraint,
        )

    def replicas_for(self, rate_per_s: float, most: int) -> int:
        """The fewest that keep every limit; `most` where fewer do not.

        The margin is one of load: near saturation a few requests more make all the difference.
        """
        if rate_per_s <= 0.0:
            return 0
        rate_per_s /= self.room
        return fewest(lambda n: self.forecast(rate_per_s, n).pressure <= 1.0, 1, most)

    def state_pressure(self, queue_ms: float, num_running: float, num_kv_tokens: float) -> float:
        """The largest of figure by limit for a request that comes to a replica as it stands."""
        kv_per_seq = num_kv_tokens / num_running if num_running else 0.0
        n = round(num_running)
        itl_ms = self._decode_ms(n, kv_per_seq) if n else 0.0
        ttft_ms = queue_ms + self._prefill(n).latency_ms
        return max(self._pressures(ttft_ms, itl_ms, num_running, num_kv_tokens).values())

    def prefill_work_ms(self, num_running: float) -> float:
        """By which a mean prompt makes the next one wait."""
        return self._prefill(round(num_running)).service_ms

    def _pressures(
        self, ttft_ms: float, itl_ms: float, num_seqs: float, num_kv_tokens: float
    ) -> dict[Constraint, float]:
        return {
            Constraint.TTFT: ttft_ms / self._ttft_ms if self._ttft_ms else 0.0,
            Constraint.ITL: itl_ms / self._itl_ms if self._itl_ms else 0.0,
            Constraint.SEQS: num_seqs / self._replica.max_running_seqs,
            Constraint.KV: num_kv_tokens / self._replica.num_kv_tokens,
        }

    # ---- the model

    def _num_decoding(self, rate: float) -> float:
        """Sequences that decode at once on a replica, at so many requests per second to it."""
        arriving = rate * self._traffic.output_tokens / 1e3  # tokens for each ms
        most = 4.0 * self._replica.max_running_seqs  # whatever is more is as hopeless
        num_decoding = arriving * self._decode_ms(1)
        for _ in range(MAX_ROUNDS):
            n = round(num_decoding)
            prefill = self._prefill(n)
            busy = min(1.0, rate * prefill.service_ms / 1e3)
            after = arriving / ((1.0 - busy) / prefill.decode_ms + busy / prefill.step_ms)
            if after >= most or abs(after - num_decoding) < 0.01:
                return min(after, most)
            num_decoding = after
        return num_decoding

    def _prefill(self, num_decoding: int) -> "_Prefill":
        if (known := self._prefills.get(num_decoding)) is None:
            known = self._prefills[num_decoding] = self._ask_for_prefill(num_decoding)
        return known

    def _ask_for_prefill(self, num_decoding: int) -> "_Prefill":
        chunk = self._chunk_tokens(num_decoding)
        decode_ms, step_ms = self._decode_ms(num_decoding), self._step_ms(num_decoding, chunk)
        num_tokens = self._traffic.uncached_tokens
        if num_tokens <= 0.0:
            return _Prefill(decode_ms, step_ms, 0.0, 0.0)
        num_steps = ceil(num_tokens / chunk)
        own_ms = num_steps * self._step_ms(num_decoding, num_tokens / num_steps)
        found_ms = decode_ms if num_decoding else 0.0  # the step under way
        return _Prefill(decode_ms, step_ms, num_tokens / chunk * step_ms, found_ms + own_ms)

    def _chunk_tokens(self, num_decoding: int) -> int:
        """The most prompt tokens of a step that keeps the limit of ITL; one at least."""
        most = max(1, self._replica.step_tokens - num_decoding)
        if self._itl_ms is None or not self._traffic.output_tokens:
            return most
        limit_ms = self._itl_ms * self.room
        return most - fewest(
            lambda less: self._step_ms(num_decoding, most - less) <= limit_ms, 0, most - 1
        )

    def _wait_ms(self, num_servers: int, utilisation: float, service_ms: float) -> float:
        """Behind other prompts, at the percentile: M/M/N (Erlang 1917)."""
        if utilisation >= 1.0:
            return HOPELESS_MS
        blocked = 1.0  # Erlang B, for one server more each time
        for n in range(1, num_servers + 1):
            offered = num_servers * utilisation * blocked
            blocked = offered / (n + offered)
        waiting = blocked / (1.0 - utilisation * (1.0 - blocked))
        excess = waiting / (1.0 - self._share)
        if excess <= 1.0:
            return 0.0
        return log(excess) * service_ms / (num_servers * (1.0 - utilisation))

    def _decode_ms(self, num_seqs: int, kv_per_seq: float | None = None) -> float:
        """Of a step in which one sequence at least decodes."""
        n = max(1, num_seqs)
        kv = round(n * (self._traffic.mean_kv_tokens if kv_per_seq is None else kv_per_seq))
        return self._replica.cost.step_ns(StepShape(n, n, n, kv, kv)) / NS_PER_MS

    def _step_ms(self, num_decoding: int, num_prefill: float) -> float:
        """Of a step that computes so many prompt tokens, one at least, in the midst of a prompt."""
        before = self._traffic.mean_position
        kv = num_decoding * self._traffic.mean_kv_tokens
        shape = StepShape(
            num_decoding + max(1, round(num_prefill)),
            num_decoding + 1,
            num_decoding + 1,
            round(kv + num_prefill * before),
            round(kv + before),
        )
        return self._replica.cost.step_ns(shape) / NS_PER_MS
