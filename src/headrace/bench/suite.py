"""The parts of the benchmark, each from what was asked to its results.

Decides what belongs to a part; refuses to know how it was asked or how it is shown.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.gateway import measure_gateway
from headrace.bench.install import install
from headrace.bench.kernels import measure_kernels
from headrace.bench.loads import LOADS, LoadReport, Target, prompts_of, run_load, warm_up
from headrace.bench.machine import machine, peak_memory_bytes
from headrace.bench.precision import TEXTS, measure_precision, read_texts
from headrace.bench.prompts import PromptWriter
from headrace.bench.results import Results
from headrace.bench.router import measure as measure_router
from headrace.bench.routing import TRAFFICS
from headrace.bench.routing import compare as compare_policies
from headrace.bench.scheduler import measure_all
from headrace.bench.server import served_model, serving
from headrace.bench.sides import compare, run_sides
from headrace.bench.transfer import measure_transfer
from headrace.core.base.errors import ConfigError
from headrace.models.gguf import GgufFile
from headrace.models.hub import ensure_default_model, resolve_model
from headrace.models.safetensors import SafetensorsFolder
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_folder, tokenizer_from_gguf

NUM_ROUNDS = 3


class LoadsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which loads are offered, and how."""

    names: Sequence[str] = ()  # none = all
    model: str | None = None  # name to ask for; none = the first one that a server lists
    tokenizer: Path | None = None  # model file whose tokens are counted; none = the default model
    seed: int = 1  # another seed, other prompts
    # Goes into every request: for each server in turn, the last one for all that follow.
    extras: Sequence[Mapping[str, Any]] = ({"ignore_eos": True},)
    num_rounds: int = NUM_ROUNDS  # of each load, where servers are compared

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in LOADS]
        if unknown:
            raise ConfigError(
                "there is no such load", load=", ".join(unknown), loads=", ".join(LOADS)
            )
        if self.num_rounds < 1:
            raise ConfigError("there must be at least one round", rounds=self.num_rounds)

    def extra(self, index: int) -> Mapping[str, Any]:
        return self.extras[min(index, len(self.extras) - 1)]


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or a safetensors folder; the weights stay where they are."""
    if path.is_dir():
        return tokenizer_from_folder(SafetensorsFolder(path))
    return tokenizer_from_gguf(path, GgufFile(path).metadata)


def offer_loads(asked: LoadsAsked, urls: Sequence[str], results: Results) -> None:
    """To one server, or to several in turn; `results` gets the reports."""
    urls = [url.rstrip("/") for url in urls]
    targets = [
        Target(url, asked.model or served_model(url), asked.extra(index))
        for index, url in enumerate(urls)
    ]
    encode = tokenizer_of(asked.tokenizer or ensure_default_model()).encode
    writer = PromptWriter(encode, asked.seed)
    names = asked.names or [*LOADS]
    if len(targets) == 1:
        results.loads = asyncio.run(_run_loads(targets[0], writer, names))
    else:
        results.sides = asyncio.run(run_sides(targets, writer, names, asked.num_rounds))
        results.comparisons = compare(results.sides)


async def _run_loads(
    target: Target, writer: PromptWriter, names: Sequence[str]
) -> list[LoadReport]:
    await warm_up(target, writer)
    return [await run_load(target, LOADS[name], prompts_of(LOADS[name], writer)) for name in names]


def run_load_part(asked: LoadsAsked, urls: Sequence[str]) -> Results:
    results = Results(machine=machine(), server=", ".join(urls))
    offer_loads(asked, urls, results)
    return results


def run_all_parts(asked: LoadsAsked, serve: Sequence[str], against: Sequence[str]) -> Results:
    """The loads against a server of its own, beside those at `against`, and a scheduler step."""
    results = Results(machine=machine(), server=" ".join(["headrace serve", *serve]))
    log = Path(tempfile.mkdtemp(prefix="headrace-bench-")) / "server.log"
    with serving(serve, log) as served:
        results.ready_after_s = served.ready_after_s
        offer_loads(asked, [served.url, *against], results)
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


def run_gateway_part(num_streams: int) -> Results:
    return Results(machine=machine(), gateway=measure_gateway(num_streams))


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
