"""Traffic as requests: real shared prefixes, lengths that fit, words enough."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from headrace.bench.serve.asked import Traffic
from headrace.bench.serve.source import fitting, shorter_profile, shorter_trace, source_of
from headrace.bench.serve.wording import Wording, common_words
from headrace.core.base.errors import ConfigError
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import CHAT
from headrace.core.workload.traces import TraceRequest, parse_trace

TRACE = Path(__file__).parents[3] / "support" / "traces" / "mooncake_head.jsonl"


def request(at_s: float, num_prompt: int, *blocks: int, block_tokens: int = 4) -> TraceRequest:
    return TraceRequest(
        arrival_s=at_s,
        prompt_tokens=num_prompt,
        output_tokens=2,
        blocks=blocks,
        block_tokens=block_tokens,
    )


def common_prefix(one: str, other: str) -> int:
    """In words."""
    pairs = list(zip(one.split(), other.split(), strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_equal_hash_ids_become_equal_text_and_others_do_not() -> None:
    trace = fitting([request(0.0, 14, 9, 7, 5), request(1.0, 14, 9, 7, 6), request(2.0, 9, 7)], 99)
    wording = Wording(common_words())
    source = source_of(Traffic(profile=CHAT, trace=trace, seed=4), wording)
    one, other, third = (wording.text(spec.prompt_tokens) for spec in source.arrivals())
    assert len(one.split()) == 14
    # Texts are told apart by their first two words, of which these have one in common.
    assert common_prefix(one, other) == 8 + 1
    assert common_prefix(one, third) < 2
    assert third.split()[:4] == one.split()[4:8]  # the same block in another place


def test_a_published_trace_shares_what_its_names_say() -> None:
    with TRACE.open() as lines:
        asked = shorter_trace(parse_trace(lines), 0.01)
    trace = fitting(asked, 10_000)
    wording = Wording(common_words())
    source = source_of(Traffic(profile=CHAT, trace=trace), wording)
    texts = [wording.text(spec.prompt_tokens) for spec in source.arrivals()]
    assert len(texts) == len(asked)
    for one, text in zip(trace, texts, strict=True):
        assert len(text.split()) == one.prompt_tokens
        for other, other_text in zip(trace, texts, strict=True):
            shared = 0
            for mine, its in zip(one.blocks, other.blocks, strict=False):
                if mine != its:
                    break
                shared += 1
            least = min(shared * one.block_tokens, one.prompt_tokens, other.prompt_tokens)
            assert common_prefix(text, other_text) >= least


def test_another_seed_is_another_text_in_the_same_pattern() -> None:
    trace = fitting([request(0.0, 8, 1, 2), request(1.0, 8, 1, 3)], 99)
    wording = Wording(common_words())

    def texts(seed: int) -> list[str]:
        source = source_of(Traffic(profile=CHAT, trace=trace, seed=seed), wording)
        return [wording.text(spec.prompt_tokens) for spec in source.arrivals()]

    assert texts(1) == texts(1)
    assert common_prefix(texts(1)[0], texts(2)[0]) < 4
    assert common_prefix(*texts(2)) == 4 + 1


def test_what_is_too_long_is_left_out_and_names_are_numbered_anew() -> None:
    long, short = request(3.0, 90, 5), request(4.0, 9, 10**12, 10**15)
    (kept,) = fitting([long, short], 20)
    assert (kept.arrival_s, kept.prompt_tokens, kept.blocks) == (0.0, 9, (0, 1))
    with pytest.raises(ConfigError, match="all 1 requests of the trace are longer than 20"):
        fitting([long], 20)


def test_more_texts_than_words_can_tell_apart() -> None:
    trace = tuple(request(float(n), 9, n) for n in range(9))
    with pytest.raises(ConfigError, match="18 different texts, of which 4 words tell 16 apart"):
        source_of(Traffic(profile=CHAT, trace=trace), Wording("abcd"))
    with pytest.raises(ConfigError, match="17 different texts"):
        source_of(Traffic(profile=CHAT, num_requests=16), Wording("abcd"))
    endless = Traffic(profile=CHAT, num_requests=10**6, duration_s=9.0)
    numbers = {spec.prompt_tokens[:2] for spec in source_of(endless, Wording("abcd")).arrivals()}
    assert all(max(digits) < 4 for digits in numbers)


def test_lengths_scale_together() -> None:
    (one,) = shorter_trace([request(0.0, 1000, 1, 2, block_tokens=512)], 0.1)
    assert (one.prompt_tokens, one.output_tokens, one.block_tokens) == (100, 1, 51)
    (tiny,) = shorter_trace([request(0.0, 1000, 1, block_tokens=512)], 0.001)
    assert tiny.block_tokens == 2
    assert shorter_profile(CHAT, 0.5).output_tokens == round(CHAT.output_tokens / 2)


@dataclass
class Load:
    traffic: Traffic

    def times_s(self) -> list[float]:
        specs = source_of(self.traffic, Wording(common_words())).arrivals()
        return [spec.arrived_ns / 1e9 for spec in specs]


def test_the_rate_of_a_trace_is_set_by_its_speed() -> None:
    trace = fitting([request(5.0 + 2 * n, 9) for n in range(11)], 99)
    traffic = Traffic(profile=CHAT, trace=trace)
    assert traffic.trace_rate_per_s == 0.5
    assert Load(traffic.at_rate(5.0, seed=1)).times_s()[-1] == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="the same time"):
        Traffic(profile=CHAT, trace=trace[:1] * 2).at_rate(1.0, seed=1)


def test_the_rate_of_a_workload_keeps_its_burstiness() -> None:
    profile = msgspec.structs.replace(CHAT, turns=1)
    even = Traffic(profile=profile, arrivals=Arrivals.steady(1.0, burstiness=0.0), num_requests=4)
    assert Load(even.at_rate(2.0, seed=3)).times_s() == [0.5, 1.0, 1.5, 2.0]
    assert Traffic(profile=CHAT, num_requests=5).num_planned == 8  # two sessions of four
