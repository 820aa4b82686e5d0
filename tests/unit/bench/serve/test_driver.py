"""When requests are sent and what follows answers, with an asker that sends nothing."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from headrace.bench.serve.asked import Traffic
from headrace.bench.serve.asker import Asker
from headrace.bench.serve.driver import Driver
from headrace.bench.serve.outcome import Outcome
from headrace.bench.serve.source import source_of
from headrace.bench.serve.wording import Wording
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import CHAT
from support.outcomes import outcome

WORDS = tuple(f"w{number}" for number in range(64))
QUESTIONS = msgspec.structs.replace(CHAT, turns=1, prompt_tokens=4, output_tokens=2)
SESSIONS = msgspec.structs.replace(
    CHAT, turns=3, prompt_tokens=40, output_tokens=2, shared_share=0.0
)


class FakeAsker:
    """Answers after some turns of the loop."""

    def __init__(self, wording: Wording, fault_of: Callable[[SeqSpec], str] = lambda _: "") -> None:
        self.wording = wording
        self.fault_of = fault_of
        self.asked: list[SeqSpec] = []
        self.texts: list[str] = []
        self.num_open = self.most_open = 0
        self.num_turns = 3  # of the loop, for an answer

    def now(self) -> Ns:
        return Ns(round(asyncio.get_running_loop().time() * 1e9))

    def payload(self, spec: SeqSpec) -> bytes:
        return self.wording.text(spec.prompt_tokens).encode()

    async def ask(self, spec: SeqSpec, payload: bytes, due_ns: Ns) -> tuple[Outcome, str]:
        self.asked.append(spec)
        self.texts.append(payload.decode())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        for _ in range(self.num_turns):
            await asyncio.sleep(0)
        self.num_open -= 1
        fault = self.fault_of(spec)
        num = spec.params.max_tokens
        tokens_ms = [due_ns / 1e6 + n + 1 for n in range(num)]
        one = outcome(due_ns / 1e6, tokens_ms, fault=fault, request_id=spec.request_id)
        return msgspec.structs.replace(one, ended_ns=self.now()), f" said{spec.request_id}"


def run(
    traffic: Traffic,
    *,
    fault_of: Callable[[SeqSpec], str] = lambda _: "",
    max_in_flight: int = 100,
    on_end: Callable[[Driver, FakeAsker], None] = lambda driver, asker: None,
    **asker_facts: Any,
) -> tuple[Driver, FakeAsker]:
    async def main() -> tuple[Driver, FakeAsker]:
        wording = Wording(WORDS)
        asker = FakeAsker(wording, fault_of)
        for name, value in asker_facts.items():
            setattr(asker, name, value)
        driver = Driver(
            cast(Asker, asker),
            traffic,
            source_of(traffic, wording),
            wording,
            on_end=lambda one: on_end(driver, asker),
            max_in_flight=max_in_flight,
        )
        async with asyncio.timeout(20):
            await driver.run()
        return driver, asker

    return asyncio.run(main())


def test_clients_wait_for_their_answers() -> None:
    traffic = Traffic(profile=QUESTIONS, concurrency=3, num_requests=20, think_s=0.0)
    driver, asker = run(traffic)
    assert len(driver.outcomes) == 20
    assert asker.most_open == driver.most_in_flight == 3
    assert all(one.lag_ns >= -1 for one in driver.outcomes)


def test_all_at_once() -> None:
    traffic = Traffic(profile=QUESTIONS, is_burst=True, num_requests=20)
    driver, asker = run(traffic, num_turns=50)
    assert asker.most_open == 20
    assert {one.due_ns for one in driver.outcomes} == {0}


def test_no_more_than_may_be_in_flight() -> None:
    traffic = Traffic(profile=QUESTIONS, is_burst=True, num_requests=20)
    driver, asker = run(traffic, max_in_flight=6, num_turns=50)
    assert asker.most_open == 6
    assert len(driver.outcomes) == 20


def test_requests_are_sent_at_times_of_their_own() -> None:
    arrivals = Arrivals.steady(1000.0)
    traffic = Traffic(profile=QUESTIONS, arrivals=arrivals, num_requests=30)
    driver, _ = run(traffic)
    due = sorted(one.due_ns for one in driver.outcomes)
    expected = [spec.arrived_ns for spec in source_of(traffic, Wording(WORDS)).arrivals()]
    assert due == expected


def test_a_session_goes_on_with_what_was_said() -> None:
    traffic = Traffic(profile=SESSIONS, concurrency=1, num_requests=3, think_s=0.0)
    driver, asker = run(traffic)
    assert [spec.request_id for spec in asker.asked] == ["0.1", "0.2", "0.3"]
    first, second, third = asker.texts
    assert second.startswith(f"{first} said0.1 ")
    assert third.startswith(f"{second} said0.2 ")
    assert len(driver.outcomes) == 3


def test_a_failure_ends_its_session_and_no_other() -> None:
    traffic = Traffic(profile=SESSIONS, concurrency=2, num_requests=9, think_s=0.0)
    _, asker = run(traffic, fault_of=lambda one: "x" if one.request_id == "1.1" else "")
    ids = {spec.request_id for spec in asker.asked}
    assert ids == {"0.1", "0.2", "0.3", "1.1", "2.1", "2.2", "2.3"}


@pytest.mark.parametrize("concurrency", [0, 4])
def test_nothing_is_sent_after_the_time(concurrency: int) -> None:
    traffic = Traffic(
        profile=SESSIONS,
        arrivals=Arrivals.steady(3000.0, burstiness=0.0),
        concurrency=concurrency,
        num_requests=1_000_000,
        duration_s=1e-9 if concurrency else 0.05,
        think_s=1000.0,  # whoever would go on would be found by the time limit
    )
    driver, _ = run(traffic)
    # A session's first request comes a thousand times a second, and its time is not reached.
    assert len(driver.outcomes) == (0 if concurrency else 49)


def test_stopping_leaves_what_is_under_way() -> None:
    traffic = Traffic(profile=QUESTIONS, concurrency=4, num_requests=1000, think_s=0.0)

    def on_end(driver: Driver, asker: FakeAsker) -> None:
        if len(driver.outcomes) == 10:
            driver.stop()

    driver, _ = run(traffic, on_end=on_end)
    assert 10 <= len(driver.outcomes) < 20


def test_an_error_of_ours_is_raised() -> None:
    def fault_of(spec: SeqSpec) -> str:
        raise ZeroDivisionError

    traffic = Traffic(profile=QUESTIONS, concurrency=1, num_requests=1)
    with pytest.raises(ExceptionGroup) as caught:
        run(traffic, fault_of=fault_of)
    assert caught.group_contains(ZeroDivisionError)
