"""The next token of a logits row: the definition that every backend follows, written plainly."""

from collections import Counter

import torch
from torch import Tensor

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import SampleSpec, TokenLogprob
from headrace.ops.interface import RowRequest, RowResult
from headrace.ops.philox import uniform


def finish_row(logits: Tensor, request: RowRequest) -> RowResult:
    """Sample from one row [vocab] or score its known next token."""
    if request.sample is not None:
        token = sample(logits, request.sample)
    elif request.target is not None and 0 <= request.target < len(logits):
        token = request.target
    else:
        raise DeviceError("no such token to score", target=request.target, limit=len(logits))
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
    if bool(torch.isnan(adjusted).any()):
        raise DeviceError("logits are not numbers", position=spec.position)
    if not bool(torch.isfinite(adjusted).any()):
        raise DeviceError("every token is banned", position=spec.position)
    if params.temperature == 0:
        return int(_descending(adjusted)[0])
    order = _descending(adjusted)
    if params.top_k > 0:
        order = order[: params.top_k]
    kept = torch.softmax((adjusted[order] / params.temperature).double(), dim=-1)
    kept = kept[kept >= params.min_p * kept[0]]
    if params.top_p < 1:
        enough = torch.cumsum(kept, 0) >= params.top_p * kept.sum()
        kept = kept[: int(enough.nonzero()[0]) + 1]
    drawn = uniform(params.seed, params.choice, spec.position) * float(kept.sum())
    beyond = (torch.cumsum(kept, 0) > drawn).nonzero()
    return int(order[int(beyond[0]) if len(beyond) else len(kept) - 1])


def adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
    """Logits after penalties, bias and bans."""
    params = spec.params
    adjusted = logits.clone()
    if params.needs_history:
        seen = sorted(set(spec.prompt_tokens) | set(spec.output_tokens))
        before = adjusted[seen]
        factor = params.repetition_penalty
        adjusted[seen] = torch.where(before > 0, before / factor, before * factor)
        for token, count in Counter(spec.output_tokens).items():
            adjusted[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    if spec.banned:
        adjusted[list(spec.banned)] = -torch.inf
    return adjusted


def _descending(values: Tensor) -> Tensor:
    """Indices by value, largest first; equal values by index."""
    return torch.sort(values, descending=True, stable=True).indices
