"""Files that an operator names, or a model consists of: regular ones only, and never more of them
in memory than is expected.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from headrace.core.base.errors import ConfigError
from headrace.core.config.units import size_text

_PIECE_BYTES = 64 << 10


def open_regular(path: Path) -> BinaryIO:
    """A file for reading. ConfigError, which names it, where it cannot be had, or is no file with
    an end: a folder, a pipe, a device.
    """
    try:
        # A pipe that nobody writes to would be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ConfigError(f"{path}: cannot be read: not a regular file")
    return os.fdopen(handle, "rb")


def check_writable(path: Path) -> None:
    """That a file can be written there, before work is done for it; leaves none behind. Raises
    ConfigError, which names it.
    """
    was_there = path.exists()
    try:
        # A pipe that nobody reads from would be waited for.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {_reason(error)}") from None
    if not was_there:
        path.resolve().unlink()


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A whole small file; ConfigError as for `open_regular`, and where it is larger."""
    with open_regular(path) as file:
        try:
            # By pieces, since the size that a file states need not be true.
            data = bytearray()
            while len(data) <= max_bytes and (piece := file.read(_PIECE_BYTES)):
                data += piece
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: larger than {size_text(max_bytes)}")
    return bytes(data)


def read_text(path: Path, max_bytes: int) -> str:
    """As `read_bounded`, for UTF-8."""
    try:
        return read_bounded(path, max_bytes).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
