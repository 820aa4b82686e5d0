"""The loads of the comparison, what serves them, and what each server is calibrated by.

A load comes in parts, and a piece of the calibration before each part and after the last: machines
drift within a minute, and what is measured on both sides of a part tells how fast it was meanwhile.
Decides what is asked when; refuses to know who answers.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from headrace.bench.calibrate import SEED, Shape
from headrace.bench.offered import Ask
from headrace.bench.prompts import Encode, PromptWriter

NUM_PARTS: Final = 3
USUAL_SPAN_S: Final = 54.0  # of all parts of a load together


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that come at random (Poisson), several at once where `burst` is more than 1."""

    name: str
    rate_per_s: float
    prompt: int = 110  # mean tokens; gamma distributed
    output: int = 32
    shared: int = 0  # tokens that all prompts of a group begin with
    num_groups: int = 4
    burst: int = 1
    seed: int = 7


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A load and what serves it."""

    load: Load
    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def num_workers(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def name(self) -> str:
        workers = f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.mixed}"
        return f"{self.load.name}, {workers}"

    @property
    def serve(self) -> list[str]:
        """Arguments of `headrace serve`."""
        if self.prefill:
            roles = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
            return [*roles, "--handoff", "always"]
        return ["--workers", str(self.mixed)]


CHAT: Final = Load(name="chat", rate_per_s=1.2)
SHARED: Final = Load(name="shared prefix", rate_per_s=1.2, prompt=60, shared=240, output=24)
LONG: Final = Load(name="long prompts", rate_per_s=0.6, prompt=500, output=16)
BURSTS: Final = Load(name="bursts", rate_per_s=0.25, burst=5, prompt=80)
BUSY: Final = Load(name="near saturation", rate_per_s=2.2)
SPLIT: Final = Load(name="split", rate_per_s=1.0)
CASES: Final = (
    Case(load=CHAT, mixed=1),
    Case(load=SHARED, mixed=1),
    Case(load=LONG, mixed=1),
    Case(load=BURSTS, mixed=1),
    Case(load=BUSY, mixed=1),
    Case(load=CHAT, mixed=3),
    Case(load=SHARED, mixed=3),
    Case(load=LONG, mixed=3),
    Case(load=BURSTS, mixed=3),
    Case(load=SPLIT, prefill=1, decode=1),
    Case(load=SPLIT, prefill=1, decode=2),
)


def parts_of(load: Load, encode: Encode, span_s: float) -> list[list[Ask]]:
    """What is asked in each part, from its own begin on."""
    rng = Random(f"{load.seed}/{load.name}")
    writer = PromptWriter(encode, load.seed)
    shared = [writer.write(load.shared) if load.shared else "" for _ in range(load.num_groups)]
    part_s = span_s / NUM_PARTS
    parts: list[list[Ask]] = []
    for _ in range(NUM_PARTS):
        asks: list[Ask] = []
        at_s = 0.0
        # The first comes at once, or a part might have none.
        while at_s < part_s:
            for _ in range(load.burst):
                num_new = _draw(rng, load.prompt, 8)
                prompt = writer.write(load.shared + num_new, after=rng.choice(shared))
                num_output = _draw(rng, load.output, 8)
                asks.append(Ask(at_s=at_s, prompt=prompt, num_output_tokens=num_output))
            at_s += rng.expovariate(load.rate_per_s)
        parts.append(asks)
    return parts


def _draw(rng: Random, mean: float, least: int) -> int:
    """Gamma distributed, standard deviation 0.6 of the mean, at most four times it."""
    return max(least, round(min(4 * mean, rng.gammavariate(2.8, mean / 2.8))))


def pieces_of(num_workers: int, encode: Encode) -> list[list[list[Ask]]]:
    """Rounds of the calibration, before each part and after the last. Neighbours are of two kinds,
    so that both are on either side of each part.
    """
    writer = PromptWriter(encode, SEED)
    return [
        [
            [
                Ask(at_s=at_s, prompt=writer.write(num_prompt), num_output_tokens=num_output)
                for at_s, num_prompt, num_output in shapes
            ]
            for shapes in _rounds(place % 2, num_workers)
        ]
        for place in range(NUM_PARTS + 1)
    ]


def _rounds(kind: int, num_workers: int) -> Sequence[Sequence[Shape]]:
    """Some six seconds of one worker; ten of three."""
    lengths = ((24, 150, 460, 1200), (48, 90, 230, 330, 640))[kind]
    widths = ((2, 8), (1, 4, 16))[kind]
    alone: list[list[Shape]] = [[(0.0, length, 24)] for length in lengths]
    wide: list[list[Shape]] = [[(0.0, 24, 48)] * (width * num_workers) for width in widths]
    if kind:
        return [*alone, *wide, [(0.0, 400, 24)] * (2 * num_workers)]
    beside: list[Shape] = [(0.0, 40, 60)] * (2 * num_workers)
    for gap_s, length in ((0.3, 64), (0.7, 220)):
        beside += [(gap_s, length, 8)] * num_workers
    return [*alone, *wide, beside]
