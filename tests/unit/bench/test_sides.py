"""Servers side by side: ratios by hand, and two real servers of a model that is a formula."""

import asyncio
from io import StringIO

import pytest
from rich.console import Console

from headrace.bench.loads import LoadReport, Spread, Target
from headrace.bench.prompts import PromptWriter
from headrace.bench.sides import Side, compare, run_sides
from headrace.bench.tables import comparison_table
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
            writer = PromptWriter(byte_tokenizer().encode, seed=1)
            sides = asyncio.run(run_sides(targets, writer, ["prefill"], num_rounds=2))
        finally:
            for server in servers:
                server.stop()
                server.join()
    assert [side.url for side in sides] == [target.url for target in targets]
    for side in sides:
        assert [(r.load, r.num_requests, r.num_prompt_tokens) for r in side.reports] == [
            ("prefill", 3, 3 * 2048)
        ] * 2
    # Two tokens that come in one piece have no time between them, and a ratio of 0.
    assert all(row.ratios[0] == 1.0 and row.ratios[1] >= 0 for row in compare(sides))
