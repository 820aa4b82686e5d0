"""Recorded traffic as data: lengths, times and names of prefix blocks, no text.

Decides what a line of a published trace means; refuses to know where lines come from.
"""

from collections.abc import Iterable, Iterator

import msgspec

from headrace.core.base.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


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


def parse_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Lines of JSON as Mooncake publishes them (FAST 2025). Raises ConfigError that names the line.

    Its times lie some 3 s apart, with all requests of that span at once.
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"line {number} of the trace is no request: {error}",
                hint="expected timestamp, input_length, output_length and hash_ids, as Mooncake's",
            ) from error
        if found.input_length < 1:
            raise ConfigError(f"line {number} of the trace has an empty prompt")
        yield TraceRequest(
            arrival_s=found.timestamp / 1000,
            prompt_tokens=found.input_length,
            output_tokens=found.output_length,
            blocks=found.hash_ids,
            block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
