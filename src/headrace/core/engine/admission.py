"""Whether a sequence may join at all: what can never run is refused at once, with the reason and
what would help.
"""

from headrace.core.base.events import Reject
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.config.schema import SchedulerConfig
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.sequence import Sequence


def find_fault(
    spec: SeqSpec, worker: WorkerSpec, config: SchedulerConfig, kv: KvManager, scheduler: Scheduler
) -> Reject | None:
    """The reason not to let the sequence wait, if there is one."""
    num_prompt, max_tokens = len(spec.prompt_tokens), spec.params.max_tokens
    max_len = num_prompt + max_tokens
    asked = f"prompt of {num_prompt} tokens and max_tokens of {max_tokens}"
    if num_prompt == 0:
        return _bad(spec, "prompt_empty", "prompt has no tokens", "send at least one token")
    token = _find_stranger(spec.prompt_tokens, worker.vocab_size)
    if token is not None:
        return _bad(
            spec, "token_out_of_range", f"token id {token} is not below {worker.vocab_size}", ""
        )
    if max_len > worker.max_model_len:
        return _bad(
            spec,
            "context_length_exceeded",
            f"{asked} exceed the model's {worker.max_model_len} tokens",
            "shorten the prompt or lower max_tokens",
        )
    if kv.blocks_for(max_len) > kv.num_blocks:
        return _bad(
            spec,
            "kv_pool_too_small",
            f"{asked} need {kv.blocks_for(max_len)} KV blocks, the pool has {kv.num_blocks}",
            "shorten the prompt, lower max_tokens, or serve with a larger --kv-memory",
        )
    if scheduler.num_waiting >= config.max_waiting_seqs:
        return Reject(
            spec.seq_id,
            429,
            "queue_full",
            f"{scheduler.num_waiting} requests wait, the limit is {config.max_waiting_seqs}",
            "retry later",
            retry_after_s=1.0,
        )
    return None


def find_lateness(seq: Sequence, now: Ns, predicted_ns: Ns) -> Reject | None:
    """Refuse a sequence whose predicted TTFT misses its limit, and say when to come back."""
    limit_ms = seq.spec.slo.ttft_ms
    ttft_ms = (now - seq.spec.arrived_ns + predicted_ns) / NS_PER_MS
    if limit_ms is None or ttft_ms <= limit_ms:
        return None
    return Reject(
        seq.seq_id,
        503,
        "ttft_unattainable",
        f"predicted time to first token is {ttft_ms:.0f} ms, the limit is {limit_ms:.10g} ms",
        "retry later, or allow more time to the first token",
        retry_after_s=max(0.1, (ttft_ms - limit_ms) * NS_PER_MS / NS_PER_S),
    )


def _find_stranger(tokens: tuple[int, ...], vocab_size: int) -> int | None:
    """The first token that is none of the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            return token
    return None


def _bad(spec: SeqSpec, code: str, message: str, hint: str) -> Reject:
    return Reject(spec.seq_id, 400, code, message, hint)
