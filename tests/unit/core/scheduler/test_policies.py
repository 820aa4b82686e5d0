"""Policies are functions: asked directly."""

from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.kv.names import BlockChain
from headrace.core.scheduler.policies import choose_victim, promised_tokens
from headrace.core.scheduler.sequence import Sequence


def sequence(
    order: int, *, num_computed: int = 0, priority: int = 0, preemptions: int = 0
) -> Sequence:
    spec = SeqSpec(
        seq_id=SeqId(order),
        request_id="",
        prompt_tokens=(1,) * 10,
        params=SamplingParams(max_tokens=100),
        priority=priority,
    )
    seq = Sequence(spec, order, Ns(0), BlockChain(bytes(16), 4))
    seq.reset(num_computed)
    seq.num_times_victim = preemptions
    return seq


def test_promises() -> None:
    seq = sequence(0)
    seq.tokens += [1] * 30
    assert promised_tokens(SchedulerConfig(admission="no_evict"), seq) == 110
    assert promised_tokens(SchedulerConfig(admission="optimistic"), seq) == 40
    assert (
        promised_tokens(SchedulerConfig(admission="predicted", predicted_output_tokens=50), seq)
        == 60
    )
    assert (
        promised_tokens(SchedulerConfig(admission="predicted", predicted_output_tokens=5), seq)
        == 40
    )
    assert (
        promised_tokens(SchedulerConfig(admission="predicted", predicted_output_tokens=500), seq)
        == 110
    )
    tired = sequence(1, preemptions=2)
    assert promised_tokens(SchedulerConfig(admission="optimistic", max_preemptions=2), tired) == 110


def test_the_victim_has_the_lowest_priority_then_the_least_lost_work() -> None:
    seqs = [sequence(0, num_computed=9), sequence(1, num_computed=5), sequence(2, num_computed=5)]
    assert choose_victim(seqs, None) is seqs[2]  # the younger of two
    assert choose_victim(seqs, 2) is seqs[1]  # never the same twice in a row
    assert choose_victim(seqs[2:], 2) is seqs[2]  # unless it is the only one
    assert choose_victim([*seqs, sequence(3, num_computed=99, priority=1)], None) is not seqs[2]
    assert choose_victim([], None) is None
