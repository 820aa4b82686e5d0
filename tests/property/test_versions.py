"""Two versions meet: whatever else has changed between them, each side reads the other's version,
refuses it, and takes nothing of it for a message of its own.
"""

from contextlib import closing
from random import Random
from typing import Any

import msgspec
import pytest

from headrace.adapters.frames import FrameWriter, direction_key
from headrace.cluster import wire
from headrace.cluster.shared import SharedEngine
from headrace.cluster.wire import (
    PROTOCOL,
    TO_WORKER,
    Configure,
    Hello,
    OtherProtocol,
    Unfit,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from headrace.cluster.worker import Service
from headrace.core.base.errors import ConfigError, TransferError
from headrace.core.config.schema import Config
from headrace.live.boot import AsWorker
from support.seeds import FEW_AND_A_THOUSAND
from unit.cluster.test_crew import ready
from unit.cluster.test_service import SECRET, Front

pytestmark = pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)

FIRST_WORDS = (
    (decode_to_worker, Configure(config=Config())),
    (decode_from_worker, Hello(name="box")),
    (decode_from_worker, ready()),
)


def reshaped(rng: Random, message: object, protocol: int) -> bytes:
    """As another version might have it: fields are gone, renamed, new, or of another type."""
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    fields["protocol"] = protocol
    _change(rng, fields)
    names = list(fields)
    rng.shuffle(names)
    return encode({name: fields[name] for name in names})


def _change(rng: Random, fields: dict[str, Any]) -> None:
    for name in [name for name in fields if name not in ("type", "protocol")]:
        match rng.randrange(6):
            case 0:
                del fields[name]
            case 1:
                fields[f"{name}_ms"] = fields.pop(name)
            case 2:
                fields[name] = rng.choice((None, -1, "text", [1, "a"], {"a": None}, b"\0", 1.5))
            case 3 if isinstance(fields[name], dict):
                _change(rng, fields[name])
    for index in range(rng.randrange(3)):
        fields[f"new_{index}"] = rng.choice((None, 7, "text", {"protocol": PROTOCOL}))


def another(rng: Random) -> int:
    return rng.choice((PROTOCOL - 1, PROTOCOL + 1, 0, -1, rng.randrange(PROTOCOL + 1, 1 << 40)))


def test_another_versions_first_word_is_known_for_what_it_is(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        for decode, message in FIRST_WORDS:
            protocol = another(rng)
            with pytest.raises(OtherProtocol) as caught:
                decode(reshaped(rng, message, protocol))
            assert caught.value.message == f"it speaks protocol {protocol}, not {PROTOCOL}"


def test_no_message_of_this_version_is_taken_for_anothers(seeds: range) -> None:
    """Where it was spoilt it is none at all."""
    for seed in seeds:
        rng = Random(seed)
        for decode, message in FIRST_WORDS:
            assert decode(encode(message)) == message
            payload = reshaped(rng, message, PROTOCOL)
            read: object
            try:
                read = decode(payload)
            except OtherProtocol:
                pytest.fail(f"seed {seed}: this version is taken for another one")
            except TransferError:
                continue
            assert type(read) is type(message)


def test_who_comes_with_another_version_is_sent_away_on_both_sides(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of one version and a front end of another, in either order; and of the same one."""
    for seed in seeds:
        rng = Random(seed)
        ours, theirs = rng.randrange(1, 9), rng.randrange(1, 9)
        monkeypatch.setattr(wire, "PROTOCOL", ours)
        hello = Hello(protocol=theirs, name="box")
        if ours == theirs:
            assert decode_from_worker(encode(hello)) == hello
            continue
        with pytest.raises(OtherProtocol, match=f"protocol {theirs}, not {ours}"):
            decode_from_worker(reshaped(rng, hello, theirs))
        with closing(SharedEngine(AsWorker())) as engine, closing(Front()) as front:
            writer = FrameWriter(direction_key(SECRET, TO_WORKER))
            asked = Configure(config=Config())
            front.stream.sendall(writer.frame(reshaped(rng, asked, theirs)))
            with pytest.raises(ConfigError, match=f"the front end speaks protocol {theirs}"):
                Service(engine, front.line).run()
            word = front.hear()
            assert isinstance(word, Unfit)
            assert "run the same version" in word.hint
