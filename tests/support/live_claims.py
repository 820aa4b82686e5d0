"""Continuous against static batching on this machine, through headrace's own server.

    PYTHONPATH=src:tests python -m support.live_claims [--seqs 8] [--requests 48] [--longest 192]

Static batches are requests sent together, the next ones when the last answer of a batch has ended;
continuous batching has as many clients, each of whom asks again at once. The same prompts and
lengths in the same order, the two ways in turn.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from headrace.bench.client import complete, connect
from headrace.bench.server import served_model, serving

if TYPE_CHECKING:
    import aiohttp

MEAN_OUTPUT = 64


async def ask(session: "aiohttp.ClientSession", url: str, model: str, job: tuple[str, int]) -> None:
    prompt, num = job
    body = {"model": model, "prompt": prompt, "max_tokens": num, "temperature": 0}
    await complete(session, url, {**body, "ignore_eos": True})


async def span_s(url: str, model: str, jobs: Sequence[tuple[str, int]], *, static: int) -> float:
    """`static` = requests of a batch; or as many clients (negative)."""
    begin_s = time.perf_counter()
    async with connect() as session:
        if static > 0:
            for first in range(0, len(jobs), static):
                batch = jobs[first : first + static]
                await asyncio.gather(*(ask(session, url, model, job) for job in batch))
        else:
            left = iter(jobs)

            async def client() -> None:
                for job in left:
                    await ask(session, url, model, job)

            await asyncio.gather(*(client() for _ in range(-static)))
    return time.perf_counter() - begin_s


def jobs_of(rng: Random, number: int, longest: int, prompt_words: int) -> list[tuple[str, int]]:
    """Prompts that begin differently, so that none is found in a cache."""
    jobs: list[tuple[str, int]] = []
    while len(jobs) < number:
        num = max(1, round(rng.expovariate(1 / MEAN_OUTPUT)))
        if num <= longest:
            words = " ".join(str(rng.randrange(10)) for _ in range(prompt_words // 2))
            jobs.append((words, num))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--longest", type=int, default=768)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    ratios = []
    with serving(["--max-running-seqs", str(asked.seqs)], Path("build/live-claims.log")) as served:
        model = served_model(served.url)
        for seed in range(asked.rounds):
            jobs = jobs_of(Random(seed), asked.requests, asked.longest, asked.prompt)
            spans = {}
            for way, size in (("static", asked.seqs), ("continuous", -asked.seqs)):
                # The second way would find the prompts of the first.
                mine = [(f"{way} {prompt}", num) for prompt, num in jobs]
                spans[way] = asyncio.run(span_s(served.url, model, mine, static=size))
            tokens = sum(num for _, num in jobs)
            ratios.append(spans["static"] / spans["continuous"])
            print(
                f"seed {seed}: static {tokens / spans['static']:.1f}, continuous "
                f"{tokens / spans['continuous']:.1f} tokens/s, {ratios[-1]:.2f}×",
                flush=True,
            )
    print(f"median {median(ratios):.2f}×")


if __name__ == "__main__":
    main()
