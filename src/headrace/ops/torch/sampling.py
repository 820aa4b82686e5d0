"""The next token of a logits row: the definition that every backend follows, written plainly.

A row from which no token can come has a fault; a request that is none raises ValueError.
"""

from collections import Counter

import torch
from torch import Tensor

from headrace.core.base.plan import SampleSpec, TokenLogprob
from headrace.ops.interface import NO_TOKEN, RowRequest, RowResult
from headrace.ops.philox import uniform


class NoTokenError(Exception):
    """Why none can come from a row."""


def finish_row(logits: Tensor, request: RowRequest) -> RowResult:
    """Sample from one row [vocab] or score its known next token."""
    try:
        return _finished(logits, request)
    except NoTokenError as error:
        return RowResult(NO_TOKEN, None, str(error))


def _finished(logits: Tensor, request: RowRequest) -> RowResult:
    if not bool((logits < torch.inf).all()):  # false of a NaN
        raise NoTokenError("not a number")
    if request.sample is not None:
        token = sample(logits, request.sample)
    elif request.target is not None:
        token = request.target
        _check(token, logits)
    else:
        raise ValueError("neither a choice nor a token to score")
    if request.num_top is None:
        return RowResult(token, None)
    return RowResult(token, score(logits, token, request.num_top))


def score(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Under the model's own distribution, before temperature, penalties and bias."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    best = _descending(logits)[:num_top].tolist()
    return TokenLogprob(
        token_id=token,
        logprob=float(logprobs[token]),
        rank=int((logits > logits[token]).sum()),
        top=tuple((index, float(logprobs[index])) for index in best),
    )


def sample(logits: Tensor, spec: SampleSpec) -> int:
    """One token id. The draw is keyed by (seed, choice) and counted by the position."""
    params = spec.params
    adjusted = adjust(logits, spec)
    order = _descending(adjusted)
    best = adjusted[order[0]]
    if best == -torch.inf:
        raise NoTokenError("every token is banned")
    if params.temperature == 0:
        return int(order[0])
    if best == torch.inf:  # a penalty next to zero
        raise NoTokenError("not a number")
    if params.top_k > 0:
        order = order[: params.top_k]
    # The softmax of logits / temperature. Taking the best away first, it cannot overflow.
    kept = torch.softmax((adjusted[order] - best) / params.temperature, dim=-1)
    cumulative = torch.cumsum(kept[kept >= params.min_p * kept[0]], 0)
    if params.top_p < 1:
        enough = cumulative >= params.top_p * cumulative[-1]
        cumulative = cumulative[: int(enough.nonzero()[0]) + 1]
    drawn = uniform(params.seed, params.choice, spec.position) * cumulative[-1]
    return int(order[int((cumulative > drawn).nonzero()[0])])


def adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
    """Logits in float64, after penalties, bias and bans."""
    params = spec.params
    biased = [token for token, _ in params.logit_bias]
    for token in (*spec.prompt_tokens, *spec.output_tokens, *biased, *spec.banned):
        _check(token, logits)
    adjusted = logits.double()
    if params.needs_history:
        seen = list({*spec.prompt_tokens, *spec.output_tokens})
        before, factor = adjusted[seen], params.repetition_penalty
        adjusted[seen] = torch.where(before > 0, before / factor, before * factor)
        for token, count in Counter(spec.output_tokens).items():
            adjusted[token] -= params.frequency_penalty * count
            adjusted[token] -= params.presence_penalty
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    adjusted[list(spec.banned)] = -torch.inf
    return adjusted


def _check(token: int, logits: Tensor) -> None:
    if not 0 <= token < len(logits):
        raise ValueError(f"token {token} is outside the vocabulary of {len(logits)}")


def _descending(values: Tensor) -> Tensor:
    """Indices by value, largest first; equal values by index."""
    return torch.sort(values, descending=True, stable=True).indices
