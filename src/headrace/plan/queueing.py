"""Closed forms for the mean latencies of three ways to serve.

Requests arrive by chance and are dealt out to workers by chance, so each worker is a queue of its
own with fixed service times (M/D/1: Pollaczek and Khinchine). How many sequences decode together
follows from Little's law; a decode step takes `base + seqs · slope`. A router that looks at queues,
as real ones do, waits less. Memory for KV is not a limit here.
"""

from typing import Final

from headrace.plan.service import Latencies, ServiceTimes, Split

PREFILL_FIRST: Final = "co-located, prefill first"
CHUNKED: Final = "co-located, chunked"
SPLIT: Final = "disaggregated"
ROUNDS: Final = 200  # of a fixed point that contracts quickly


def waiting_share(utilisation: float) -> float:
    """Mean wait of M/D/1 in service times."""
    return utilisation / (2 * (1 - utilisation))


def prefill_first(service: ServiceTimes, load_per_s: float) -> Latencies | None:
    """A prompt runs as soon as it can, whole, and everybody's next token waits for it.

    Decoding gets what prefill leaves of the time: processor sharing.
    """
    rate = load_per_s / service.num_workers
    prefill_part = rate * service.prefill_s
    decode_part = rate * service.output_tokens * service.step_seq_s
    if prefill_part + decode_part >= 1:
        return None
    tpot_s = service.step_base_s / (1 - prefill_part - decode_part)
    seqs = rate * service.output_tokens * tpot_s
    # An arrival mostly finds a decode step under way, half of it on average.
    rest_s = (service.step_base_s + seqs * service.step_seq_s) / 2
    ttft_s = service.prefill_s * (1 + waiting_share(prefill_part)) + rest_s
    return Latencies(ttft_s, tpot_s, seqs)


def chunked(service: ServiceTimes, load_per_s: float) -> Latencies | None:
    """Prompts in chunks that share their steps with everybody who decodes (Sarathi-Serve, 2024).

    While a prompt is there, steps are mixed and take `mixed_step_s`; else they only decode. The
    sequences that decode together and the mean step depend on each other: a fixed point.
    """
    rate = load_per_s / service.num_workers
    seqs = 0.0
    for _ in range(ROUNDS):
        num_decoding = round(seqs)
        prompt_tokens = service.chunk_tokens - num_decoding
        if prompt_tokens <= 0:
            return None
        mixed_s = service.mixed_step_s(num_decoding)
        mixed_per_s = rate * service.prompt_tokens / prompt_tokens
        mixed_part = mixed_per_s * mixed_s
        if mixed_part >= 1:
            return None
        decode_s = service.step_base_s + seqs * service.step_seq_s
        tpot_s = 1 / (mixed_per_s + (1 - mixed_part) / decode_s)
        before, seqs = seqs, rate * service.output_tokens * tpot_s
        if abs(seqs - before) < 1e-6:
            break
    own_s = service.prompt_tokens / prompt_tokens * mixed_s
    return Latencies(own_s * (1 + waiting_share(mixed_part)) + tpot_s / 2, tpot_s, seqs)


def disaggregated(service: ServiceTimes, load_per_s: float, split: Split) -> Latencies | None:
    """Prompts and decoding on workers of their own (DistServe, 2024); KV is handed over between."""
    prefill_part = load_per_s * service.prefill_s / split.prefill_workers
    tokens_per_s = load_per_s * service.output_tokens / split.decode_workers
    decode_part = tokens_per_s * service.step_seq_s
    if prefill_part >= 1 or decode_part >= 1:
        return None
    tpot_s = service.step_base_s / (1 - decode_part)
    ttft_s = service.prefill_s * (1 + waiting_share(prefill_part)) + service.kv_transfer_s
    return Latencies(ttft_s, tpot_s, tokens_per_s * tpot_s)
