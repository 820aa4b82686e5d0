"""Servers side by side: ratios by hand, and two real servers of a model that is a formula."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from io import StringIO

import pytest
from aiohttp import web
from rich.console import Console

from headrace.bench.loads import LoadReport, Spread, Target
from headrace.bench.prompts import PromptWriter
from headrace.bench.sides import Side, Sides, compare
from headrace.bench.tables import comparison_table
from headrace.core.base.errors import HeadraceError
from support.fake_engine import MODEL_NAME, byte_tokenizer, formula_model
from support.http_server import RunningServer


def report(load: str, wall_s: float) -> LoadReport:
    spread = Spread(p50=100 * wall_s, mean=1.0, p99=1.0)
    return LoadReport(
        load=load,
        num_requests=1,
        num_prompt_tokens=1,
        num_output_tokens=10,
        num_cached_tokens=0,
        wall_s=wall_s,
        output_tokens_per_s=10 / wall_s,
        prefill_tokens_per_s=1.0,
        ttft_ms=spread,
        tpot_ms=spread,
    )


def side(url: str, *walls_s: float) -> Side:
    return Side(url=url, model="m", reports=[report("single", wall_s) for wall_s in walls_s])


def test_ratios_are_those_of_a_round() -> None:
    # The machine was half as fast in the second round, for both.
    rows = compare([side("a", 1.0, 2.0, 1.0), side("b", 1.5, 3.0, 2.0)])
    wall = next(row for row in rows if row.figure == "wall s")
    assert (wall.medians, wall.ratios) == ([1.0, 2.0], [1.0, 1.5])
    assert (wall.lowest_ratios, wall.highest_ratios) == ([1.0, 1.5], [1.0, 2.0])
    rate = next(row for row in rows if row.figure == "output tokens/s")
    assert rate.ratios == [1.0, pytest.approx(1 / 1.5)]


def test_the_table_has_a_column_for_each_server() -> None:
    sides = [side("http://a", 1.0), side("http://b", 2.0), side("http://c", 0.5)]
    out = StringIO()
    Console(file=out, width=200).print(comparison_table(sides, compare(sides)))
    assert "1: http://a" in out.getvalue()
    assert "ratio 3 : 1" in out.getvalue()
    assert "2.00 (2.00-2.00)" in out.getvalue()


def test_two_servers_get_the_same_prompts_in_turn() -> None:
    with formula_model(max_model_len=4096) as one, formula_model(max_model_len=4096) as two:
        servers = [RunningServer(one), RunningServer(two)]
        try:
            targets = [Target(server.url, MODEL_NAME) for server in servers]
            told: list[int] = []
            offered = Sides(
                targets,
                PromptWriter(byte_tokenizer().encode, seed=1),
                60.0,
                lambda sides, _: told.append(sum(len(side.reports) for side in sides)),
            )
            asyncio.run(offered.run(["prefill"], num_rounds=2))
        finally:
            for server in servers:
                server.stop()
                server.join()
    sides = offered.sides
    assert told == [1, 2, 3, 4]
    assert offered.failures == []
    assert [side.url for side in sides] == [target.url for target in targets]
    for side in sides:
        assert [(r.load, r.num_requests, r.num_prompt_tokens) for r in side.reports] == [
            ("prefill", 3, 3 * 2048)
        ] * 2
    # Two tokens that come in one piece have no time between them, and a ratio of 0.
    assert all(row.ratios[0] == 1.0 and (row.ratios[1] or 0) >= 0 for row in compare(sides))


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


class MoodyServer:
    """Answers each prompt at once, but those of `stuck_tokens` never, and nothing from the first
    one of `last_tokens` on.
    """

    def __init__(self, *, stuck_tokens: int = 0, last_tokens: int = 0) -> None:
        self.stuck_tokens = stuck_tokens
        self.last_tokens = last_tokens
        self.is_lost = False
        self.is_over = asyncio.Event()
        self.num_asked = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_asked += 1
        num_prompt_tokens = len(encode(body["prompt"]))
        self.is_lost |= num_prompt_tokens == self.last_tokens
        if self.is_lost:
            return web.Response(status=500)
        if num_prompt_tokens == self.stuck_tokens:
            await self.is_over.wait()
            return web.Response()  # nobody reads it
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": body["max_tokens"]}
        token = {"choices": [{"text": " x", "finish_reason": None}]}
        for event in (token, {"choices": [], "usage": usage}):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def offer(servers: Sequence[MoodyServer], names: Sequence[str], num_rounds: int) -> Sides:
    async def main() -> Sides:
        async with AsyncExitStack() as stack:
            targets = []
            for server in servers:
                app = web.Application()
                app.router.add_post("/v1/completions", server.answer)
                runner = web.AppRunner(app)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                stack.callback(server.is_over.set)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                targets.append(Target(f"http://{host}:{port}", "m"))
            offered = Sides(targets, PromptWriter(encode, seed=3), 2.0, lambda *_: None)
            await offered.run(names, num_rounds)
            return offered

    return asyncio.run(main())


def loads_of(side: Side) -> list[str]:
    return [report.load for report in side.reports]


def test_a_load_that_one_server_does_not_end_is_told_and_the_rest_goes_on() -> None:
    offered = offer(
        [MoodyServer(), MoodyServer(stuck_tokens=2048)], ["prefill", "single"], num_rounds=2
    )
    assert [(f.load, f.reason) for f in offered.failures] == [("prefill", "did not end within 2 s")]
    well, stuck = offered.sides
    assert loads_of(well) == ["prefill", "prefill", "single", "single"]
    assert loads_of(stuck) == ["single", "single"]
    rows = {(row.load, row.figure): row for row in compare(offered.sides)}
    assert rows["prefill", "wall s"].medians[1] is None
    assert rows["prefill", "wall s"].ratios == [1.0, None]
    assert rows["single", "wall s"].ratios[1] is not None
    out = StringIO()
    Console(file=out, width=200).print(comparison_table(offered.sides, [*rows.values()]))
    assert "prefill" in out.getvalue()


def test_a_server_that_no_longer_answers_gets_nothing_more() -> None:
    lost = MoodyServer(last_tokens=512)
    offered = offer([lost, MoodyServer()], ["single", "prefill"], num_rounds=1)
    assert [failure.load for failure in offered.failures] == ["single", "warm-up"]
    assert [loads_of(side) for side in offered.sides] == [[], ["single", "prefill"]]
    num_before = 4 + 1 + 4  # the warm-up, the load's own, and the warm-up again
    assert lost.num_asked == num_before
    assert all(row.ratios == [None, None] for row in compare(offered.sides))


def test_where_the_only_server_fails_at_the_beginning_that_is_an_error() -> None:
    with pytest.raises(HeadraceError, match=r"http://.*server refused"):
        offer([MoodyServer(last_tokens=256)], ["single"], num_rounds=1)
