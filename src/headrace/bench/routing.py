"""What a policy is worth: the same traffic through the simulator under each, with the router and
the engines that production runs.

Decides the traffic; refuses to know how a policy chooses.
"""

from random import Random

import msgspec

from headrace.bench.loads import Spread
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, SeqId
from headrace.core.config.schema import RouterConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.workload.source import Listed
from headrace.sim.cluster import Cluster, ClusterReport, simulate_cluster
from headrace.sim.pool import Pool

TTFT_LIMIT_MS, TPOT_LIMIT_MS = 1000.0, 100.0
POLICIES = ("round_robin", "least_loaded", "prefix", "kv")
VOCAB = 1 << 15
BLOCK_SIZE = 16


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of which each begins with one of some prefixes; they come at random (Poisson)."""

    name: str = "even"
    num_requests: int = 600
    rate_per_s: float = 8.0
    num_prompt_tokens: int = 1024
    shared: float = 0.7  # share of the prompt that is prefix
    num_prefixes: int = 48
    skew: float = 0.0  # popularity of the i-th prefix is i**-skew (Zipf); 0 = all alike
    num_output_tokens: int = 32
    seed: int = 1


TRAFFICS = (
    Traffic(rate_per_s=4.0),
    Traffic(rate_per_s=6.0),
    Traffic(rate_per_s=8.0),
    Traffic(name="few are hot", rate_per_s=8.0, skew=1.5),
    Traffic(name="nothing shared", rate_per_s=4.0, shared=0.0),
)


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    traffic: str
    policy: str
    rate_per_s: float
    hit_rate: float  # prompt tokens found in the cache
    ttft_ms: Spread
    tpot_ms: Spread
    goodput: float  # share of requests that met every limit
    goodput_per_s: float
    trace_hash: str


def requests(traffic: Traffic) -> list[SeqSpec]:
    rng = Random(traffic.seed)
    num_shared = round(traffic.shared * traffic.num_prompt_tokens)
    prefixes = [_tokens(rng, num_shared) for _ in range(traffic.num_prefixes)]
    weights = [(rank + 1) ** -traffic.skew for rank in range(traffic.num_prefixes)]
    now_s = 0.0
    found: list[SeqSpec] = []
    for index in range(traffic.num_requests):
        now_s += rng.expovariate(traffic.rate_per_s)
        at_ns = Ns(round(now_s * NS_PER_S))
        (prefix,) = rng.choices(prefixes, weights)
        prompt = prefix + _tokens(rng, traffic.num_prompt_tokens - num_shared)
        params = SamplingParams(max_tokens=traffic.num_output_tokens, ignore_eos=True)
        spec = SeqSpec(
            seq_id=SeqId(index),
            request_id=str(index),
            prompt_tokens=prompt,
            params=params,
            slo=Slo(ttft_ms=TTFT_LIMIT_MS, tpot_ms=TPOT_LIMIT_MS),
            arrived_ns=at_ns,
        )
        found.append(spec)
    return found


def cluster_of(traffic: Traffic, policy: str, *, num_workers: int = 4) -> Cluster:
    """Workers as large as a laptop's: each has room for a third of the prefixes and some requests.

    Steps take what the prior of the cost model says.
    """
    num_blocks = traffic.num_prompt_tokens // BLOCK_SIZE * max(24, traffic.num_prefixes // 3)
    return Cluster(
        pools=(
            Pool(
                num_workers=num_workers,
                spec=WorkerSpec(
                    model_digest="00",
                    kv_dtype="bf16",
                    block_size=BLOCK_SIZE,
                    num_blocks=num_blocks,
                    max_model_len=8192,
                    vocab_size=VOCAB,
                ),
                cost=FittedCostModel.prior(),
                believed=FittedCostModel.prior(),
            ),
        ),
        router=RouterConfig(policy=policy),
        source=Listed(requests(traffic)),
    )


def compare(traffic: Traffic) -> list[PolicyReport]:
    """Each policy with the same requests."""
    return [
        report(traffic, policy, simulate_cluster(cluster_of(traffic, policy)))
        for policy in POLICIES
    ]


def report(traffic: Traffic, policy: str, outcome: ClusterReport) -> PolicyReport:
    records = outcome.records
    num_good = sum(record.good for record in records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in records)
    return PolicyReport(
        traffic=traffic.name,
        policy=policy,
        rate_per_s=traffic.rate_per_s,
        hit_rate=sum(record.num_cached_tokens for record in records) / num_prompt_tokens,
        ttft_ms=Spread.of((one.ttft_ns or 0) / NS_PER_MS for one in records),
        tpot_ms=Spread.of((one.tpot_ns or 0.0) / NS_PER_MS for one in records),
        goodput=num_good / (len(records) + len(outcome.refused_ns)),
        goodput_per_s=num_good / (outcome.end_ns / NS_PER_S),
        trace_hash=outcome.trace_hash,
    )


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB), k=count))
