"""KV between machines through NIXL: blocks by their names, read out of the lender's memory.

Names go over an authenticated stream, as with TCP; whoever wants blocks hears where they lie, reads
them by NIXL's UCX backend (InfiniBand, RoCE, or TCP of its own), and asks again whether they still
have their names. What NIXL carries has no tag, and whoever reaches UCX's port may read and write
what is registered: it is for networks that nobody else is in.

Decides where bytes that arrive late can do no harm; refuses to choose a network.
"""

import ctypes
import fcntl
import logging
import math
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from headrace.adapters.movers import lane
from headrace.adapters.movers.lane import BrokenCopy, StalledCopy
from headrace.adapters.movers.pool import SharedPool
from headrace.adapters.movers.tcp import (
    MAX_NAMES,
    BlockServer,
    BlockStream,
    late_copy,
    open_stream,
)
from headrace.core.base.errors import TransferError
from headrace.core.base.types import BlockId
from headrace.core.kv.names import NAME_BYTES

_log = logging.getLogger(__name__)

PACKAGES: Final = ("nixl_cu12", "nixl_cu13")  # the same library, for two versions of CUDA
STAGING_BYTES: Final = 16 << 20
MAX_METADATA_BYTES: Final = 1 << 20
MAX_STUCK: Final = 8  # reads that never ended, whose memory nobody else may have
POLL_S: Final = 0.0002
SIOCGIFADDR: Final = 0x8915  # of netdevice(7)
_PLACE: Final = struct.Struct("!QQ")  # where blocks begin in the lender's memory, and how many
_INDEX: Final = struct.Struct("!I")


class NixlMissing(TransferError):
    """NIXL is not installed, or does not work here."""


@cache
def bindings() -> ModuleType:
    """NIXL's own module, without the packages around it, which want numpy. NixlMissing where there
    is none.
    """
    for package in PACKAGES:
        found = find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for path in Path(folder).glob("_bindings.*.so"):
                name = f"{package}._bindings"
                spec = spec_from_file_location(
                    name, path, loader=ExtensionFileLoader(name, str(path))
                )
                assert spec is not None
                assert spec.loader is not None
                try:
                    module = module_from_spec(spec)
                    spec.loader.exec_module(module)
                except ImportError as error:
                    raise NixlMissing(f"{package} cannot be loaded: {error}") from error
                sys.modules[name] = module
                return module
    raise NixlMissing("NIXL is not installed")


class _Staging(NamedTuple):
    """Memory that one lender's blocks are read into."""

    memory: mmap.mmap
    registered: Any


class NixlAgent:
    """This process's end of NIXL: a pool that others read, and memory to read theirs into."""

    def __init__(self, pool: SharedPool, device: str) -> None:
        """`device` is what UCX may use of the network, and listens at: an interface, or what it
        calls an adapter; commas between several. NixlMissing where that does not work.
        """
        self.pool = pool
        self._nixl: Any = bindings()
        self._lock = threading.Lock()  # over what follows
        self._is_closed = self._is_stopping = False
        self._stagings: dict[str, _Staging] = {}  # by who is read from
        self._stuck: list[tuple[Any, _Staging]] = []  # reads that may still write
        self._num_bytes = pool.file.offset + pool.num_blocks * pool.block_bytes
        self._memory = mmap.mmap(pool.file.fd, self._num_bytes)
        nixl = self._nixl
        # UCX's own variable: the backend's parameter names a device to use, and leaves it listening
        # at the addresses of all.
        os.putenv("UCX_NET_DEVICES", device)
        try:
            config = nixl.nixlAgentConfig(True, False, 0, nixl.NIXL_THREAD_SYNC_STRICT)
            self._agent = nixl.nixlAgent(f"headrace-{time.monotonic_ns()}-{id(self)}", config)
            self._backend = self._agent.createBackend("UCX", {})
            self._registered = self._register(self._memory)
        except Exception as error:
            raise NixlMissing(f"NIXL does not work over {device!r}: {error}") from error

    def describe(self) -> bytes:
        """What another one's `meet` understands."""
        start = _address(self._memory) + self.pool.file.offset
        metadata: bytes = self._agent.getLocalMD()
        return _PLACE.pack(start, self.pool.num_blocks) + metadata

    def meet(self, description: bytes) -> tuple[str, int, int]:
        """Another agent's name, where its blocks begin, and how many there are."""
        if not _PLACE.size < len(description):
            raise TransferError("a description that is none")
        start, num_blocks = _PLACE.unpack_from(description)
        try:
            name = self._agent.loadRemoteMD(description[_PLACE.size :])
        except Exception as error:
            raise TransferError(f"NIXL cannot reach the lender: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name), start, num_blocks

    def forget(self, name: str) -> None:
        with self._lock:
            staging = self._stagings.pop(name, None)
            if not self._is_closed:
                try:
                    if staging is not None:
                        self._let_go(staging)
                    self._agent.invalidateRemoteMD(name)
                except Exception as error:
                    _log.debug("NIXL does not let go of %s: %s", name, error)

    def read(
        self,
        name: str,
        addresses: Sequence[int],
        block_ids: Sequence[BlockId],
        until_s: float = math.inf,
    ) -> None:
        """Blocks out of another agent's memory into these, by one thread for each name. They come
        into memory of their own first, since nobody can call back a read that is late.
        TransferError where they do not come, StalledCopy where nothing does.
        """
        size = self.pool.block_bytes
        at_once = max(1, STAGING_BYTES // size)
        for first in range(0, len(addresses), at_once):
            staging = self._staging(name)
            self._read_staged(name, staging, addresses[first : first + at_once], until_s)
            with memoryview(staging.memory) as staged:
                for place, block_id in enumerate(block_ids[first : first + at_once]):
                    with staged[place * size : (place + 1) * size] as block:
                        self.pool.write(block_id, block)

    def stop(self) -> None:
        """Wait for no read any more. From any thread."""
        self._is_stopping = True

    def close(self) -> None:
        """What is stuck stays mapped, since somebody may still write to it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            stuck = [staging for _, staging in self._stuck]
            for staging in (*self._stagings.values(), *stuck):
                self._agent.deregisterMem(staging.registered, [self._backend])
            self._agent.deregisterMem(self._registered, [self._backend])
            del self._agent
            self._memory.close()
            for staging in self._stagings.values():
                staging.memory.close()

    def _read_staged(
        self, name: str, staging: _Staging, addresses: Sequence[int], until_s: float
    ) -> None:
        nixl, size = self._nixl, self.pool.block_bytes
        start = _address(staging.memory)
        ours = [(start + place * size, size, 0) for place in range(len(addresses))]
        theirs = [(address, size, 0) for address in addresses]
        try:
            request = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, ours),
                nixl.nixlXferDList(nixl.DRAM_SEG, theirs),
                name,
                "",
                [self._backend],
            )
        except Exception as error:  # nothing is on its way
            raise TransferError(f"NIXL cannot read: {error}") from error
        began_s = time.monotonic()
        end_s = min(began_s + lane.STALL_S, until_s)
        try:
            status = self._agent.postXferReq(request, "")
            while self._waits(status) and time.monotonic() < end_s:
                time.sleep(POLL_S)
                status = self._agent.getXferStatus(request)
        except Exception as error:
            self._leave_staging(name, request)
            raise TransferError(f"NIXL cannot read: {error}") from error
        if status != nixl.NIXL_SUCCESS:
            self._leave_staging(name, request)
            if self._is_stopping:
                raise TransferError("NIXL has not read: the worker is ending")
            if status == nixl.NIXL_IN_PROG:
                raise late_copy(0, began_s, began_s, until_s)
            raise TransferError("NIXL has not read: the lender is gone")
        self._agent.releaseXferReq(request)

    def _waits(self, status: object) -> bool:
        return bool(status == self._nixl.NIXL_IN_PROG) and not self._is_stopping

    def _leave_staging(self, name: str, request: Any) -> None:
        """Late bytes may still come to where they were to come, until the read is at an end."""
        with self._lock:
            self._take_back()
            self._stuck.append((request, self._stagings.pop(name)))

    def _take_back(self) -> None:
        """The memory of reads that have ended by now."""
        self._stuck = [one for one in self._stuck if not self._is_unstuck(*one)]

    def _is_unstuck(self, request: Any, staging: _Staging) -> bool:
        try:
            if self._agent.getXferStatus(request) != self._nixl.NIXL_SUCCESS:
                return False
        except Exception:  # it has failed; whether all of it has ended is not said
            return False
        self._agent.releaseXferReq(request)
        self._let_go(staging)
        return True

    def _staging(self, name: str) -> _Staging:
        with self._lock:
            staging = self._stagings.get(name)
            if staging is None:
                if len(self._stuck) >= MAX_STUCK:
                    self._take_back()
                if len(self._stuck) >= MAX_STUCK:
                    raise TransferError(f"NIXL has left {MAX_STUCK} reads undone, and gets no more")
                memory = mmap.mmap(-1, max(STAGING_BYTES, self.pool.block_bytes))
                staging = self._stagings[name] = _Staging(memory, self._register(memory))
            return staging

    def _let_go(self, staging: _Staging) -> None:
        self._agent.deregisterMem(staging.registered, [self._backend])
        staging.memory.close()

    def _register(self, memory: mmap.mmap) -> Any:
        nixl = self._nixl
        region = [(_address(memory), len(memory), 0, b"")]
        registered = nixl.nixlRegDList(nixl.DRAM_SEG, region)
        self._agent.registerMem(registered, [self._backend])
        return registered


class NixlServer(BlockServer):
    """Tells whoever knows the secret where blocks lie. An empty request is for the description."""

    kind = "nixl"

    def __init__(self, agent: NixlAgent, host: str, secret: bytes) -> None:
        self._agent = agent
        super().__init__(agent.pool, host, secret)

    def _lend(self, line: BlockStream, names: bytes) -> None:
        if not names:
            line.send(self._agent.describe())
            return
        found = []
        for start in range(0, len(names), NAME_BYTES):
            index = self._agent.pool.find(names[start : start + NAME_BYTES])
            if index is None:
                break
            found.append(_INDEX.pack(index))
        line.send(b"".join(found))


class NixlSource:
    """Another machine's pool. One copy at a time."""

    def __init__(self, address: str, agent: NixlAgent, secret: bytes) -> None:
        """TransferError where there is no such pool, or its blocks are of another size."""
        self._agent = agent
        self._line = open_stream(address, NixlServer.kind, agent.pool.block_bytes, secret)
        try:
            self._line.send(b"")
            description = self._line.receive(MAX_METADATA_BYTES)
            self._name, self._start, self._num_blocks = agent.meet(description)
        except TimeoutError as error:
            self._line.socket.close()
            raise StalledCopy(0, f"{address!r} does not answer") from error
        except (EOFError, OSError) as error:
            self._line.socket.close()
            raise TransferError(f"{address!r} does not answer") from error
        except TransferError:
            self._line.socket.close()
            raise

    def copy(
        self,
        names: Sequence[bytes],
        pool: SharedPool,
        block_ids: Sequence[BlockId],
        until_s: float = math.inf,
    ) -> int:
        """As Source.copy. Each answer has STALL_S, and so has what is read at once."""
        size = pool.block_bytes
        asked_s = time.monotonic()
        try:
            where = self._where(names, until_s)
            addresses = [self._start + index * size for index in where]
            self._agent.read(self._name, addresses, block_ids[: len(where)], until_s)
            asked_s = time.monotonic()
            after = self._where(names[: len(where)], until_s) if where else []
        except TimeoutError as error:
            raise late_copy(0, asked_s, asked_s, until_s) from error
        except BrokenCopy:
            raise
        except (EOFError, OSError, TransferError) as error:
            raise BrokenCopy(0, str(error) or "the lender is gone") from error
        pairs = zip(where, after, strict=False)
        return next(
            (count for count, (old, new) in enumerate(pairs) if old != new),
            min(len(where), len(after)),
        )

    def stop(self) -> None:
        self._line.stop()
        self._agent.stop()

    def close(self) -> None:
        self._line.socket.close()
        self._agent.forget(self._name)

    def _where(self, names: Sequence[bytes], until_s: float) -> list[int]:
        """In which of the lender's blocks the first of these lie."""
        self._line.until_s = min(time.monotonic() + lane.STALL_S, until_s)
        self._line.send(b"".join(names))
        answer = self._line.receive(MAX_NAMES * _INDEX.size)
        if len(answer) % _INDEX.size:
            raise TransferError(f"the lender's answer of {len(answer)} bytes is no list of blocks")
        found = [index for (index,) in _INDEX.iter_unpack(answer)]
        if len(found) > len(names) or any(index >= self._num_blocks for index in found):
            raise TransferError("the lender names blocks that it has not")
        return found


def _address(memory: mmap.mmap) -> int:
    """Of its first byte, without holding on to it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def interface_of(host: str) -> str:
    """The network interface that has this IPv4 address; empty where none has."""
    if not host:
        return ""
    if host.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return ""
