"""What keys and values weigh, and how many requests of what length fit beside the weights."""

from collections.abc import Sequence

import msgspec

from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import BYTES_BY_DTYPE, Layout, ModelShape
from headrace.plan.engines import Engine, Provenance
from headrace.plan.steps import kv_room_bytes, num_seqs_that_fit


class KvOnLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a layout; bytes are those of its fullest device."""

    layout: str
    num_gpus: int
    weight_bytes_per_gpu: float
    kv_room_bytes_per_gpu: float  # negative where the weights do not fit
    kv_bytes_per_token_per_gpu: float
    num_seqs_by_tokens: dict[int, int]
    num_kv_copies: int  # of each element, where there are more ranks than KV can be divided over


class KvAnswer(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    accelerator: str
    attention: str
    kv_dtype: str
    kv_elems_per_token: float
    kv_bytes_per_token_by_dtype: dict[str, float]  # while no window is full
    kv_bytes_per_request_by_tokens: dict[int, float]
    layouts: tuple[KvOnLayout, ...]
    warnings: tuple[str, ...]
    provenance: Provenance


def compute_kv(
    cost: DataSheetCostModel, layouts: Sequence[Layout], lengths: Sequence[int]
) -> KvAnswer:
    model, elem_bytes = cost.model, BYTES_BY_DTYPE[cost.kv_dtype]
    rows = tuple(
        kv_on_layout(msgspec.structs.replace(cost, layout=layout), lengths) for layout in layouts
    )
    return KvAnswer(
        model=model.name,
        accelerator=cost.accelerator.name,
        attention=attention_kind(model),
        kv_dtype=cost.kv_dtype,
        kv_elems_per_token=model.kv_elems_per_token,
        kv_bytes_per_token_by_dtype={
            dtype: model.kv_elems_per_token * size for dtype, size in BYTES_BY_DTYPE.items()
        },
        kv_bytes_per_request_by_tokens={
            length: model.kv_elems_held(length) * elem_bytes for length in lengths
        },
        layouts=rows,
        warnings=tuple(
            f"{row.layout}: {row.weight_bytes_per_gpu / 1e9:.0f} GB of weights leave no room on one"
            f" {cost.accelerator.memory_bytes / 1e9:.0f} GB {cost.accelerator.name}"
            for row in rows
            if row.kv_room_bytes_per_gpu <= 0
        ),
        provenance=Engine().provenance(cost, concurrency=1, context_tokens=max(lengths)),
    )


def kv_on_layout(cost: DataSheetCostModel, lengths: Sequence[int]) -> KvOnLayout:
    layout = cost.layout
    ways = min(layout.tp, cost.model.kv_ways)
    elem_bytes = BYTES_BY_DTYPE[cost.kv_dtype]
    return KvOnLayout(
        layout=str(layout),
        num_gpus=layout.num_gpus,
        weight_bytes_per_gpu=cost.weight_bytes_per_gpu(),
        kv_room_bytes_per_gpu=kv_room_bytes(cost),
        kv_bytes_per_token_per_gpu=cost.model.kv_elems_per_token * elem_bytes / ways / layout.pp,
        num_seqs_by_tokens={length: num_seqs_that_fit(cost, length) for length in lengths},
        num_kv_copies=layout.tp // ways,
    )


def attention_kind(model: ModelShape) -> str:
    """As the field calls it."""
    if model.latent_flop_per_pair:
        kind = "MLA"
    elif model.kv_ways == model.num_heads:
        kind = "MHA"
    else:
        kind = f"GQA, {model.kv_ways} KV heads"
    if model.window_share:
        kind += f", window of {model.window_tokens} in {model.window_share:.0%} of layers"
    return kind
