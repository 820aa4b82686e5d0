"""Sources ask the same whoever answers, and share the prefixes that they should."""

from itertools import pairwise
from statistics import fmean

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.closed_loop import ClosedLoop
from headrace.core.workload.profiles import AGENT, CHAT, PROFILES, RAG, WorkloadProfile
from headrace.core.workload.replay import TraceSource
from headrace.core.workload.synthetic import SessionShape, Synthetic, SyntheticSource
from headrace.core.workload.tokens import TokenBook
from headrace.core.workload.traces import TraceRequest


def asked(workload: Synthetic, answer_s: float = 1.0) -> list[SeqSpec]:
    """All that it asks of somebody who answers everything after `answer_s`."""
    source = SyntheticSource(workload)
    found = list(source.arrivals())
    for spec in found:
        output = range(spec.params.max_tokens)
        following = source.follow_up(spec, output, Ns(spec.arrived_ns + round(answer_s * NS_PER_S)))
        if following is not None:
            found.append(following)
    return found


def workload(profile: WorkloadProfile, num_requests: int = 2000, **fields: object) -> Synthetic:
    return Synthetic(
        profile=profile,
        arrivals=Arrivals.steady(10.0),
        num_requests=num_requests,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_lengths_are_those_of_the_profile(profile: WorkloadProfile) -> None:
    found = asked(workload(profile, output_spread=0.5))
    assert len(found) == 2000
    prompts = fmean(len(spec.prompt_tokens) for spec in found)
    assert prompts == pytest.approx(profile.prompt_tokens, rel=0.05)
    outputs = fmean(spec.params.max_tokens for spec in found)
    assert outputs == pytest.approx(profile.output_tokens, rel=0.05)


def test_a_turn_has_the_history_as_its_prefix_and_comes_after_a_pause() -> None:
    found = {spec.request_id: spec for spec in asked(workload(CHAT, 40))}
    for session in range(10):
        turns = [found[f"{session}.{turn}"] for turn in range(1, 5)]
        for before, after in pairwise(turns):
            history = before.prompt_tokens + tuple(range(before.params.max_tokens))
            assert after.prompt_tokens[: len(history)] == history
            assert len(after.prompt_tokens) > len(history)
            assert after.arrived_ns >= before.arrived_ns + NS_PER_S
    pauses = [one.arrived_ns for one in found.values()]
    assert fmean(pauses) > 10 * NS_PER_S


def test_what_is_asked_does_not_depend_on_when_answers_come() -> None:
    soon, late = asked(workload(AGENT, 60)), asked(workload(AGENT, 60), answer_s=50.0)
    assert {s.seq_id: s.prompt_tokens for s in soon} == {s.seq_id: s.prompt_tokens for s in late}
    other = asked(workload(AGENT, 60, seed=1))
    assert other[0].prompt_tokens != soon[0].prompt_tokens


def test_single_questions_share_their_beginnings() -> None:
    found = asked(workload(RAG, 50, num_prefixes=3))
    num_shared = round(0.1 * RAG.prompt_tokens)
    assert len({spec.prompt_tokens[:num_shared] for spec in found}) == 3
    assert len({spec.prompt_tokens[: num_shared + 2] for spec in found}) == 50


def test_a_session_ends_before_it_is_too_long() -> None:
    found = asked(workload(AGENT, 200, max_tokens=6000))
    assert len(found) < 200
    assert max(len(s.prompt_tokens) + s.params.max_tokens for s in found) <= 6000


def test_turns_that_cannot_be_are_refused() -> None:
    profile = WorkloadProfile(name="x", purpose="", prompt_tokens=100, output_tokens=100, turns=10)
    with pytest.raises(ConfigError, match="10 turns"):
        SessionShape.of(profile)


def test_texts_differ_from_their_first_two_tokens_on() -> None:
    book = TokenBook(vocab_size=100)
    texts = [book.text(number, 40) for number in range(2000)]
    assert len({text[:2] for text in texts}) == 2000
    assert all(len(text) == 40 and max(text) < 100 for text in texts)
    assert book.text(7, 300_000)[:40] == book.text(7, 40)
    assert [len(book.text(7, count)) for count in (0, 1, 2, 3)] == [0, 1, 2, 3]


def test_a_replay_shares_what_the_trace_shared() -> None:
    def request(at_s: float, blocks: tuple[int, ...], num_prompt: int) -> TraceRequest:
        return TraceRequest(
            arrival_s=at_s, prompt_tokens=num_prompt, output_tokens=5, blocks=blocks, block_tokens=8
        )

    trace = [request(0.0, (1, 2), 14), request(1.0, (1, 2, 3), 30), request(2.0, (), 14)]
    first, second, third = TraceSource(trace, speed=2.0).arrivals()
    assert first.prompt_tokens == second.prompt_tokens[:14]
    assert len(second.prompt_tokens) == 30  # the last six have no name
    assert third.prompt_tokens[:2] != first.prompt_tokens[:2]
    assert [one.arrived_ns for one in (first, second, third)] == [0, NS_PER_S // 2, NS_PER_S]


def test_clients_ask_again_when_they_are_answered_until_all_is_asked() -> None:
    inner = SyntheticSource(workload(RAG, 7))
    source = ClosedLoop(inner, 3)
    first = list(source.arrivals())
    assert [spec.arrived_ns for spec in first] == [0, 0, 0]
    later = [source.follow_up(first[0], (1,), Ns(at)) for at in (5, 6, 7, 8, 9)]
    assert [spec and spec.arrived_ns for spec in later] == [5, 6, 7, 8, None]
    found = [*first, *filter(None, later)]
    assert [spec.prompt_tokens for spec in found] == [
        spec.prompt_tokens for spec in SyntheticSource(workload(RAG, 7)).arrivals()
    ]


def test_a_client_goes_on_with_its_session_and_does_not_pause() -> None:
    source = ClosedLoop(SyntheticSource(workload(CHAT, 8)), 1)
    [first] = source.arrivals()
    second = source.follow_up(first, (1, 2), Ns(5))
    assert second is not None
    assert second.arrived_ns == 5
    assert second.prompt_tokens[: len(first.prompt_tokens)] == first.prompt_tokens


def test_a_client_whose_request_was_refused_begins_another_session() -> None:
    source = ClosedLoop(SyntheticSource(workload(CHAT, 8)), 1)
    [first] = source.arrivals()
    second = source.follow_up(first, (), Ns(5))
    assert second is not None
    assert (first.request_id, second.request_id, second.arrived_ns) == ("0.1", "1.1", 5)
