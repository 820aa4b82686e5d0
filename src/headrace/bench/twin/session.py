"""A case on a real server: parts of its load, pieces of the calibration between them, and the logs
that its workers wrote meanwhile.

Decides what is kept of it, so that a comparison that was cut short goes on with the next case;
refuses to know what is made of it.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.bench.client import Answer
from headrace.bench.loads import Target, warm_up
from headrace.bench.offered import Ask, offer, offer_rounds
from headrace.bench.prompts import Encode, PromptWriter
from headrace.bench.server import served_model, serving
from headrace.bench.twin.cases import Case, parts_of, pieces_of
from headrace.live.step_log import LoggedTimes, read_logs

WARM_UP_SEED: Final = 99
ANSWERS: Final = "answers.json"  # written last: a folder without it is not whole


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order in which they were asked for; pieces lie around parts."""

    span_s: float
    load_average: float  # of the machine, before
    pieces: list[list[Answer]]
    parts: list[list[Answer]]


def record(case: Case, encode: Encode, model: Path, span_s: float, folder: Path) -> None:
    """Raises HeadraceError where the server does not answer."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    load_average = os.getloadavg()[0]
    words = [*case.serve, "--model", str(model), "--event-log", str(folder / "events.log")]
    with serving(words, folder / "server.log") as served:
        target = Target(served.url, served_model(served.url))
        asyncio.run(warm_up(target, PromptWriter(encode, WARM_UP_SEED)))
        pieces, parts = asyncio.run(
            _alternate(
                target, pieces_of(case.num_workers, encode), parts_of(case.load, encode, span_s)
            )
        )
    session = Session(span_s=span_s, load_average=load_average, pieces=pieces, parts=parts)
    (folder / ANSWERS).write_bytes(msgspec.json.encode(session))


async def _alternate(
    target: Target, pieces: Sequence[Sequence[Sequence[Ask]]], parts: Sequence[Sequence[Ask]]
) -> tuple[list[list[Answer]], list[list[Answer]]]:
    calibrated, served = [], []
    for place, piece in enumerate(pieces):
        rounds = await offer_rounds(target, piece)
        calibrated.append([answer for one in rounds for answer in one])
        if place < len(parts):
            served.append(await offer(target, parts[place]))
    return calibrated, served


def recorded(folder: Path, span_s: float) -> tuple[Session, LoggedTimes] | None:
    """What lies there of a case with a load of that length; None = nothing that is whole."""
    try:
        session = msgspec.json.decode((folder / ANSWERS).read_bytes(), type=Session)
    except (OSError, msgspec.MsgspecError):
        return None
    if session.span_s != span_s:
        return None
    return session, read_logs(sorted(folder.glob("events.log*")))


def prompts_of(case: Case, encode: Encode, span_s: float) -> tuple[list[list[list[int]]], ...]:
    """The tokens of what pieces and parts ask, in the order of their answers."""
    pieces = [
        [list(encode(ask.prompt)) for asks in piece for ask in asks]
        for piece in pieces_of(case.num_workers, encode)
    ]
    parts = [
        [list(encode(ask.prompt)) for ask in part] for part in parts_of(case.load, encode, span_s)
    ]
    return pieces, parts
