"""Recorded traffic as data: lengths, times and names of prefix blocks, no text.

Decides what a line of a published trace means; refuses to know where lines come from.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from random import Random
from statistics import median
from typing import Final, TypeVar

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.workload.otel import is_otlp, parse_spans

MOONCAKE_BLOCK_TOKENS: Final = 512
BAILIAN_BLOCK_TOKENS: Final = 16
# Times that lie this far apart are taken for rounded ones.
ROUNDED_S: Final = 0.5
MAX_ARRIVAL_S: Final = 4e9  # from a trace's zero, which may be 1970
MAX_TOKENS: Final = 1 << 24  # of a prompt, and of an answer
# Names of blocks beyond are numbered anew, since the tokens that stand for a block are made of it.
MAX_BLOCK: Final = 1 << 24


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Requests whose first blocks have the same names begin with the same tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class _BailianLine(msgspec.Struct, frozen=True):
    timestamp: float  # s
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    chat_id: int | str
    parent_chat_id: int | str = -1
    turn: int = 1


_Line = TypeVar("_Line")


def parse_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Lines of JSON as Mooncake publishes them (FAST 2025). Raises ConfigError that names the line.

    Its times lie some 3 s apart, with all requests of that span at once.
    """
    for number, found in _decoded(lines, _MooncakeLine, "Mooncake"):
        yield _request(
            number,
            found.timestamp / 1000,
            found.input_length,
            found.output_length,
            found.hash_ids,
            MOONCAKE_BLOCK_TOKENS,
        )


def parse_bailian(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Lines of JSON as Alibaba publishes its Bailian (Qwen) traces. As parse_mooncake."""
    for number, found in _decoded(lines, _BailianLine, "Bailian"):
        yield _request(
            number,
            found.timestamp,
            found.input_length,
            found.output_length,
            found.hash_ids,
            BAILIAN_BLOCK_TOKENS,
        )


def parse_azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """CSV as Azure publishes it (Splitwise, ISCA 2024; DynamoLLM, HPCA 2025): TIMESTAMP,
    ContextTokens, GeneratedTokens. Times count from the earliest. As parse_mooncake.
    """
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    found = [
        (number, _figure(number, _seconds_of, row[0]), row)
        for number, row in _rows(lines, columns, "Azure")
    ]
    first_s = min((at_s for _, at_s, _ in found), default=0.0)
    for number, at_s, row in found:
        num_prompt, num_output = (_figure(number, int, cell) for cell in row[1:])
        yield _request(number, at_s - first_s, num_prompt, num_output)


def parse_burstgpt(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """CSV as BurstGPT publishes it (KDD 2025): Timestamp (s), Request tokens, Response tokens.
    Requests without a response had failed, and are left out. As parse_mooncake.
    """
    for number, row in _rows(lines, ("Timestamp", "Request tokens", "Response tokens"), "BurstGPT"):
        at_s = _figure(number, float, row[0])
        num_prompt, num_output = (_figure(number, int, cell) for cell in row[1:])
        if num_output:
            yield _request(number, at_s, num_prompt, num_output)


def parse_otel(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Spans in OTLP's JSON (see `parse_spans`). Times count from the first one."""
    found = list(parse_spans(lines))
    first_ns = min((span.start_ns for _, span in found), default=0)
    for number, span in found:
        at_s = (span.start_ns - first_ns) / 1e9
        yield _request(number, at_s, span.prompt_tokens, span.output_tokens)


Parser = Callable[[Iterable[str]], Iterator[TraceRequest]]
PARSERS: Final[dict[str, Parser]] = {
    "mooncake": parse_mooncake,
    "bailian": parse_bailian,
    "azure": parse_azure,
    "burstgpt": parse_burstgpt,
    "otel": parse_otel,
}


def parse_trace(lines: Iterable[str], kind: str = "") -> list[TraceRequest]:
    """Requests in the order of their arrival. Without a kind, the first line tells it.

    Raises ConfigError for lines that are of no kind, or not of this one, and where there are none.
    """
    lines = iter(lines)
    head = next((line for line in lines if line.strip()), "")
    kind = kind or kind_of(head)
    if kind not in PARSERS:
        raise ConfigError(f"unknown kind of trace {kind!r}", hint="known: " + ", ".join(PARSERS))
    found = sorted(PARSERS[kind](chain([head], lines)), key=lambda one: one.arrival_s)
    if not found:
        raise ConfigError("the trace holds no requests")
    return _renumbered(found)


def kind_of(head: str) -> str:
    """By a trace's first line."""
    if is_otlp(head):
        return "otel"
    if head.lstrip().startswith("{"):
        return "bailian" if '"chat_id"' in head else "mooncake"
    columns = {cell.strip() for cell in head.lstrip("\ufeff").split(",")}
    if {"TIMESTAMP", "ContextTokens"} <= columns:
        return "azure"
    if {"Timestamp", "Request tokens"} <= columns:
        return "burstgpt"
    raise ConfigError("the trace is of no known kind", hint="known: " + ", ".join(PARSERS))


def spread(
    requests: Sequence[TraceRequest], seed: int, *, speed: float = 1.0
) -> list[TraceRequest]:
    """Times that were rounded, drawn anew within the span that was rounded away.

    Without that, every such span of a replay begins with a burst that never was. Traces whose times
    are finer come back as they are. `requests` are in the order of their arrival; their times are
    those of the trace divided by `speed`.
    """
    times = sorted({request.arrival_s for request in requests})
    gaps = [after - before for before, after in pairwise(times)]
    if not gaps or min(gaps) * speed < ROUNDED_S:
        return list(requests)
    span_s, rng = median(gaps), Random(seed)
    moved = [
        msgspec.structs.replace(request, arrival_s=request.arrival_s + rng.random() * span_s)
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.arrival_s)


# ---- lines


def _decoded(lines: Iterable[str], kind: type[_Line], name: str) -> Iterator[tuple[int, _Line]]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ConfigError(
                f"line {number} of the trace is no request: {error}",
                hint=f"expected timestamp, input_length, output_length and hash_ids, as {name}'s",
            ) from error


def _rows(
    lines: Iterable[str], columns: Sequence[str], name: str
) -> Iterator[tuple[int, list[str]]]:
    """The cells of these columns, line by line. The first line names the columns."""
    places: list[int] = []
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.lstrip("\ufeff").split(",")]
        if not places:
            if missing := [column for column in columns if column not in cells]:
                raise ConfigError(f"the trace has no column {missing[0]!r}, which {name}'s have")
            places = [cells.index(column) for column in columns]
        elif line.strip():
            if len(cells) <= max(places):
                raise ConfigError(f"line {number} of the trace has {len(cells)} cells only")
            yield number, [cells[place] for place in places]


def _request(
    number: int,
    arrival_s: float,
    num_prompt: int,
    num_output: int,
    blocks: tuple[int, ...] = (),
    block_tokens: int = 0,
) -> TraceRequest:
    if num_prompt < 1:
        raise ConfigError(f"line {number} of the trace has an empty prompt")
    for name, value, most in (
        ("time", arrival_s, MAX_ARRIVAL_S),
        ("prompt tokens", num_prompt, MAX_TOKENS),
        ("output tokens", num_output, MAX_TOKENS),
    ):
        if not 0 <= value <= most:
            raise ConfigError(
                f"line {number} of the trace: {name} {_shown(value)}", hint=f"from 0 to {most:,.0f}"
            )
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        blocks=blocks,
        block_tokens=block_tokens,
    )


def _shown(value: float) -> str:
    """A number that may have thousands of digits."""
    return "beyond all numbers" if abs(value) >= 1e300 else f"{value:.12g}"


def _renumbered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Blocks by numbers in the order in which they are first seen, where their names are hashes."""
    names = dict.fromkeys(chain.from_iterable(one.blocks for one in requests))
    if not names or (min(names) >= 0 and max(names) < MAX_BLOCK):
        return requests
    number_by_name = {name: number for number, name in enumerate(names)}
    return [
        msgspec.structs.replace(one, blocks=tuple(number_by_name[name] for name in one.blocks))
        for one in requests
    ]


_Figure = TypeVar("_Figure")


def _figure(number: int, convert: Callable[[str], _Figure], text: str) -> _Figure:
    try:
        return convert(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"line {number} of the trace: {text[:80]!r} is not what belongs there"
        ) from error


def _seconds_of(text: str) -> float:
    """Since 1970 by a text like 2023-11-16 18:15:46.6805900, zone (UTC) or not."""
    date, _, time = text.replace("T", " ").partition(" ")
    year, month, day = map(int, date.split("-"))
    hour, minute, second = time.removesuffix("Z").partition("+")[0].split(":")
    return (
        _days_of(year, month, day) * 86400.0 + int(hour) * 3600 + int(minute) * 60 + float(second)
    )


def _days_of(year: int, month: int, day: int) -> int:
    """Since 1970, of the Gregorian calendar: years that begin in March end with the leap day."""
    year -= month <= 2
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return year * 365 + year // 4 - year // 100 + year // 400 + of_year - 719468
