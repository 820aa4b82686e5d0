"""What an EngineCore tells about itself between events: a query that changes nothing."""

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # held by nobody, kept for reuse
    num_pinned_blocks: int  # held by sequences (or by a step that is still running)
    num_lent_blocks: int  # of these, held for copies from and to other workers
    num_prefill_tokens: int  # to be computed beside what is cached, by those due more than one
    num_kv_tokens: int  # computed, of running sequences
    num_preemptions: int
    num_recomputed_tokens: int  # computed tokens given up by preemption
    num_queried_tokens: int  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int  # of these, found
    num_steps: int
    num_failed_steps: int
    num_computed_tokens: int  # rows of the steps that were done
    num_migrations: int = 0  # requests that went on after their worker was lost
    num_handoffs: int = 0  # requests whose prompt another worker computed
    num_recalls: int = 0  # hand-offs in which a worker had stalled, and another went on
    num_failed_loads: int = 0  # loads of KV that came late or not whole: the rest was computed here
    full_step_ns: int | None = None  # of prompts alone, learned; None = too few steps to tell
