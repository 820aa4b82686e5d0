"""A model opened without computing with it: what it is, and what memory it would take."""

from pathlib import Path
from typing import NoReturn

from headrace.core.config.ledger import KvPlan
from headrace.core.config.resolve import MachineFacts, Resolution
from headrace.core.config.schema import Config
from headrace.live.boot import plan_memory, template_path
from headrace.models.hub import DEFAULT_MODEL, cache_dir
from headrace.models.load import LoadedModel, load_model
from headrace.ops.interface import Forward, KvFile, KvLayout, TensorView


class DryBackend:
    """Counts weights and holds none."""

    name = "dry"
    batch_invariant = True
    arithmetic = "none"

    def __init__(self) -> None:
        self._num_bytes = 0

    def load_weight(self, view: TensorView) -> str:
        self._num_bytes += view.data.nbytes
        return view.name

    def weight_bytes(self) -> int:
        return self._num_bytes

    def compile(
        self,
        forward: Forward[str, str],
        kv: KvLayout,
        max_tokens: int,
        kv_file: KvFile | None = None,
    ) -> NoReturn:
        raise NotImplementedError("a dry backend computes nothing")


def local_model(path_or_id: str) -> Path | None:
    """Where a model lies on this machine; None where it would have to be fetched first."""
    if path_or_id:
        path = Path(path_or_id).expanduser()
        return path if path.exists() else None
    path = cache_dir() / DEFAULT_MODEL.file_name
    return path if path.is_file() and path.stat().st_size == DEFAULT_MODEL.num_bytes else None


def open_dry(path: Path, config: Config) -> tuple[LoadedModel, DryBackend]:
    """Read and check a model's files. ConfigError as for loading it.

    The model's chat template has been compiled, and renders nothing.
    """
    backend = DryBackend()
    loaded = load_model(
        path,
        backend,
        max_model_len=config.model.max_model_len,
        chat_template=template_path(config.model),
    )
    loaded.close()
    return loaded, backend


def plan_dry(
    path: Path, config: Config, machine: MachineFacts
) -> tuple[LoadedModel, Resolution, KvPlan]:
    """What `serve` would decide for this model. ConfigError where the files are wrong or nothing
    fits.
    """
    loaded, backend = open_dry(path, config)
    resolution, kv = plan_memory(config, machine, loaded, backend)
    return loaded, resolution, kv
