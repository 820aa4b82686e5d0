"""The parts of the benchmark, each from what was asked to its results.

Decides what belongs to a part; refuses to know how it was asked or how it is shown.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.client import REQUEST_TIMEOUT_S
from headrace.bench.front import measure_front
from headrace.bench.gateway import measure_gateway
from headrace.bench.install import install
from headrace.bench.kernels import measure_kernels
from headrace.bench.loads import LOADS, LoadFailure, Target
from headrace.bench.machine import machine, peak_memory_bytes
from headrace.bench.precision import TEXTS, measure_precision, read_texts
from headrace.bench.prompts import PromptWriter
from headrace.bench.results import Results
from headrace.bench.router import measure as measure_router
from headrace.bench.routing import TRAFFICS
from headrace.bench.routing import compare as compare_policies
from headrace.bench.scheduler import measure_all
from headrace.bench.server import served_model, serving
from headrace.bench.sides import Side, Sides, compare
from headrace.bench.transfer import measure_transfer
from headrace.core.base.errors import ConfigError
from headrace.models.gguf import GgufFile
from headrace.models.hub import ensure_default_model, resolve_model
from headrace.models.safetensors import SafetensorsFolder
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_folder, tokenizer_from_gguf

NUM_ROUNDS = 3
LOAD_TIMEOUT_S = 600.0

Save = Callable[[Results], None]


class LoadsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which loads are offered, and how."""

    names: Sequence[str] = ()  # none = all
    model: str | None = None  # name to ask for; none = the first one that a server lists
    tokenizer: Path | None = None  # model file whose tokens are counted; none = the default model
    seed: int = 1  # another seed, other prompts
    # Goes into every request: for each server in turn, the last one for all that follow.
    extras: Sequence[Mapping[str, Any]] = ({"ignore_eos": True},)
    num_rounds: int = NUM_ROUNDS  # of each load, where servers are compared
    timeout_s: float = LOAD_TIMEOUT_S  # of each load at each server

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in LOADS]
        if unknown:
            raise ConfigError(
                "there is no such load", load=", ".join(unknown), loads=", ".join(LOADS)
            )
        if self.num_rounds < 1:
            raise ConfigError("there must be at least one round", rounds=self.num_rounds)
        if not 0 < self.timeout_s <= REQUEST_TIMEOUT_S:
            raise ConfigError(
                f"--timeout-s must be positive, and at most {REQUEST_TIMEOUT_S:g}",
                timeout_s=self.timeout_s,
            )

    def extra(self, index: int) -> Mapping[str, Any]:
        return self.extras[min(index, len(self.extras) - 1)]


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or a safetensors folder; the weights stay where they are."""
    if path.is_dir():
        return tokenizer_from_folder(SafetensorsFolder(path))
    return tokenizer_from_gguf(path, GgufFile(path).metadata)


def offer_loads(asked: LoadsAsked, urls: Sequence[str], results: Results, save: Save) -> None:
    """To one server, or to several in turn; `results` gets the reports, and is saved after each."""
    urls = [url.rstrip("/") for url in urls]
    targets = [
        Target(url, asked.model or served_model(url), asked.extra(index))
        for index, url in enumerate(urls)
    ]

    def tell(sides: Sequence[Side], failures: Sequence[LoadFailure]) -> None:
        results.failures = [*failures]
        if len(sides) == 1:
            results.loads = [*sides[0].reports]
        else:
            results.sides, results.comparisons = [*sides], compare(sides)
        save(results)

    encode = tokenizer_of(asked.tokenizer or ensure_default_model()).encode
    offered = Sides(targets, PromptWriter(encode, asked.seed), asked.timeout_s, tell)
    num_rounds = asked.num_rounds if len(targets) > 1 else 1
    asyncio.run(offered.run(asked.names or [*LOADS], num_rounds))


def run_load_part(asked: LoadsAsked, urls: Sequence[str], save: Save) -> Results:
    results = Results(machine=machine(), server=", ".join(urls))
    offer_loads(asked, urls, results, save)
    return results


def run_all_parts(
    asked: LoadsAsked, serve: Sequence[str], against: Sequence[str], save: Save
) -> Results:
    """The loads against a server of its own, beside those at `against`, and a scheduler step."""
    results = Results(machine=machine(), server=" ".join(["headrace serve", *serve]))
    log = Path(tempfile.mkdtemp(prefix="headrace-bench-")) / "server.log"
    with serving(serve, log) as served:
        results.ready_after_s = served.ready_after_s
        offer_loads(asked, [served.url, *against], results, save)
        results.peak_memory_bytes = peak_memory_bytes(served.pid)
    log.unlink()
    log.parent.rmdir()
    results.scheduler = measure_all()
    return results


def run_scheduler_part() -> Results:
    results = Results(machine=machine())
    results.scheduler = measure_all()
    return results


def run_router_part(num_workers: int, num_replicas: int, num_decisions: int) -> Results:
    """Decisions are measured here and now; what policies are worth comes from the simulator."""
    return Results(
        machine=machine(),
        router=measure_router(num_workers, num_replicas, num_decisions),
        policies=[one for traffic in TRAFFICS for one in compare_policies(traffic)],
    )


def run_gateway_part(num_streams: int, num_rounds: int) -> Results:
    return Results(machine=machine(), gateway=measure_gateway(num_streams, num_rounds))


def run_front_part(num_workers: int, num_streams: int, num_rounds: int) -> Results:
    return Results(machine=machine(), front=measure_front(num_workers, num_streams, num_rounds))


def run_transfer_part() -> Results:
    return Results(machine=machine(), transfer=measure_transfer())


def run_precision_part(model: str, texts: Sequence[str]) -> Results:
    """`model` is a file, a folder or a hub id, empty = the default model."""
    found = read_texts(texts or TEXTS)
    measured = list(measure_precision(resolve_model(model), found))
    return Results(machine=machine(), precision=measured)


def run_install_part(project: Path) -> Results:
    results = Results(machine=machine())
    results.install = install(project)
    return results


def run_kernels_part(model: str, *, threads: int, isa: str, seconds: float) -> Results:
    results = Results(machine=machine())
    results.kernels = measure_kernels(model, threads=threads, isa=isa, seconds=seconds)
    return results
