"""Recorded traffic as data: when requests came, how long they were, what they share, and what
became of them; no text and no tokens.

A recording is lines of JSON. The first is a Begin; then Pools, where workers or what is known of
them have changed, a Recorded for each sequence that has ended, and a Lost where some are missing.

Blocks have names that are hashes under a key which is written nowhere: equal prefixes have equal
names within a recording, and nobody can try out what a name might stand for. A chain without a key
would not do: whoever reads one name of it could test guesses of the block after.

Decides what a line means; refuses to know where lines come from or go to.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.metrics import Metric
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.types import Ns
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.limits import (
    MAX_TOKENS,
    MAX_WORKERS,
    fault_of_settings,
    fault_of_worker,
    outside,
)
from headrace.core.telemetry import Cause, RequestRecord

FORMAT: Final = "hrtraffic1"
NAME_BYTES: Final = 8
KEY_BYTES: Final = 32
_TOKEN_BYTES: Final = array("I").itemsize
REJECTED: Final = "rejected"  # how a sequence ended that was never accepted
_ENDS: Final = {REJECTED, *FinishReason}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str
    num_parameters: int
    weight_types: str


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role, which are alike. `cost` is how long their steps take, as far as their
    driver has seen; `kv_block_bytes` is what a block weighs on its way to another one.
    """

    role: Role
    num_workers: int
    spec: WorkerSpec
    config: WorkerConfig
    cost: FittedCostModel
    kv_block_bytes: int


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="begin"):
    """What does not change. Files of one recording have the same id; times count from its begin."""

    format: str = FORMAT
    headrace_version: str = ""
    recording_id: str = ""
    began_unix_s: float = 0.0
    block_tokens: int
    model: ModelFacts | None = None  # None = engines of others
    is_alone: bool = False  # one engine, without a router
    router: RouterConfig = RouterConfig()
    handoff: str = "auto"
    handoff_ms: float = 5.0
    handoff_neighbour_weight: float = 0.0  # until it was written down, there was none
    max_migrations: int = 3
    slo: Slo = Slo()  # of requests that state no limits


class Pools(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pools"):
    """The workers that serve from here on, and what is known of them by now."""

    at_ns: Ns
    pools: tuple[PoolFacts, ...]


class Recorded(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="request"
):
    """One sequence that has ended. `blocks` holds the names of the full blocks of its prompt and
    output, one behind the other; `tail` is the name of what its prompt has behind its last one.
    """

    request: int  # choices of one request have the same number
    arrived_ns: Ns
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    blocks: bytes = b""
    tail: bytes = b""
    priority: int = 0
    slo: Slo | None = None  # that it stated
    end: str  # a FinishReason, or REJECTED
    code: str = ""  # of the refusal
    cached_tokens: int = 0
    num_preemptions: int = 0
    ttft_ns: Ns | None = None
    max_itl_ns: Ns | None = None
    e2e_ns: Ns | None = None
    causes: tuple[Cause, ...] = ()  # of TTFT, ITL, TPOT and E2E: what took most of each


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lost"):
    """So many sequences ended of which nothing could be written."""

    num_requests: int


Line: TypeAlias = Begin | Pools | Recorded | Lost

encode_line = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(Line)


# ---- names


class Namer:
    """Names blocks under a key, which whoever makes it forgets with the namer."""

    def __init__(self, key: bytes, block_tokens: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._size = block_tokens

    def name(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=NAME_BYTES, key=self._key).digest()

    def chain(self, root: str, tokens: Sequence[int]) -> bytes:
        """The names of all full blocks of `tokens`; another root shares none of them."""
        data, step = _bytes_of(tokens), self._size * _TOKEN_BYTES
        name = self.name(root.encode())
        names = bytearray()
        for start in range(0, len(data) - step + 1, step):
            name = self.name(name + data[start : start + step])
            names += name
        return bytes(names)

    def tail(self, root: str, tokens: Sequence[int], chain: bytes) -> bytes:
        """Of what is behind the last full block of a prompt, whose chain this begins with; empty
        where nothing is.
        """
        num_full = len(tokens) // self._size
        rest = tokens[num_full * self._size :]
        if not rest:
            return b""
        before = chain[: num_full * NAME_BYTES][-NAME_BYTES:] or self.name(root.encode())
        return self.name(b"tail" + before + _bytes_of(rest))


def _bytes_of(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def root_of(spec: SeqSpec) -> str:
    """What keeps sequences of the same tokens apart."""
    return f"{spec.adapter!r} {spec.salt!r}"


def recorded(
    spec: SeqSpec,
    output: Sequence[int],
    record: RequestRecord | None,
    *,
    namer: Namer,
    number: int,
    began_ns: Ns,
    code: str = "",
) -> Recorded:
    """The line of a sequence that ended with this output. Without a record it was rejected."""
    root = root_of(spec)
    blocks = namer.chain(root, (*spec.prompt_tokens, *output))
    line = Recorded(
        request=number,
        arrived_ns=Ns(max(0, spec.arrived_ns - began_ns)),
        prompt_tokens=len(spec.prompt_tokens),
        output_tokens=0,
        max_tokens=spec.params.max_tokens,
        blocks=blocks,
        tail=namer.tail(root, spec.prompt_tokens, blocks),
        priority=spec.priority,
        slo=None if spec.slo == Slo() else spec.slo,
        end=REJECTED,
        code=code,
    )
    if record is None:
        return line
    return msgspec.structs.replace(
        line,
        output_tokens=record.num_output_tokens,
        end=record.reason.value,
        cached_tokens=record.num_cached_tokens,
        num_preemptions=record.num_preemptions,
        ttft_ns=record.ttft_ns,
        max_itl_ns=record.max_itl_ns,
        e2e_ns=record.e2e_ns,
        causes=tuple(record.main_cause(metric) for metric in Metric),
    )


# ---- reading


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A whole one. `requests` are in the order of their arrival."""

    begin: Begin
    pools: tuple[Pools, ...]
    requests: tuple[Recorded, ...]
    num_lost: int
    is_truncated: bool  # the last line was cut, as by a crash


def read_recording(lines: Iterable[bytes]) -> Recording:
    """Of one or more files of the same recording, one behind the other. Raises ConfigError that
    names the line, but for a last one that is cut.
    """
    begins: list[Begin] = []
    pools: list[Pools] = []
    requests: list[Recorded] = []
    num_lost, is_truncated = 0, False
    for line in _decoded(lines):
        match line:
            case Begin():
                begins.append(line)
            case Pools():
                pools.append(line)
            case Recorded():
                requests.append(line)
            case Lost():
                num_lost += line.num_requests
            case None:
                is_truncated = True
    if not begins:
        raise ConfigError("the recording is empty", hint="it is written by `serve --record FILE`")
    requests.sort(key=lambda one: one.arrived_ns)
    return Recording(
        begin=begins[0],
        pools=tuple(pools),
        requests=tuple(requests),
        num_lost=num_lost,
        is_truncated=is_truncated,
    )


def _decoded(lines: Iterable[bytes]) -> Iterator[Line | None]:
    """None stands for a last line that is cut."""
    number = 0
    for number, text in enumerate(lines, 1):
        try:
            line = _decoder.decode(text)
        except RecursionError:
            raise ConfigError(f"line {number} of the recording is damaged: too deep") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number > 1 and not text.endswith(b"\n"):
                yield None
                return
            raise ConfigError(f"line {number} of the recording is damaged: {error}") from error
        if number == 1 and not (isinstance(line, Begin) and line.format == FORMAT):
            raise ConfigError(f"not a recording of format {FORMAT}")
        if fault := _fault_of(line):
            raise ConfigError(f"line {number} of the recording is damaged: {fault}")
        yield line


def _fault_of(line: Line) -> str:
    """What cannot be, and would keep a simulation from its end; empty = nothing."""
    match line:
        case Begin():
            return _fault_of_begin(line)
        case Pools():
            return outside("at_ns", line.at_ns, 0, sys.maxsize) or next(
                (fault for pool in line.pools if (fault := _fault_of_pool(pool))), ""
            )
        case Recorded():
            return fault_of_request(line)
        case Lost():
            return outside("num_requests", line.num_requests, 0, sys.maxsize)


def _fault_of_begin(line: Begin) -> str:
    front = ClusterConfig(
        handoff=line.handoff,
        handoff_ms=line.handoff_ms,
        handoff_neighbour_weight=line.handoff_neighbour_weight,
        max_migrations=line.max_migrations,
    )
    return (
        outside("block_tokens", line.block_tokens, 1, MAX_TOKENS)
        or fault_of_settings(line.router)
        or fault_of_settings(front)
    )


def fault_of_request(line: Recorded) -> str:
    """What cannot be of it, in words; empty = nothing."""
    if line.end not in _ENDS:
        return f"nothing ends by {line.end!r}"
    if len(line.blocks) % NAME_BYTES or len(line.tail) not in (0, NAME_BYTES):
        return f"names have {NAME_BYTES} bytes"
    return (
        outside("prompt_tokens", line.prompt_tokens, 1, MAX_TOKENS)
        or outside("output_tokens", line.output_tokens, 0, MAX_TOKENS)
        or outside("max_tokens", line.max_tokens, 0, MAX_TOKENS)
        or outside("cached_tokens", line.cached_tokens, 0, MAX_TOKENS)
        or outside("num_preemptions", line.num_preemptions, 0, sys.maxsize)
        or outside("arrived_ns", line.arrived_ns, 0, sys.maxsize)
        or outside("ttft_ns", line.ttft_ns or 0, 0, sys.maxsize)
        or outside("max_itl_ns", line.max_itl_ns or 0, 0, sys.maxsize)
        or outside("e2e_ns", line.e2e_ns or 0, 0, sys.maxsize)
    )


def _fault_of_pool(pool: PoolFacts) -> str:
    return (
        outside("num_workers", pool.num_workers, 0, MAX_WORKERS)
        or outside("kv_block_bytes", pool.kv_block_bytes, 0, sys.maxsize)
        or fault_of_worker(pool.spec, pool.config, pool.cost)
    )
