"""One turn of an EngineCore as data: what event logs hold, replays compare and simulations hash."""

from collections.abc import Sequence

import msgspec

from headrace.core.base.events import EngineEffect, EngineEvent
from headrace.core.base.types import Ns


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """An event, when it was handled, and the effects that it had."""

    now: Ns
    event: EngineEvent
    effects: tuple[EngineEffect, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> bytes:
    """The frame in MessagePack. Equal frames have equal bytes."""
    return _encoder.encode((now, event, effects))


def decode_frame(data: bytes | memoryview) -> Frame:
    """Raises msgspec.DecodeError for anything that is not a frame."""
    return _decoder.decode(data)
