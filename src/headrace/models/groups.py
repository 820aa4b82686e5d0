"""Matrices of integers in groups, as AWQ and GPTQ store them in folders of safetensors.

Decides what a `quantization_config` means, which tensors make a matrix, and what no block type can
hold. The formats are those that AutoAWQ ("gemm") and AutoGPTQ and GPTQModel ("gptq", "gptq_v2")
write. A weight is scale * (q - zero), which blocks hold exactly; the kernels of others round it to
float16.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.models.facts import Facts
from headrace.ops.interface import TensorView, WeightType
from headrace.ops.native import _native
from headrace.ops.native.backend import default_threads

_HINT = "use a checkpoint in 4-bit AWQ or GPTQ, float weights or a GGUF file"
_LAYOUTS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
_BLOCK = 32  # inputs; groups are of whole blocks
# The upper bytes of float16 whose exponent is all ones.
_HALVES_WITHOUT_VALUE = frozenset((*range(0x7C, 0x80), *range(0xFC, 0x100)))


class Grouping(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a folder's matrices are packed."""

    method: str  # "awq" or "gptq"
    bits: int
    group_size: int  # inputs that share a scale and a zero; 0 = all
    zero_offset: int  # zero = stored + this, modulo 2^bits
    is_ordered: bool = False  # desc_act: groups are of inputs that "g_idx" names

    @property
    def label(self) -> str:
        return f"{self.method} {self.bits}-bit"

    def parts(self, rows: int, cols: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Types and shape of the tensors that stand for a matrix, by the ends of their names."""
        per_word = 32 // self.bits
        num_groups = -(-cols // (self.group_size or cols))
        is_awq = self.method == "awq"
        return {
            "qweight": (("i32",), (cols, rows // per_word) if is_awq else (cols // per_word, rows)),
            "qzeros": (("i32",), (num_groups, rows // per_word)),
            "scales": (("f16", "bf16"), (num_groups, rows)),
        }


def grouping_from_config(config: Facts) -> Grouping | None:
    """What config.json says, None where weights are plain. ConfigError for what is not read."""
    stated = config.table("quantization_config")
    if stated is None:
        return None
    method = stated.text("quant_method", "")
    match method:
        case "awq":
            layout = stated.text("version", "gemm").lower()
        case "gptq":
            is_marlin = stated.flag("is_marlin_format", False)
            layout = "marlin" if is_marlin else stated.text("checkpoint_format", "gptq")
        case _:
            raise config.refuse(f"weights quantised by {method!r} are not read", hint=_HINT)
    if layout not in _LAYOUTS[method]:
        raise config.refuse(f"{method} weights packed for {layout!r} are not read", hint=_HINT)
    bits = stated.integer("bits")
    if bits != 4 and (bits, method) != (8, "gptq"):
        raise config.refuse(f"{method} weights of {bits} bits are not read", hint=_HINT)
    group_size = stated.integer("group_size", -1, low=-1)
    if group_size == 0 or (group_size % _BLOCK and group_size != -1):
        raise config.refuse(f"groups of {group_size} inputs are not multiples of {_BLOCK}")
    if stated.text("pack_dtype", "int32") != "int32":
        raise config.refuse(f"{method} weights in other words than of 32 bits are not read")
    if any(not rule.startswith("-:") for rule in stated.table("dynamic") or ()):
        raise config.refuse("layers quantised in different ways are not read", hint=_HINT)
    is_ordered = method == "gptq" and group_size > 0 and stated.flag("desc_act", False)
    return Grouping(method, bits, max(group_size, 0), int(layout == "gptq"), is_ordered)


def grouped_view(
    path: Path,
    grouping: Grouping,
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, memoryview],
    *,
    bf16_scales: bool = False,
) -> TensorView:
    """The matrix of `shape` = (rows, cols) in the data of its parts and, perhaps, of "g_idx", which
    says the group of each input. Blocks take inputs in the order of their groups.
    """
    rows, cols = shape
    group = min(grouping.group_size or cols, cols)

    def refuse(message: str) -> ConfigError:
        return ConfigError(f"{path}: {name}: {message}", hint=_HINT)

    if rows % (32 // grouping.bits) or cols % _BLOCK:
        raise refuse(f"{rows} x {cols} does not fill words and blocks of {_BLOCK}")
    if not bf16_scales and _HALVES_WITHOUT_VALUE.intersection(tensors["scales"][1::2]):
        raise refuse("scales hold an infinity, or what is no number")
    order: Sequence[int] = ()
    if "g_idx" in tensors:
        group_of = tensors["g_idx"].cast("i").tolist()
        order = sorted(range(cols), key=group_of.__getitem__)
        if [group_of[k] for k in order] != [k // group for k in range(cols)]:
            raise refuse(f"g_idx does not divide {cols} inputs into groups of {group}")
        if order == list(range(cols)):
            order = ()
    elif grouping.is_ordered:
        raise refuse("desc_act is set, and g_idx, which says the group of each input, is missing")
    if grouping.bits == 8:
        type_ = WeightType.Q8_0
        if set(bytes(tensors["qzeros"])) != {128 - grouping.zero_offset}:
            raise refuse("8-bit weights are not symmetric")
    else:
        fits = cols % 128 == 0 and (group % 128 == 0 or group >= cols)
        type_ = WeightType.Q4_G128 if fits else WeightType.Q4_G32
    try:
        blocks = _native.grouped_blocks(
            _native.Pool(default_threads()),
            type_.value,
            grouping.method == "awq",
            grouping.bits,
            rows,
            cols,
            group,
            grouping.zero_offset,
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            bf16_scales,
            order,
        )
    except _native.Fault as fault:
        raise refuse(str(fault)) from None
    return TensorView(name, type_, rows, cols, memoryview(blocks), order)
