"""The sampler sorts only as far as it looks: against sorting everything, at real sizes."""

import math
from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.ops.interface import NO_TOKEN, RowRequest, RowResult
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from support.ops_rig import batch_of, compile_rows

VOCAB = 5000
RNG = np.random.default_rng(3)
ROWS = np.stack(
    [
        RNG.standard_normal(VOCAB) * 3,
        RNG.standard_normal(VOCAB) * 0.01,  # nearly flat: the draw goes deep into the order
        np.round(RNG.standard_normal(VOCAB)),  # a few distinct values
        np.zeros(VOCAB),
    ]
).astype(np.float32)

# Known answers of the Random123 distribution for philox4x32-10: counter, key, words.
KNOWN = [
    (
        [0] * 4,
        [0] * 2,
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert _native.philox4x32(counter, key) == words


def test_the_draw_is_the_first_53_bits_of_its_counter() -> None:
    seed, choice, position = 0x0123456789ABCDEF, 7, 99
    first, second, *_ = _native.philox4x32([position, choice, 0, 0], [0x89ABCDEF, 0x01234567])
    assert _native.philox(seed, choice, position) == (first << 32 | second) >> 11


def program_of(rows: Any) -> Any:
    program = compile_rows(NativeBackend(threads=2), lambda ops, x, w: x, rows)
    program.run(batch_of((range(len(rows)), 0, [0])))
    return program


def by_sorting(row: Any, params: SamplingParams, position: int) -> int:
    values = row.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(VOCAB), -values))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(values[order] - values[order[0]])
    order, weights = order[weights >= params.min_p], weights[weights >= params.min_p]
    if params.top_p < 1:
        kept = int(np.searchsorted(np.cumsum(weights), params.top_p * weights.sum())) + 1
        order, weights = order[:kept], weights[:kept]
    u = _native.philox(params.seed, params.choice, position) / 2**53
    return int(order[np.searchsorted(np.cumsum(weights), u * weights.sum(), side="right")])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.1},
        {"temperature": 30.0},
        {"top_k": 1},
        {"top_k": 64},
        {"top_k": 65},
        {"top_k": 4999},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.5},
        {"top_k": 700, "top_p": 0.7, "min_p": 0.01},
    ],
    ids=str,
)
def test_draws_are_those_of_a_full_sort(settings: dict[str, Any]) -> None:
    program = program_of(ROWS)
    for position in range(20):
        params = [SamplingParams(seed=seed, **settings) for seed in range(len(ROWS))]
        results = program.finish_rows([RowRequest(SampleSpec(p, position)) for p in params])
        assert [result.token for result in results] == [
            by_sorting(row, p, position) for row, p in zip(ROWS, params, strict=True)
        ]


@pytest.mark.parametrize("num_top", [0, 1, 64, 65, 600, VOCAB, VOCAB + 1])
def test_alternatives_are_those_of_a_full_sort(num_top: int) -> None:
    results = program_of(ROWS).finish_rows([RowRequest(None, 17, num_top)] * len(ROWS))
    for row, result in zip(ROWS, results, strict=True):
        order = np.lexsort((np.arange(VOCAB), -row))[:num_top]
        assert result.logprob is not None
        assert [token for token, _ in result.logprob.top] == list(order)


def test_the_lowest_id_wins_a_greedy_tie() -> None:
    row = np.zeros((1, 40), np.float32)
    row[0, [7, 9, 30]] = 2.5
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    assert program_of(row).finish_rows([RowRequest(spec)])[0].token == 7


def test_weights_that_vanish_are_never_drawn() -> None:
    row = np.full((1, 300), -2000.0, np.float32)
    row[0, 123] = 0.0
    program = program_of(row)
    for position in range(50):
        spec = SampleSpec(SamplingParams(seed=9), position)
        assert program.finish_rows([RowRequest(spec)])[0].token == 123


def test_a_log_probability_of_an_impossible_token_is_minus_infinity() -> None:
    row = np.zeros((1, 4), np.float32)
    row[0, 2] = -np.inf
    result = program_of(row).finish_rows([RowRequest(None, 2, 0)])[0]
    assert result.logprob is not None
    assert result.logprob.logprob == -math.inf


def test_a_faulty_row_is_nobody_elses_affair() -> None:
    rows = ROWS[:3].copy()
    rows[1, 4000] = np.nan
    greedy = RowRequest(SampleSpec(SamplingParams(temperature=0.0), 0))
    first, second, third = program_of(rows).finish_rows([greedy] * 3)
    assert second == RowResult(NO_TOKEN, None, "not a number")
    assert [first, third] == program_of(rows[::2]).finish_rows([greedy] * 2)


@pytest.mark.parametrize(
    "spec",
    [
        SampleSpec(SamplingParams(logit_bias=((40, 1.0),)), 0),
        SampleSpec(SamplingParams(), 0, banned=(-1,)),
        SampleSpec(SamplingParams(), 0, prompt_tokens=(40,)),
        SampleSpec(SamplingParams(), 0, output_tokens=(2**31,)),
        SampleSpec(SamplingParams(temperature=-1.0), 0),
        SampleSpec(SamplingParams(repetition_penalty=0.0), 0),
        SampleSpec(SamplingParams(seed=2**64), 0),
        SampleSpec(SamplingParams(), -1),
    ],
)
def test_what_would_read_outside_the_row_is_refused(spec: SampleSpec) -> None:
    with pytest.raises(DeviceError):
        program_of(ROWS[:1, :40]).finish_rows([RowRequest(spec)])
