"""Accelerators and models by name: the tables that the package carries, and an operator's own.

Decides what a row of a table means as an Accelerator or a ModelShape. Every row says where it is
from; a figure that nobody verified says so.
"""

import csv
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.cost.hardware import Accelerator, ModelShape
from headrace.models.files import read_text

MAX_PRESET_BYTES = 1 << 20
# Beyond these a row has other units than its names say.
MOST: Final = {
    "bf16_tflop_per_s": 1e6,
    "fp8_tflop_per_s": 1e6,
    "fp4_tflop_per_s": 1e6,
    "memory_gb": 1e7,
    "memory_tb_per_s": 1e5,
    "scaleup_gb_per_s": 1e6,
    "scaleout_gb_per_s": 1e6,
    "params_b": 1e5,
    "scaleup_gpus": 1e6,
    "tdp_w": 1e7,
    "price_usd_per_hour": 1e7,
    "layers": 1e4,
    "hidden": 1e6,
    "heads": 1e5,
    "kv_heads": 1e5,
    "head_dim": 1e5,
    "vocab": 1e8,
    "experts": 1e5,
    "top_k": 1e5,
    "moe_ffn": 1e7,
    "dense_layers": 1e4,
    "kv_lora": 1e6,
    "rope_dim": 1e6,
    "nope_dim": 1e6,
    "v_dim": 1e6,
    "window": 1e9,
    "window_layers": 1e4,
    "active_params_b": 1e5,
}
LEAST_RIDGE, MOST_RIDGE = 1.0, 1e5  # FLOP per byte of memory
Found = TypeVar("Found")


class AcceleratorRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of accelerators.csv; TOML tables `[accelerators.NAME]` have the same fields.

    Rates are dense; links are in one direction. GB and TB are powers of ten.
    """

    name: str
    bf16_tflop_per_s: float
    fp8_tflop_per_s: float = 0.0
    fp4_tflop_per_s: float = 0.0
    memory_gb: float
    memory_tb_per_s: float
    scaleup_gb_per_s: float = 0.0
    scaleup_gpus: int = 8
    scaleout_gb_per_s: float = 0.0
    tdp_w: float | None = None
    price_usd_per_hour: float | None = None
    source: str = "given by the operator"
    price_source: str = ""

    def build(self) -> Accelerator:
        rates = {
            "bf16": self.bf16_tflop_per_s,
            "fp8": self.fp8_tflop_per_s,
            "fp4": self.fp4_tflop_per_s,
        }
        check_row(self, "bf16_tflop_per_s", "memory_gb", "memory_tb_per_s", "scaleup_gpus")
        if not LEAST_RIDGE <= self.bf16_tflop_per_s / self.memory_tb_per_s <= MOST_RIDGE:
            raise ConfigError(
                f"{self.name}: no device has so much arithmetic for its memory, or so little",
                bf16_tflop_per_s=self.bf16_tflop_per_s,
                memory_tb_per_s=self.memory_tb_per_s,
            )
        return Accelerator(
            name=self.name,
            flop_per_s_by_dtype={dtype: rate * 1e12 for dtype, rate in rates.items() if rate},
            memory_bytes=self.memory_gb * 1e9,
            memory_bytes_per_s=self.memory_tb_per_s * 1e12,
            scaleup_bytes_per_s=self.scaleup_gb_per_s * 1e9,
            scaleup_gpus=self.scaleup_gpus,
            scaleout_bytes_per_s=self.scaleout_gb_per_s * 1e9,
            tdp_w=self.tdp_w,
            price_usd_per_hour=self.price_usd_per_hour,
            source=self.source,
        )


class ModelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of models.csv; TOML tables `[models.NAME]` have the same fields.

    `kv_lora` > 0 means latent attention (MLA) with the dimensions `rope_dim`, `nope_dim`, `v_dim`.
    """

    name: str
    params_b: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    dense_layers: int = 0  # of a model with experts: the layers without any
    kv_lora: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    window: int = 0
    window_layers: int = 0
    active_params_b: float | None = None  # recomputed from the shape; here for the reader
    source: str = "given by the operator"

    def build(self) -> ModelShape:
        self._check()
        num_moe_layers = self.layers - self.dense_layers if self.experts else 0
        table = float(self.vocab * self.hidden)
        shape = ModelShape(
            name=self.name,
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=self.heads,
            num_params=self.params_b * 1e9,
            embed_params=0.0 if self.tied else table,
            logit_params=table,
            expert_params=3.0 * self.hidden * self.moe_ffn * num_moe_layers,
            num_experts=self.experts,
            experts_per_token=self.top_k,
            num_moe_layers=num_moe_layers,
            window_tokens=self.window,
            window_share=self.window_layers / self.layers,
            source=self.source,
            **self._attention(),
        )
        if shape.shared_params <= 0:
            raise ConfigError(
                f"{self.name}: tables and experts alone have more parameters than that",
                params_b=self.params_b,
            )
        return shape

    def _check(self) -> None:
        attention = () if self.kv_lora else ("kv_heads", "head_dim")
        experts = ("top_k", "moe_ffn") if self.experts else ()
        check_row(self, "params_b", "layers", "hidden", "heads", "vocab", *attention, *experts)
        for part, whole in (
            ("top_k", "experts"),
            ("dense_layers", "layers"),
            ("window_layers", "layers"),
        ):
            if getattr(self, part) > getattr(self, whole):
                values = {part: getattr(self, part), whole: getattr(self, whole)}
                raise ConfigError(f"{self.name}: {part} is more than {whole}", **values)

    def _attention(self) -> dict[str, Any]:
        """A query meets a key with 2 FLOP for each dimension of the key, and the same of a value.

        A latent is expanded for prompts; to decode, its heads attend to the latent itself, which is
        key and value at once (DeepSeek-V2, 2024, section 2.1).
        """
        if self.kv_lora:
            flop = 2.0 * self.layers * self.heads
            return {
                "kv_elems_per_token": float(self.layers * (self.kv_lora + self.rope_dim)),
                "attention_flop_per_pair": flop * (self.nope_dim + self.rope_dim + self.v_dim),
                "latent_flop_per_pair": flop * (2 * self.kv_lora + self.rope_dim),
            }
        return {
            "kv_elems_per_token": 2.0 * self.layers * self.kv_heads * self.head_dim,
            "kv_ways": self.kv_heads,
            "attention_flop_per_pair": 4.0 * self.layers * self.heads * self.head_dim,
        }


class Presets(msgspec.Struct, frozen=True):
    """What can be named."""

    accelerators: dict[str, Accelerator]
    models: dict[str, ModelShape]

    def accelerator(self, name: str) -> Accelerator:
        return find("accelerator", name, self.accelerators)

    def model(self, name: str) -> ModelShape:
        """By its full name, or without the organisation."""
        short = {known.partition("/")[2] or known: found for known, found in self.models.items()}
        return find("model", name, short | self.models)


def find(kind: str, name: str, known: Mapping[str, Found]) -> Found:
    """Letters and digits decide: "h100-sxm" is "H100 SXM". Raises ConfigError that names what comes
    near.
    """
    by_letters = {_letters(key): key for key in known}
    if (key := by_letters.get(_letters(name))) is not None:
        return known[key]
    near = get_close_matches(_letters(name), by_letters, n=3, cutoff=0.4)
    # Who has an organisation is known without it, too.
    once = (key for key in known if key.partition("/")[2] not in known)
    names = [by_letters[match] for match in near] or sorted(once)
    raise ConfigError(f"unknown {kind} {name!r}", hint="known: " + ", ".join(names))


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


@cache
def package_presets() -> Presets:
    return Presets(
        {row.name: row.build() for row in read_table("accelerators.csv", AcceleratorRow)},
        {row.name: row.build() for row in read_table("models.csv", ModelRow)},
    )


def presets_with(file: str | None) -> Presets:
    """The package's presets, and those of a TOML file on top. ConfigError lists every fault."""
    presets = package_presets()
    if not file:
        return presets
    tables = _read_toml(file)
    faults = [f"unknown table [{key}]" for key in tables if key not in ("accelerators", "models")]
    accelerators: dict[str, Accelerator] = {}
    models: dict[str, ModelShape] = {}
    for name, fields in _rows(tables, "accelerators", faults):
        try:
            accelerators[name] = msgspec.convert({"name": name, **fields}, AcceleratorRow).build()
        except (msgspec.ValidationError, ConfigError) as error:
            faults.append(f"[accelerators.{name}]: {error}")
    for name, fields in _rows(tables, "models", faults):
        try:
            models[name] = msgspec.convert({"name": name, **fields}, ModelRow).build()
        except (msgspec.ValidationError, ConfigError) as error:
            faults.append(f"[models.{name}]: {error}")
    if faults:
        raise ConfigError("\n".join([f"cannot use the presets in {file}", *faults]))
    return Presets(presets.accelerators | accelerators, presets.models | models)


def _rows(
    tables: Mapping[str, Any], kind: str, faults: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a kind, by their names; what is no table is a fault."""
    rows = tables.get(kind, {})
    if not isinstance(rows, dict):
        faults.append(f"{kind} must be tables, as [{kind}.NAME]")
        return
    for name, fields in rows.items():
        if isinstance(fields, dict):
            yield name, fields
        else:
            faults.append(f"{name} must be a table, [{kind}.{name}]")


def _read_toml(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(Path(file).expanduser(), MAX_PRESET_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def read_table(file: str, row_type: type[Found]) -> Iterable[Found]:
    text = (files("headrace.plan") / "data" / file).read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        given = {key: value for key, value in row.items() if value}
        yield msgspec.convert(given, row_type, strict=False)


def check_row(row: AcceleratorRow | ModelRow, *needed: str) -> None:
    """Raises ConfigError unless the needed fields are more than 0, no other is less, and all have
    the units of their names.
    """
    numbers: dict[str, Any] = {
        field: value
        for field, value in msgspec.structs.asdict(row).items()
        if isinstance(value, int | float)
    }
    wrong = {field: value for field, value in numbers.items() if not 0 <= value < inf}
    wrong |= {field: numbers[field] for field in needed if not numbers[field] > 0}
    if wrong:
        raise ConfigError(f"{row.name}: must be numbers more than 0", **wrong)
    large = {
        f"{field}={min(numbers[field], 1e300):g}": most
        for field, most in MOST.items()
        if numbers.get(field, 0) > most
    }
    if large:
        told = ", ".join(f"{words} (at most {most:g})" for words, most in large.items())
        raise ConfigError(f"{row.name}: other units than its names say: {told}")
