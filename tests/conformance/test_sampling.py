"""Choosing and scoring tokens against a definition in plain Python."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.live.bounds import MIN_REPETITION_PENALTY
from headrace.ops.interface import NO_TOKEN, KvLayout, RowRequest, RowResult
from headrace.ops.philox import uniform
from support.ops_rig import batch_of, compile_rows, view_of

VOCAB = 67
ROWS = (np.random.default_rng(11).standard_normal((24, VOCAB)) * 2).astype(np.float32)
ROWS[3] = np.round(ROWS[3])  # many ties
ROWS[4] = 0.5  # nothing but ties
ROWS[5, 10:] = -np.inf


def chosen(row: Any, spec: SampleSpec) -> int:
    params = spec.params
    values = [float(value) for value in row]
    if params.needs_history:
        for token in set(spec.prompt_tokens) | set(spec.output_tokens):
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        for token, count in Counter(spec.output_tokens).items():
            values[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in spec.banned:
        values[token] = -math.inf
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return order[0]
    if params.top_k > 0:
        order = order[: params.top_k]
    top = values[order[0]]
    masses = [math.exp((values[token] - top) / params.temperature) for token in order]
    masses = [mass for mass in masses if mass >= params.min_p * masses[0]]
    whole = sum(masses)
    total, kept = 0.0, []
    for mass in masses:
        kept.append(mass)
        total += mass
        if params.top_p < 1 and total >= params.top_p * whole:
            break
    drawn, total = uniform(params.seed, params.choice, spec.position) * sum(kept), 0.0
    for token, mass in zip(order, kept, strict=False):
        total += mass
        if total > drawn:
            return token
    return order[len(kept) - 1]


def finish(backend: Any, rows: Any, requests: list[RowRequest]) -> Any:
    program = compile_rows(backend, lambda ops, x, w: x, rows)
    program.run(batch_of((range(len(rows)), 0, [0, 1])))
    return program.finish_rows(requests)


CASES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 1.7, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 1 - 1e-16},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1e-3},
    {"temperature": 1e-300},
    {"temperature": 1.0, "top_k": VOCAB + 1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.8, "repetition_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "presence_penalty": -1.5, "frequency_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": ((5, 100.0), (6, -100.0))},
    {"temperature": 1.0, "logit_bias": ((1, 2.5), (2, 2.5), (66, 1.0))},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parameter_means_what_it_says(backend: Any, case: dict[str, Any]) -> None:
    specs = [
        SampleSpec(
            SamplingParams(seed=2**63 + i, choice=i % 3, **case),
            position=100 + i,
            banned=(int(ROWS[i].argmax()),) if i % 4 == 1 else (),
            prompt_tokens=(1, 2, 3, 66),
            output_tokens=(3, 4, 4, i % VOCAB),
        )
        for i in range(len(ROWS))
    ]
    results = finish(backend, ROWS, [RowRequest(spec) for spec in specs])
    assert [result.token for result in results] == [
        chosen(row, spec) for row, spec in zip(ROWS, specs, strict=True)
    ]


@pytest.mark.parametrize(
    "case",
    [
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 0.7, "top_k": 700, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.001},
    ],
    ids=str,
)
def test_a_large_vocabulary(backend: Any, case: dict[str, Any]) -> None:
    """Large enough that whoever sorts only what is looked at looks at all of it, sometimes."""
    rows = np.random.default_rng(8).standard_normal((12, 6000)).astype(np.float32)
    rows[6:] *= 3
    specs = [SampleSpec(SamplingParams(seed=i, **case), position=i) for i in range(len(rows))]
    results = finish(backend, rows, [RowRequest(spec, None, 100) for spec in specs])
    assert [result.token for result in results] == [
        chosen(row, spec) for row, spec in zip(rows, specs, strict=True)
    ]
    for row, result in zip(rows, results, strict=True):
        best = np.argsort(-row, kind="stable")[:100].tolist()
        assert [token for token, _ in result.logprob.top] == best


@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_greedy_of_a_large_product(backend: Any, num_rows: int) -> None:
    """Large enough to be computed in stretches. Whole numbers, of which the greatest is there
    several times.
    """
    rng = np.random.default_rng(num_rows)
    rows, weight = (
        rng.integers(-1, 2, shape).astype(np.float32) for shape in ((num_rows, 64), (9001, 64))
    )
    weight[4500:9000] = weight[:4500]
    exact = rows @ weight.T
    head = {"w": view_of(weight)}
    program = compile_rows(backend, lambda ops, x, w: ops.linear(x, (w["w"],)), rows, head)
    greedy = RowRequest(SampleSpec(SamplingParams(temperature=0.0), position=0))
    for count in {num_rows, 1}:
        program.run(batch_of((range(count), 0, range(13))))
        results = program.finish_rows([greedy] * count)
        assert [result.token for result in results] == exact[:count].argmax(-1).tolist()


def test_what_is_no_number_in_a_large_product_is_seen(backend: Any) -> None:
    weight = np.ones((9001, 64), np.float32)
    weight[7000] = np.inf
    head = {"w": view_of(weight)}
    rows = np.ones((1, 64), np.float32)
    program = compile_rows(backend, lambda ops, x, w: ops.linear(x, (w["w"],)), rows, head)
    program.run(batch_of(([0], 0, [0])))
    greedy = RowRequest(SampleSpec(SamplingParams(temperature=0.0), position=0))
    assert [row.fault for row in program.finish_rows([greedy])] == ["not a number"]


@pytest.mark.parametrize(
    ("row", "factor", "token"),
    [
        # A factor above 1 takes from the seen token 0 on both sides of zero, one below 1 gives.
        ([0.5, 0.4], 1.5, 1),
        ([-0.5, -0.6], 1.5, 1),
        ([0.4, 0.5], 0.5, 0),
        ([-0.6, -0.5], 0.5, 0),
        ([0.0, -0.1], 1.5, 0),
    ],
)
def test_a_seen_token_is_penalised_towards_its_sign(
    backend: Any, row: list[float], factor: float, token: int
) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=factor)
    for seen in ({"prompt_tokens": (0, 0)}, {"output_tokens": (0,)}):
        request = RowRequest(SampleSpec(params, 1, **seen))
        assert finish(backend, np.array([row], np.float32), [request])[0].token == token


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_draws_follow_the_distribution(backend: Any, varied: str) -> None:
    """Over the positions of one sequence, the choices of one request, and requests' seeds."""
    shares = np.array([0.5, 0.25, 0.15, 0.1])
    num_draws = 2000
    fixed = {"seed": 5, "choice": 2, "position": 31}
    draws = [fixed | {varied: i} for i in range(num_draws)]
    specs = [
        SampleSpec(SamplingParams(seed=draw["seed"], choice=draw["choice"]), draw["position"])
        for draw in draws
    ]
    program = compile_rows(
        backend,
        lambda ops, x, w: x,
        np.log(shares, dtype=np.float32)[None],
        kv=KvLayout(1, 1, 2, 128),
        max_tokens=num_draws,
    )
    program.run(batch_of(([0] * num_draws, 0, range(128))))
    tokens = [one.token for one in program.finish_rows([RowRequest(spec) for spec in specs])]
    expected = shares * num_draws
    counts = np.bincount(tokens, minlength=4)
    # Chi-square with 3 degrees of freedom: 16.3 is passed once in a thousand seeds.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3
    # Neighbours are independent: as many pairs as the product of their shares says. 15 degrees of
    # freedom: 37.7 is passed once in a thousand.
    pairs = np.bincount(4 * np.array(tokens[:-1]) + tokens[1:], minlength=16)
    expected = np.outer(shares, shares).ravel() * (num_draws - 1)
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7


def test_scores_are_those_of_the_model_itself(backend: Any) -> None:
    spec = SampleSpec(SamplingParams(temperature=0.0, logit_bias=((9, 100.0),)), 7)
    requests = [RowRequest(spec, None, 4) for _ in ROWS]
    exact = ROWS.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True))
    exact -= ROWS.max(-1, keepdims=True)
    for row, logprobs, result in zip(ROWS, exact, finish(backend, ROWS, requests), strict=True):
        assert result.token == 9
        scored = result.logprob
        assert scored.token_id == 9
        assert scored.logprob == pytest.approx(logprobs[9], abs=1e-6)
        assert scored.rank == int((row > row[9]).sum())
        order = sorted(range(VOCAB), key=lambda token: (-row[token], token))[:4]
        assert [token for token, _ in scored.top] == order
        assert [value for _, value in scored.top] == pytest.approx(list(logprobs[order]), abs=1e-6)


def test_known_tokens_are_scored_without_alternatives_too(backend: Any) -> None:
    results = finish(backend, ROWS[:2], [RowRequest(None, 3, 0), RowRequest(None, 0, None)])
    assert (results[0].token, results[0].logprob.token_id, results[0].logprob.top) == (3, 3, ())
    assert results[1].logprob is None


def test_all_alternatives_sum_to_one(backend: Any) -> None:
    results = finish(backend, ROWS[:2], [RowRequest(None, 3, VOCAB)] * 2)
    for result in results:
        assert sum(math.exp(value) for _, value in result.logprob.top) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_to_choose_from_is_an_error_not_a_hang(backend: Any, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    everything = RowRequest(SampleSpec(params, 1, banned=tuple(range(VOCAB))))
    assert finish(backend, ROWS[:1], [everything])[0].fault == "every token is banned"
    # The last that is left is chosen, however unlikely it was.
    for token in (0, 9):
        others = tuple(i for i in range(VOCAB) if i != token)
        request = RowRequest(SampleSpec(params, 1, banned=others))
        assert finish(backend, ROWS[:1], [request])[0].token == token


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "request_",
    [
        RowRequest(SampleSpec(SamplingParams(temperature=0.0), 1)),
        RowRequest(SampleSpec(SamplingParams(), 1, banned=(5,))),
        RowRequest(None, 3, 1),
    ],
    ids=["greedy", "drawn", "scored"],
)
def test_a_row_that_is_no_number_spoils_no_other(
    backend: Any, value: float, request_: RowRequest
) -> None:
    broken = ROWS[:3].copy()
    broken[1, 5] = value
    sound = finish(backend, ROWS[:3], [request_] * 3)
    sound[1] = RowResult(NO_TOKEN, None, "not a number")
    assert finish(backend, broken, [request_] * 3) == sound


@pytest.mark.parametrize("top_k", [0, VOCAB - 1])
def test_a_penalty_that_overflows_is_an_error_not_a_hang(backend: Any, top_k: int) -> None:
    params = SamplingParams(repetition_penalty=1e-308, top_k=top_k)
    row = np.full((1, VOCAB), 20.0, np.float32)
    request = RowRequest(SampleSpec(params, 1, prompt_tokens=(1, 2, 3)))
    assert finish(backend, row, [request])[0].fault == "not a number"
    # The least that a request may ask for leaves what was seen, and an order of it.
    params = SamplingParams(temperature=1e-5, repetition_penalty=MIN_REPETITION_PENALTY)
    row[0, 2] = 20.1
    request = RowRequest(SampleSpec(params, 1, prompt_tokens=(1, 2, 3)))
    assert finish(backend, row, [request])[0].token == 2


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(backend: Any, token: int) -> None:
    biased = SampleSpec(SamplingParams(logit_bias=((token, 1.0),)), 1)
    seen = SamplingParams(repetition_penalty=1.5)
    for spec in (
        biased,
        SampleSpec(SamplingParams(), 1, banned=(token,)),
        SampleSpec(seen, 1, prompt_tokens=(token,)),
        SampleSpec(seen, 1, output_tokens=(token,)),
    ):
        with pytest.raises(DeviceError):
            finish(backend, ROWS[:1], [RowRequest(spec)])


def test_one_request_for_each_row(backend: Any) -> None:
    with pytest.raises(DeviceError):
        finish(backend, ROWS[:2], [RowRequest(None, 1, 0)])


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_a_target_outside_the_vocabulary_is_an_error(backend: Any, target: int) -> None:
    with pytest.raises(DeviceError):
        finish(backend, ROWS[:1], [RowRequest(None, target, 0)])
