"""TorchBackend: the readable reference of the backend port, on CPU or CUDA.

Every operation is what its definition says and nothing more: weights are float32, a program calls
the model's `forward` anew for each step, attention gathers each sequence's keys and values and
computes a plain softmax.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from headrace.core.base.errors import DeviceError
from headrace.core.base.plan import BlockCopy
from headrace.ops.interface import (
    AttentionSpec,
    Forward,
    KvFile,
    KvLayout,
    KvType,
    Rope,
    RowRequest,
    RowResult,
    StepBatch,
    TensorView,
)
from headrace.ops.torch.dequantise import dequantise
from headrace.ops.torch.sampling import finish_row


class TorchBackend:
    """Weights and programs on one torch device. PyTorch's kernels may round differently for other
    batch shapes, so it is not batch-invariant.
    """

    name = "torch"
    batch_invariant = False
    arithmetic = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._num_bytes = 0

    def load_weight(self, view: TensorView) -> Tensor:
        weight = dequantise(view, self.device)
        if view.order:
            weight = weight[:, torch.tensor(view.order, device=self.device).argsort()]
        self._num_bytes += weight.nbytes
        return weight

    def weight_bytes(self) -> int:
        return self._num_bytes

    def compile(
        self,
        forward: Forward[Tensor, Tensor],
        kv: KvLayout,
        max_tokens: int,
        kv_file: KvFile | None = None,
    ) -> "TorchProgram":
        if kv_file is not None:
            raise DeviceError("the torch backend keeps its KV pool to itself")
        try:
            return TorchProgram(forward, kv, max_tokens, self.device)
        except RuntimeError as error:  # torch's word for "out of memory"
            raise DeviceError(
                "the KV pool does not fit", num_bytes=kv.num_blocks * kv.block_bytes
            ) from error


class TorchProgram:
    """A model's `forward` and its KV pool [layers, blocks, block size, 2, Hkv, D]: float32 that
    hold what keys and values are after rounding to the pool's type.
    """

    def __init__(
        self, forward: Forward[Tensor, Tensor], kv: KvLayout, max_tokens: int, device: str
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._max_tokens = max_tokens
        self._device = device
        shape = (kv.num_layers, kv.num_blocks, kv.block_size, 2, kv.num_kv_heads, kv.head_dim)
        self._pool = torch.zeros(shape, device=device)
        self._logits = torch.empty(0, 0)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> None:
        self._check(batch)
        # On the CPU, so that what is drawn from a row depends on no device's order of summation.
        self._logits = self._forward(
            TorchStep(batch, self._pool, self._kv.dtype, self._device)
        ).cpu()

    def finish_rows(self, requests: Sequence[RowRequest]) -> list[RowResult]:
        if len(requests) != len(self._logits):
            raise DeviceError(
                "one request for each logits row", rows=len(self._logits), requests=len(requests)
            )
        try:
            return list(map(finish_row, self._logits, requests))
        except ValueError as error:
            raise DeviceError(f"a row request cannot be met: {error}") from None

    def logits(self) -> list[list[float]]:
        rows: list[list[float]] = self._logits.tolist()
        return rows

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        num_blocks, size = self._kv.num_blocks, self._kv.block_size
        for copy in copies:
            if not (0 <= copy.src < num_blocks and 0 <= copy.dst < num_blocks):
                raise DeviceError("block copy is outside the pool", copy=copy, limit=num_blocks)
            if not 1 <= copy.num_tokens <= size:
                raise DeviceError("block copy is not of 1 to block_size tokens", copy=copy)
        for copy in copies:
            self._pool[:, copy.dst, : copy.num_tokens] = self._pool[:, copy.src, : copy.num_tokens]

    def ready_blocks(self) -> bool:
        return False  # its pool is there

    def _check(self, batch: StepBatch) -> None:
        num_tokens, kv = len(batch.tokens), self._kv
        starts, rows = list(batch.token_starts), list(batch.logit_rows)
        if not 0 < num_tokens <= self._max_tokens:
            raise DeviceError(
                "step size is out of range", tokens=num_tokens, limit=self._max_tokens
            )
        if not len(starts) - 1 == len(batch.positions) == len(batch.block_tables):
            raise DeviceError("sequences are counted differently", tables=len(batch.block_tables))
        if (starts[0], starts[-1]) != (0, num_tokens):
            raise DeviceError("token starts do not divide the tokens", tokens=num_tokens)
        for i, (start, end) in enumerate(pairwise(starts)):
            blocks, position = batch.block_tables[i], batch.positions[i]
            if end <= start or position < 0:
                raise DeviceError("no such share", sequence=i, tokens=end - start, start=position)
            if len(blocks) * kv.block_size < position + end - start:
                raise DeviceError("block table is too short", sequence=i, blocks=len(blocks))
            if not all(0 <= block < kv.num_blocks for block in blocks):
                raise DeviceError("block id is out of range", sequence=i, limit=kv.num_blocks)
        if any(a >= b for a, b in pairwise([-1, *rows, num_tokens])):
            raise DeviceError("logit rows do not increase within the tokens", limit=num_tokens)


class TorchStep:
    """The `Ops` of one step: each call computes at once."""

    def __init__(self, batch: StepBatch, pool: Tensor, kv_type: KvType, device: str) -> None:
        self._batch = batch
        self._pool = pool
        self._kv_type = kv_type
        self._device = device

    def embed(self, table: Tensor) -> Tensor:
        tokens = list(self._batch.tokens)
        if not all(0 <= token < len(table) for token in tokens):
            raise DeviceError("token id is out of range", limit=len(table))
        return table[torch.tensor(tokens, device=self._device)]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight[0]

    def linear(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
    ) -> Tensor:
        parts = [x @ weight.T for weight in weights]
        for i, bias in enumerate(biases):
            if bias is not None:
                parts[i] = parts[i] + bias[0]
        return torch.cat(parts, dim=-1)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def attention(self, qkv: Tensor, layer: int, spec: AttentionSpec, rope: Rope) -> Tensor:
        batch = self._batch
        outputs = []
        for i, (start, end) in enumerate(pairwise(batch.token_starts)):
            first = batch.positions[i]
            positions = torch.arange(first, first + end - start, device=self._device)
            blocks = torch.tensor(list(batch.block_tables[i]), device=self._device)
            outputs.append(self._attend(qkv[start:end], positions, blocks, layer, spec, rope))
        return torch.cat(outputs)

    def _attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        blocks: Tensor,
        layer: int,
        spec: AttentionSpec,
        rope: Rope,
    ) -> Tensor:
        """One sequence: qkv [N, (H + 2 Hkv) * D] at `positions` [N] -> [N, H * D]."""
        num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, spec.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = rotate(q, positions, rope), rotate(k, positions, rope)
        pool, size = self._pool[layer], self._pool.shape[2]
        stored = round_kv(torch.stack((k, v), 1), self._kv_type)
        pool[blocks[positions // size], positions % size] = stored

        seen = torch.arange(int(positions[-1]) + 1, device=self._device)
        cached = pool[blocks[seen // size], seen % size]  # [S, 2, Hkv, D]
        keys, values = cached.repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)
        scores = torch.einsum("nhd,shd->hns", q, keys) * spec.scale
        scores = scores.masked_fill(seen > positions[:, None], -torch.inf)
        return torch.einsum("hns,shd->nhd", scores.softmax(dim=-1), values).flatten(1)

    def select_logit_rows(self, x: Tensor) -> Tensor:
        return x[torch.tensor(list(self._batch.logit_rows), dtype=torch.long, device=self._device)]


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [N, heads, D] at `positions` [N]."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64, device=x.device)
    angles = (positions.double()[:, None] * inv_freq)[:, None]  # [N, 1, D / 2]
    cos, sin = angles.cos().float(), angles.sin().float()
    if rope.interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        turned = (first * cos - second * sin, first * sin + second * cos)
        return torch.stack(turned, dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def round_kv(x: Tensor, kv_type: KvType) -> Tensor:
    """Keys or values [..., D] in float32, as the KV pool gives them back."""
    match kv_type:
        case KvType.BF16:
            return x.bfloat16().float()
        case KvType.FP8:
            finite = torch.where(x.isfinite(), x, torch.nan)
            return finite.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        case KvType.INT8:
            greatest = x.abs().amax(dim=-1, keepdim=True)
            factor = torch.where(greatest < 1e-30, 0.0, 127 / greatest)
            # In float64 the product is exact, so that it is rounded once.
            levels = (x.double() * factor.double()).round().float()
            return levels * torch.where(greatest.isfinite(), greatest / 127, torch.nan)
