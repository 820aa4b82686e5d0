"""Choosing and scoring tokens against a definition in plain Python."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.ops.interface import RowRequest
from headrace.ops.philox import uniform
from support.ops_rig import batch_of, compile_rows

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
    masses = [mass / sum(masses) for mass in masses]
    masses = [mass for mass in masses if mass >= params.min_p * masses[0]]
    total, kept = 0.0, []
    for mass in masses:
        kept.append(mass)
        total += mass
        if params.top_p < 1 and total >= params.top_p * sum(masses):
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


def test_draws_follow_the_distribution(backend: Any) -> None:
    row = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32))
    program = compile_rows(backend, lambda ops, x, w: x, row)
    program.run(batch_of(([0], 0, [0])))
    counts = np.zeros(4)
    num_draws = 4000
    for position in range(num_draws):
        spec = SampleSpec(SamplingParams(seed=5), position)
        counts[program.finish_rows([RowRequest(spec)])[0].token] += 1
    expected = np.array([0.5, 0.25, 0.15, 0.1]) * num_draws
    # Chi-square with 3 degrees of freedom: 16.3 is passed once in a thousand seeds.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


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


def test_nothing_to_choose_from_is_an_error_not_a_hang(backend: Any) -> None:
    everything = SampleSpec(SamplingParams(), 1, banned=tuple(range(VOCAB)))
    with pytest.raises(DeviceError, match="banned"):
        finish(backend, ROWS[:1], [RowRequest(everything)])
    broken = ROWS[:1].copy()
    broken[0, 5] = np.nan
    for temperature in (0.0, 1.0):
        spec = SampleSpec(SamplingParams(temperature=temperature), 1)
        with pytest.raises(DeviceError):
            finish(backend, broken, [RowRequest(spec)])


def test_one_request_for_each_row(backend: Any) -> None:
    with pytest.raises(DeviceError):
        finish(backend, ROWS[:2], [RowRequest(None, 1, 0)])


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_a_target_outside_the_vocabulary_is_an_error(backend: Any, target: int) -> None:
    with pytest.raises(DeviceError):
        finish(backend, ROWS[:1], [RowRequest(None, target, 0)])
