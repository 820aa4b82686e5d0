"""Whole runs against servers that behave, misbehave, or have room for so many."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from headrace.bench.serve.asked import COMPLETIONS, Rules, Target, Traffic
from headrace.bench.serve.discovery import find_model, probe
from headrace.bench.serve.report import Report, report_of
from headrace.bench.serve.run import CONCURRENCY, RATE, Bench, Progress, SearchReport
from headrace.bench.serve.verdict import GONE
from headrace.bench.serve.wording import Wording, common_words
from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.core.base.request import Slo
from headrace.core.workload.profiles import CHAT
from headrace.core.workload.traces import TraceRequest
from support.outcomes import client_facts, outcome

QUESTIONS = msgspec.structs.replace(CHAT, turns=1, prompt_tokens=12, output_tokens=3, pause_s=0.0)
BURST = Traffic(profile=QUESTIONS, is_burst=True, num_requests=12)
RULES = Rules(slo=Slo(), max_lag_ms=60_000.0)  # a busy machine is late: nothing here is about that
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Server:
    """An OpenAI-compatible server; `bend` changes what it is about to say."""

    def __init__(
        self, bend: Callable[[int, list[str]], list[str]] = lambda _, lines: lines
    ) -> None:
        self.bend = bend
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[tuple[str, int]] = set()
        self.room = 1_000
        self.num_open = 0
        self.has_models = True
        self.hold_s = 0.0

    async def models(self, request: web.Request) -> web.Response:
        if not self.has_models:
            return web.Response(status=404)
        return web.json_response({"data": [{"id": "m", "max_model_len": 512}, {"id": "other"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        if self.num_open >= self.room:
            return web.json_response({"error": {"message": "no room"}}, status=503)
        self.num_open += 1
        try:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await asyncio.sleep(self.hold_s)
            for line in self.bend(number, self.lines(body)):
                await response.write(f"data: {line}\n\n".encode())
            return response
        finally:
            self.num_open -= 1

    def lines(self, body: dict[str, Any]) -> list[str]:
        num = body["max_tokens"]
        said = body.get("prompt") or " ".join(one["content"] for one in body["messages"])
        usage = {"prompt_tokens": len(said.split()), "completion_tokens": num}
        return [*[piece(" x")] * num, json.dumps({"choices": [], "usage": usage}), "[DONE]"]


def piece(text: str) -> str:
    return json.dumps({"choices": [{"text": text, "delta": {"content": text}}]})


Use = Callable[[Bench], Awaitable[Any]]


def against(
    server: Server,
    use: Use,
    *,
    rules: Rules = RULES,
    runner: list[web.AppRunner] | None = None,
    **target: Any,
) -> Any:
    """`runner` is told what the server runs in."""

    async def main() -> Any:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        running = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        if runner is not None:
            runner.append(running)
        await running.setup()
        await web.TCPSite(running, "127.0.0.1", 0).start()
        host, port = running.addresses[0][:2]
        asked = Target(url=f"http://{host}:{port}", **{"model": "m", **target})
        bench = Bench(asked, rules, common_words(), f"{asked.url}/metrics", progress.append)
        progress.clear()
        try:
            async with asyncio.timeout(60):
                return await use(bench)
        finally:
            await running.cleanup()

    return asyncio.run(main())


progress: list[Progress] = []


def measured(server: Server, traffic: Traffic = BURST, **facts: Any) -> Report:
    found = against(server, lambda bench: bench.measure(traffic), **facts)
    assert isinstance(found, Report)
    return found


def test_a_run_against_a_server_that_behaves() -> None:
    server = Server()
    report = measured(server, api_key="secret", extra_body={"ignore_eos": True, "top_k": 3})
    assert report.num_counted == report.since_due.num_good == 12
    assert report.faults == []
    assert report.num_output_tokens == sum(body["max_tokens"] for body in server.bodies)
    assert report.num_prompt_tokens == sum(
        len(body["messages"][0]["content"].split()) for body in server.bodies
    )
    assert report.server is None
    assert {body["top_k"] for body in server.bodies} == {3}
    assert {body["stream_options"]["include_usage"] for body in server.bodies} == {True}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert sorted({one.num_ended for one in progress} - {0}) == list(range(1, 13))
    assert progress[-1].num_good == progress[-1].num_planned == 12


@pytest.mark.parametrize(("is_reused", "num_connections"), [(True, 1), (False, 12)])
def test_a_client_keeps_its_connection_or_has_a_new_one(
    is_reused: bool, num_connections: int
) -> None:
    server = Server()
    traffic = msgspec.structs.replace(BURST, is_burst=False, concurrency=1, think_s=0.0)
    report = measured(server, traffic, reuses_connections=is_reused)
    assert report.since_due.num_good == 12
    assert len(server.peers) == num_connections


def test_completions_without_usage() -> None:
    server = Server(lambda _, lines: [line for line in lines if "usage" not in line])
    report = measured(server, endpoint=COMPLETIONS, asks_usage=False)
    assert "stream_options" not in server.bodies[0]
    assert report.since_due.num_good == 12
    assert report.num_output_tokens == sum(body["max_tokens"] for body in server.bodies)
    assert report.num_prompt_tokens is None
    assert any("without usage" in one for one in report.warnings)


def miscounted(completion_tokens: int) -> str:
    usage = {"prompt_tokens": 5, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [], "usage": usage})


@pytest.mark.parametrize(
    ("bend", "fault"),
    [
        (lambda lines: lines[:-1], "broken off"),
        (lambda lines: lines[:1], "broken off"),
        (lambda lines: ['{"error": {"message": "lost"}}'], "server failed"),
        (lambda lines: ["nonsense"], "not understood"),
        (lambda lines: [piece("x")] * 99 + lines, "impossible"),
        (lambda lines: [*lines[:-2], miscounted(0), "[DONE]"], "impossible"),
        (lambda lines: [*lines[:-2], miscounted(999), "[DONE]"], "impossible"),
    ],
)
def test_bad_answers_are_counted_as_what_they_are(
    bend: Callable[[list[str]], list[str]], fault: str
) -> None:
    """Every third answer is bad."""
    server = Server(lambda number, lines: bend(lines) if number % 3 == 0 else lines)
    one = TraceRequest(arrival_s=0.0, prompt_tokens=6, output_tokens=4, blocks=(), block_tokens=0)
    report = measured(server, msgspec.structs.replace(BURST, trace=(one,) * 12))
    assert report.num_failed_by_fault == {fault: 4}
    assert report.since_due.num_good == 8
    assert report.since_due.attainment.value == pytest.approx(8 / 12)
    assert report.since_due.ttft_ms.count == report.tpot_ms.count == 8
    assert bool(report.faults) == (fault == "impossible")


def test_answers_that_take_too_long() -> None:
    server = Server()
    server.hold_s = 30.0
    report = measured(server, msgspec.structs.replace(BURST, num_requests=3), timeout_s=0.2)
    assert report.num_failed_by_fault == {"timed out": 3}
    assert report.faults == ["no request was answered whole"]


def test_a_long_request_is_told_of_while_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.serve.run.TELL_EVERY_S", 0.05)
    server = Server()
    server.hold_s = 30.0
    one = msgspec.structs.replace(BURST, num_requests=1)
    measured(server, one, timeout_s=1.0)
    waiting = [now for now in progress if not now.num_ended]
    assert len(waiting) > 3
    assert waiting[-1].num_in_flight == waiting[-1].num_planned == 1


def test_nobody_listens() -> None:
    async def use(bench: Bench) -> Report:
        bench.target = msgspec.structs.replace(bench.target, url="http://127.0.0.1:1")
        return await bench.measure(BURST)

    report = against(Server(), use)
    assert report.num_failed_by_fault == {"no connection": 12}
    assert report.faults == ["no request was answered whole", GONE]


def leaving_after(num: int, runner: list[web.AppRunner]) -> Callable[[Progress], None]:
    """Take the server away in the middle of a run."""
    tasks = []

    def hear(one: Progress) -> None:
        if one.num_ended == num:
            tasks.append(asyncio.ensure_future(runner[0].cleanup()))

    return hear


@pytest.mark.parametrize("searches", [False, True])
def test_a_server_that_dies_under_a_run_makes_it_no_measurement(searches: bool) -> None:
    traffic = msgspec.structs.replace(BURST, is_burst=False, concurrency=1, think_s=0.0)
    runner: list[web.AppRunner] = []

    async def use(bench: Bench) -> Any:
        bench.on_progress = leaving_after(3, runner)
        if searches:
            return await bench.search(traffic, CONCURRENCY, 1, 12)
        return await bench.measure(traffic)

    found = against(Server(), use, runner=runner)
    if searches:
        search, report, _ = found
        assert (len(search.trials), search.stopped_by, report) == (1, GONE, None)
    else:
        assert found.faults == [GONE]
        assert 3 <= found.since_due.num_good < 12


def test_failures_of_a_server_that_lives_are_data() -> None:
    report = measured(Server(lambda number, lines: lines[:1] if number % 2 else lines))
    assert report.num_failed_by_fault == {"broken off": 6}
    assert report.faults == []


def test_a_run_of_which_nothing_is_good_says_so() -> None:
    rules = msgspec.structs.replace(RULES, slo=Slo(ttft_ms=1e-6))
    report = measured(Server(), rules=rules)
    assert report.faults == ["no request was good: all 12 failed or broke a limit"]


def test_the_search_finds_how_many_clients_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the server holds what a lost trial has left behind.
    monkeypatch.setattr("headrace.bench.serve.run.SETTLE_S", 0.4)
    server = Server()
    server.room, server.hold_s = 5, 0.1
    traffic = Traffic(profile=QUESTIONS, num_requests=24, think_s=0.0, concurrency=1, seed=7)
    found: tuple[SearchReport, Report | None, Any] = against(
        server,
        lambda bench: bench.search(traffic, CONCURRENCY, 4, 12),
        rules=msgspec.structs.replace(RULES, attainment=1.0),
    )
    search, report, outcomes = found
    assert (search.held, search.failed, search.is_settled) == (5.0, 6.0, True)
    assert report is not None
    assert report.client.most_in_flight == 5
    assert len(outcomes) == 24
    assert all(trial.holds == (trial.level <= 5) for trial in search.trials)
    assert any(trial.is_cut_short for trial in search.trials)
    assert len({trial.seed for trial in search.trials}) == len(search.trials)


def test_a_search_of_rates_tells_its_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Traffic] = []

    async def run(
        self: Bench, traffic: Traffic, label: str, *, gives_up: bool
    ) -> tuple[Report, bool]:
        assert gives_up
        assert traffic.arrivals is not None
        tried.append(traffic)
        rate = traffic.arrivals.rates[0][1]
        num_bad = 0 if rate <= 37.0 else 30
        self.outcomes = [
            outcome(10.0 * n, fault="status 503" if n < num_bad else "") for n in range(100)
        ]
        return report_of(self.outcomes, traffic, self.rules, client_facts(), None), False

    monkeypatch.setattr(Bench, "_run", run)
    monkeypatch.setattr("headrace.bench.serve.run.SETTLE_S", 0.0)
    search, report, _ = against(Server(), lambda bench: bench.search(BURST, RATE, 1.0, 20))
    assert search.held <= 37.0 < search.failed <= search.held * 1.051
    assert report is not None
    assert report.since_due.num_good == 100
    assert len({traffic.seed for traffic in tried}) == len(tried) == len(search.trials)


def test_a_search_ends_where_the_client_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Bench, traffic: Traffic, label: str, **_: Any) -> tuple[Report, bool]:
        slow = client_facts(loop_lag_ms=[1e6])
        return report_of([outcome()], traffic, self.rules, slow, None), False

    monkeypatch.setattr(Bench, "_run", run)
    search, report, _ = against(Server(), lambda bench: bench.search(BURST, RATE, 1.0, 20))
    assert len(search.trials) == 1
    assert "client was too slow" in search.stopped_by
    assert report is None


def test_the_model_is_the_first_that_is_listed() -> None:
    async def use(bench: Bench) -> Any:
        unnamed = msgspec.structs.replace(bench.target, model="")
        found = await find_model(unnamed)
        assert (found.id, found.max_model_len) == ("m", 512)
        assert (await find_model(bench.target)).max_model_len == 512
        assert (await find_model(msgspec.structs.replace(unnamed, model="x"))).id == "x"
        server.has_models = False
        assert (await find_model(bench.target)).id == "m"
        with pytest.raises(ConfigError, match="lists no model: status 404"):
            await find_model(unnamed)

    server = Server()
    against(server, use)


def test_what_is_wrong_is_said_before_the_load() -> None:
    server = Server()

    async def use(bench: Bench) -> None:
        wording = Wording(common_words())
        await probe(bench.target, wording)
        server.room = 0
        with pytest.raises(HeadraceError, match="status=503"):
            await probe(bench.target, wording)

    against(server, use)


def test_a_run_that_is_ended_early_has_the_figures_of_what_was_answered() -> None:
    server = Server()
    traffic = msgspec.structs.replace(BURST, is_burst=False, concurrency=1, think_s=0.0)

    async def use(bench: Bench) -> Report:
        def stop_after_three(one: Progress) -> None:
            if one.num_ended == 3:
                server.hold_s = 30.0
                asyncio.get_running_loop().call_later(0.2, bench.stop, "Ctrl-C")

        bench.on_progress = stop_after_three
        return await bench.measure(traffic)

    report = against(server, use)
    assert (report.num_counted, report.since_due.num_good, report.faults) == (3, 3, [])
    assert "ended early by Ctrl-C: requests under way (1)," in report.warnings[0]


def test_a_search_that_is_ended_early_keeps_the_trials_that_had_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.bench.serve.run.SETTLE_S", 0.0)
    traffic = Traffic(profile=QUESTIONS, num_requests=6, think_s=0.0, concurrency=1)

    async def use(bench: Bench) -> Any:
        def stop_in_the_second(one: Progress) -> None:
            if one.label == "concurrency 4":
                bench.stop("Ctrl-C")

        bench.on_progress = stop_in_the_second
        return await bench.search(traffic, CONCURRENCY, 2, 12)

    search, report, outcomes = against(Server(), use)
    assert [(trial.level, trial.holds) for trial in search.trials] == [(2.0, True)]
    assert (search.held, search.failed, search.stopped_by) == (2.0, None, "Ctrl-C")
    assert report.num_counted == len(outcomes) == 6
