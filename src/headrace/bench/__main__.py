"""`python -m headrace.bench`: the suite against a server of its own, or one of its parts.

all        start headrace, run every load, measure the scheduler (what `make bench` runs)
load       one or more loads against any server of the OpenAI completions endpoint
scheduler  the cost of a step
install    size and time of a fresh installation without extras
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from headrace.bench.install import install
from headrace.bench.loads import LOADS, LoadReport, Target, prompts_of, run_load, warm_up
from headrace.bench.machine import machine, peak_memory_bytes
from headrace.bench.prompts import Encode, PromptWriter
from headrace.bench.results import Results, show
from headrace.bench.scheduler import measure_all
from headrace.bench.server import served_model, serving
from headrace.core.base.errors import HeadraceError
from headrace.models.gguf import GgufFile
from headrace.models.hub import ensure_default_model
from headrace.models.safetensors import SafetensorsFolder
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_folder, tokenizer_from_gguf


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ["all", "load", "scheduler", "install"]
    parser.add_argument("part", nargs="?", default="all", choices=parts)
    parser.add_argument("--url", help="server to load, for example http://127.0.0.1:8000")
    parser.add_argument("--model", help="model name to ask for; default: the first one listed")
    parser.add_argument("--tokenizer", type=Path, help="model file; default: the default model")
    parser.add_argument("--load", action="append", choices=[*LOADS], help="default: all of them")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other prompts")
    parser.add_argument("--extra", default='{"ignore_eos": true}', help="JSON for every request")
    parser.add_argument("--serve", default="", help="arguments for `headrace serve`")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    asked = parser.parse_args(arguments)
    if asked.part == "load" and not asked.url:
        parser.error("load needs --url")
    return asked


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or a safetensors folder; the weights stay where they are."""
    if path.is_dir():
        return tokenizer_from_folder(SafetensorsFolder(path))
    return tokenizer_from_gguf(path, GgufFile(path).metadata)


async def run_loads(
    target: Target, encode: Encode, names: list[str], seed: int
) -> list[LoadReport]:
    writer = PromptWriter(encode, seed)
    await warm_up(target, writer)
    return [await run_load(target, LOADS[n], prompts_of(LOADS[n], writer)) for n in names]


def measure_loads(asked: argparse.Namespace, url: str) -> list[LoadReport]:
    extra: dict[str, Any] = msgspec.json.decode(asked.extra)
    target = Target(url, asked.model or served_model(url), extra)
    encode = tokenizer_of(asked.tokenizer or ensure_default_model()).encode
    return asyncio.run(run_loads(target, encode, asked.load or [*LOADS], asked.seed))


def run(asked: argparse.Namespace) -> Results:
    results = Results(machine=machine())
    if asked.part == "load":
        results.server = asked.url
        results.loads = measure_loads(asked, asked.url.rstrip("/"))
    if asked.part == "all":
        with serving(asked.serve.split(), asked.out.parent / "bench-server.log") as served:
            results.server = "headrace serve " + asked.serve
            results.ready_after_s = served.ready_after_s
            results.loads = measure_loads(asked, served.url)
            results.peak_memory_bytes = peak_memory_bytes(served.pid)
    if asked.part in {"all", "scheduler"}:
        results.scheduler = measure_all()
    if asked.part == "install":
        results.install = install(Path.cwd())
    return results


def main() -> int:
    asked = parse(sys.argv[1:])
    try:
        results = run(asked)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(results, Console())
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_bytes(results.to_json())
    print(f"written to {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
