"""The load client against a small server of the completions endpoint."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from headrace.bench.client import Answer
from headrace.bench.loads import LOADS, Load, LoadReport, Spread, Target, prompts_of, run_load
from headrace.bench.prompts import PromptWriter
from headrace.core.base.errors import HeadraceError
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def uncounted(reason: str) -> list[str]:
    """A stream without usage, as llama-cpp-python's."""
    choices = [{"text": " x", "finish_reason": None}], [{"text": "", "finish_reason": reason}]
    return [*(json.dumps({"choices": one}) for one in choices), "[DONE]"]


class SmallServer:
    """Counts words, answers each at once, and remembers what came."""

    def __init__(self, *, miscount: int = 0, status: int = 200, lines: Sequence[str] = ()) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_open = self.num_open = 0
        self.miscount, self.status, self.lines = miscount, status, lines

    def events(self, body: dict[str, Any]) -> list[str]:
        num = body["max_tokens"]
        words: list[dict[str, Any]] = [
            {"choices": [{"text": " x", "finish_reason": None}]} for _ in range(num)
        ]
        end: dict[str, Any] = {"choices": [{"text": "", "finish_reason": "length"}]}
        usage = {
            "prompt_tokens": len(encode(body["prompt"])) + self.miscount,
            "completion_tokens": num,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        return [*map(json.dumps, [*words, end, {"choices": [], "usage": usage}]), "[DONE]"]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(10):  # lets every request that is to be open arrive
            await asyncio.sleep(0)
        for line in self.lines or self.events(body):
            await response.write(f"data: {line}\n\n".encode())
        self.num_open -= 1
        return response


def run(server: SmallServer, load: Load) -> LoadReport:
    async def main() -> LoadReport:
        app = web.Application()
        app.router.add_post("/v1/completions", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            target = Target(f"http://{host}:{port}", "m")
            return await run_load(target, load, prompts_of(load, PromptWriter(encode, seed=3)))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


LOAD = Load(
    name="l",
    num_requests=5,
    num_prompt_tokens=9,
    num_output_tokens=4,
    num_shared_tokens=6,
    num_warmups=1,
    at_once=True,
)


def test_report_counts_the_requests_without_the_warm_up() -> None:
    server = SmallServer()
    report = run(server, LOAD)
    assert len(server.bodies) == 6
    assert (report.num_requests, report.num_prompt_tokens, report.num_output_tokens) == (5, 45, 20)
    assert report.num_cached_tokens == 10
    assert report.wall_s > 0
    assert report.output_tokens_per_s == pytest.approx(20 / report.wall_s)


def test_a_stream_without_counts_that_ended_for_its_length_has_its_length() -> None:
    report = run(SmallServer(lines=uncounted("length")), LOAD)
    assert (report.num_prompt_tokens, report.num_output_tokens) == (45, 20)


def test_requests_share_their_prefix_and_ask_for_what_the_load_says() -> None:
    server = SmallServer()
    run(server, LOAD)
    prompts = [body["prompt"].split() for body in server.bodies]
    assert {tuple(prompt[:6]) for prompt in prompts} == {tuple(prompts[0][:6])}
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in server.bodies)


def test_prompts_of_a_load_do_not_depend_on_what_came_before() -> None:
    alone = prompts_of(LOADS["batch"], PromptWriter(encode, seed=3))
    writer = PromptWriter(encode, seed=3)
    others = prompts_of(LOADS["single"], writer)
    assert prompts_of(LOADS["batch"], writer) == alone
    beginnings = [prompt[:60] for prompt in [*others, *alone]]
    assert len({*beginnings}) == len(beginnings)


def test_at_once_and_one_after_another() -> None:
    together, alone = SmallServer(), SmallServer()
    run(together, LOAD)
    run(alone, Load(name="l", num_requests=3, num_prompt_tokens=9, num_output_tokens=4))
    assert together.most_open > 1
    assert alone.most_open == 1


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (SmallServer(miscount=1), "counts other tokens"),
        (SmallServer(status=503), "status=503, body=no room"),
        (SmallServer(lines=['{"error": {"message": "lost"}}']), "server failed"),
        (SmallServer(lines=["[DONE]"]), "had no token"),
        (SmallServer(lines=uncounted("stop")), "did not end for its length"),
        (SmallServer(lines=['{"choices": []}']), "ended before"),
    ],
)
def test_a_faulty_answer_is_no_figure(server: SmallServer, message: str) -> None:
    with pytest.raises(HeadraceError, match=message):
        run(server, LOAD)


def test_figures_follow_their_definitions() -> None:
    answers = [
        Answer(
            sent_ns=Ns(1 * NS_PER_S),
            first_token_ns=Ns(1 * NS_PER_S + ttft_ms * NS_PER_MS),
            last_token_ns=Ns(2 * NS_PER_S + ttft_ms * NS_PER_MS),
            num_prompt_tokens=9,
            num_output_tokens=5,
            num_cached_tokens=0,
        )
        for ttft_ms in (500, 600, 1500)
    ]
    report = LoadReport.of(LOAD, answers)
    assert report.wall_s == 2.5
    assert report.output_tokens_per_s == 6.0
    assert report.ttft_ms == Spread(p50=600.0, mean=2600 / 3, p99=1500.0)
    assert report.tpot_ms == Spread(p50=250.0, mean=250.0, p99=250.0)
    assert report.prefill_tokens_per_s == 15.0


def test_the_standard_loads_keep_their_sizes() -> None:
    sizes = {
        name: (load.num_requests, load.num_prompt_tokens, load.num_output_tokens)
        for name, load in LOADS.items()
    }
    assert sizes == {
        "single": (3, 512, 128),
        "batch": (32, 256, 128),
        "shared": (32, 1056, 32),
        "shared_cold": (32, 1056, 32),
        "prefill": (3, 2048, 2),
    }
