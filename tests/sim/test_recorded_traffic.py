"""Recorded traffic, served again as it was and otherwise: answers that are known beforehand."""

from random import Random

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.base.types import SeqId
from headrace.core.base.worker import Role
from headrace.core.config.schema import RouterConfig
from headrace.core.workload.recording import Recorded, Recording, read_recording
from headrace.sim.compare import Run, compare, figures, misses
from headrace.sim.network import Network
from headrace.sim.outcomes import Outcomes, recorded_outcomes
from headrace.sim.traffic import RecordedSource
from headrace.sim.whatif import Changes, Trial, run_trial, span_s
from support.recordings import BLOCK, line, lines_of, pool


def recording(requests: list[Recorded], **begin: object) -> Recording:
    return read_recording(lines_of(requests, **begin))


def text(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(900) for _ in range(num_tokens)]


def crowd(num: int = 60, *, gap_s: float = 0.02) -> Recording:
    """More than one worker can serve: 0.1 ms for a token, prompts of 400 every 20 ms."""
    rng = Random(1)
    return recording([line(i, i * gap_s, text(rng, 400), text(rng, 8)) for i in range(num)])


def families(num: int = 120, *, num_stems: int = 6) -> Recording:
    """Prompts that share one of a few long beginnings, whoever comes next."""
    rng = Random(2)
    stems = [text(rng, 480) for _ in range(num_stems)]
    return recording(
        [line(i, i * 0.08, rng.choice(stems) + text(rng, 20), text(rng, 4)) for i in range(num)],
        is_alone=False,
    )


def run(found: Recording, *outcomes: Outcomes, price: float = 0.0) -> Run:
    return Run(outcomes=outcomes, span_s=span_s(found), price_per_hour=price)


# ---- texts


def test_equal_names_become_equal_tokens_and_others_differ() -> None:
    rng = Random(0)
    stem, first, second = text(rng, 50), text(rng, 21), text(rng, 33)
    found = recording([line(0, 0.0, stem + first), line(1, 1.0, stem + second)])
    one, other = (spec.prompt_tokens for spec in RecordedSource(found).arrivals())
    assert (len(one), len(other)) == (71, 83)
    shared = 50 // BLOCK * BLOCK
    assert one[:shared] == other[:shared]
    assert one[shared : shared + BLOCK] != other[shared : shared + BLOCK]


def test_whoever_asks_again_has_the_answer_in_the_prompt() -> None:
    rng = Random(0)
    prompt, answer, more = text(rng, 37), text(rng, 30), text(rng, 9)
    found = recording([line(0, 0.0, prompt, answer), line(1, 1.0, prompt + answer + more)])
    source = RecordedSource(found)
    first, second = source.arrivals()
    whole = first.prompt_tokens + source.written(SeqId(0), 37, 67)
    assert len(whole) == 67
    num_full = 67 // BLOCK * BLOCK
    assert second.prompt_tokens[:num_full] == whole[:num_full]
    outcomes = run_trial(found, Trial())
    assert outcomes.cached_tokens[1] == num_full  # the last token's KV is not in a full block


def test_the_same_prompt_again_is_the_same_to_its_end() -> None:
    rng = Random(0)
    prompt = text(rng, 37)
    found = recording([line(i, i * 1.0, prompt, text(rng, 30)) for i in range(2)])
    one, other = (spec.prompt_tokens for spec in RecordedSource(found).arrivals())
    assert one == other


def test_who_had_no_answer_is_taken_for_the_median() -> None:
    rng = Random(0)
    lines = [line(i, i * 1.0, text(rng, 20), text(rng, n)) for i, n in enumerate((4, 6, 50))]
    refused = line(3, 3.0, text(rng, 20), (), end="rejected", max_tokens=100)
    short = line(4, 4.0, text(rng, 20), (), end="rejected", max_tokens=2)
    specs = list(RecordedSource(recording([*lines, refused, short]), speed=2.0).arrivals())
    assert [spec.params.max_tokens for spec in specs] == [4, 6, 50, 6, 2]
    assert specs[3].arrived_ns == 1_500_000_000


# ---- what comes of it


def test_more_workers_have_shorter_queues() -> None:
    found = crowd()
    ttft = [
        figures(run(found, run_trial(found, Trial(changes=Changes(workers=n)))))["ttft_ms_mean"]
        for n in (1, 2, 4)
    ]
    one, two, four = ttft
    assert one is not None
    assert two is not None
    assert four is not None
    assert one > 2 * two > 2 * four
    assert one > 300  # the last of 60 waits for about 60 times 20 ms
    assert four < 60  # 41 ms of own prefill


def test_routing_by_prefix_finds_more_than_in_turns() -> None:
    found = families()
    rates = {
        policy: figures(
            run(found, run_trial(found, Trial(changes=Changes(workers=4, policy=policy))))
        )["hit_rate"]
        for policy in ("kv", "round_robin")
    }
    assert rates["kv"] is not None
    assert rates["round_robin"] is not None
    # In turns each of 4 workers computes each of 6 beginnings once.
    assert rates["kv"] > rates["round_robin"] + 0.05


def test_fewer_blocks_find_less() -> None:
    found = families()
    few, many = (
        figures(run(found, run_trial(found, Trial(changes=Changes(kv_blocks=number)))))["hit_rate"]
        for number in (64, 4096)
    )
    assert few is not None
    assert many is not None
    assert few < many - 0.2


def test_prefill_and_decode_of_their_own() -> None:
    found = crowd(20, gap_s=0.1)
    split = run_trial(found, Trial(changes=Changes(prefill=1, decode=1, handoff="always")))
    assert all(split.is_served)
    assert split.num_workers == pytest.approx(2.0, rel=0.01)


def test_what_is_not_there_yet_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins at once on two workers: the second could have their beginning from the first, which is
    still computing it.
    """
    rng = Random(4)
    stem = text(rng, 1000)
    lines = [line(i, i * 0.001, stem + text(rng, 9), text(rng, 4)) for i in range(12)]
    found = recording(lines, router=RouterConfig(policy="round_robin", kv_link="memory"))
    sent: list[object] = []
    monkeypatch.setattr(Network, "send", lambda *arguments: sent.append(arguments))
    assert all(run_trial(found, Trial(changes=Changes(workers=2))).is_served)
    assert sent == []


def test_the_same_trial_has_the_same_outcome() -> None:
    found = families(40)
    trial = Trial(changes=Changes(workers=3, policy="power_of_two"))
    hashes = {run_trial(found, trial).trace_hash for _ in range(2)}
    assert len(hashes) == 1


# ---- beside each other


def test_two_equal_ways_differ_in_nothing() -> None:
    found = crowd(30)
    one = run(found, run_trial(found, Trial()))
    for name, figure in compare(one, one, num_draws=50).items():
        assert figure.before == figure.after, name
        if figure.before is not None:
            assert (figure.difference, figure.low, figure.high) == (0.0, 0.0, 0.0), name


def test_the_interval_holds_a_difference_that_is_everywhere_alike() -> None:
    found = crowd(40)
    before, after = (recorded_outcomes(found, Slo()) for _ in range(2))
    rng = Random(5)
    for place in range(len(before)):
        before.latencies["ttft_ms"][place] = 100 * rng.random()
        after.latencies["ttft_ms"][place] = before.latencies["ttft_ms"][place] + 7.0
    figure = compare(run(found, before), run(found, after))["ttft_ms_mean"]
    assert figure.difference == pytest.approx(7.0)
    assert figure.low == pytest.approx(7.0)
    assert figure.high == pytest.approx(7.0)


def test_the_interval_is_about_as_wide_as_theory_says() -> None:
    """The mean of 1000 differences of standard deviation 10: within 0.62 of it, 95 times of 100."""
    found = crowd(1000)
    before, after = (recorded_outcomes(found, Slo()) for _ in range(2))
    rng = Random(6)
    for place in range(1000):
        after.latencies["e2e_ms"][place] = before.latencies["e2e_ms"][place] + rng.gauss(3.0, 10.0)
    figure = compare(run(found, before), run(found, after))["e2e_ms_mean"]
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low < 3.0 < figure.high
    assert 0.8 < figure.high - figure.low < 1.7


def test_limits_judge_what_was_and_what_would_be() -> None:
    found = crowd()
    slo = Slo(ttft_ms=200.0)
    was = recorded_outcomes(found, slo)
    assert sum(was.good) == len(found.requests)  # a millisecond, the recording says
    before = run_trial(found, Trial(slo=slo))
    after = run_trial(found, Trial(slo=slo, changes=Changes(workers=4)))
    assert sum(before.good) < len(found.requests) == sum(after.good)
    (first, *_) = misses(run(found, before), run(found, after))
    assert (first.metric, first.after) == ("ttft", 0.0)
    assert first.before > 0
    better = compare(run(found, before, price=2.0), run(found, after, price=2.0))
    goodput = better["goodput_per_s"]
    assert goodput.low is not None
    assert goodput.low > 0
    assert better["cost_usd"].difference is not None


def test_misses_of_a_recording_have_the_causes_that_it_says() -> None:
    late = line(0, 0.0, [1] * 20, causes=("queue", "decode", "decode", "own_prefill"))
    found = recording([late])
    assert recorded_outcomes(found, Slo(ttft_ms=0.5)).misses == {("ttft", "queue"): 1}
    own = recording([line(0, 0.0, [1] * 20, slo=Slo(ttft_ms=9.0), causes=late.causes)])
    assert not recorded_outcomes(own, Slo(ttft_ms=0.5)).misses


def test_workers_that_nobody_described_are_not_simulated() -> None:
    found = read_recording(lines_of([line(0, 0.0, [1] * 20)], pool()))
    with pytest.raises(ConfigError, match="decode"):
        run_trial(found, Trial(changes=Changes(prefill=2)))
    unknown = Recording(
        begin=found.begin, pools=(), requests=found.requests, num_lost=0, is_truncated=False
    )
    with pytest.raises(ConfigError, match="--like"):
        run_trial(unknown, Trial())


def test_traffic_of_months_is_refused_unless_it_is_made_shorter() -> None:
    found = recording([line(0, 0.0, [1] * 20), line(1, 100 * 86400.0, [2] * 20)])
    with pytest.raises(ConfigError, match="100 days of traffic are more than the 31"):
        run_trial(found, Trial())
    assert run_trial(found, Trial(speed=1e6)).trace_hash


def test_workers_on_average() -> None:
    found = read_recording(lines_of([line(0, 0.0, [1] * 20)], pool(3), pool(1, role=Role.DECODE)))
    assert recorded_outcomes(found, Slo()).num_workers == 4.0
