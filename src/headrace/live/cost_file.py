"""Calibrations as files: JSON, with a version.

Decides what is a file of this kind; refuses to know how its figures are used.
"""

from pathlib import Path
from typing import Final

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.cost.calibration import FORMAT, Calibration
from headrace.models.files import read_bounded

MAX_BYTES: Final = 1 << 20


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: cannot be written: {reason}") from None


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError for what is no calibration, or one of another version."""
    data = read_bounded(path, MAX_BYTES)
    hint = "write one with `headrace calibrate --out FILE`"
    try:
        found = msgspec.json.decode(data, type=_Versioned).format
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is no calibration: {error}", hint=hint) from None
    if found != FORMAT:
        raise ConfigError(
            f"{path} has format {found!r}, this version of headrace reads {FORMAT!r}", hint=hint
        )
    try:
        return msgspec.json.decode(data, type=Calibration)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is a damaged calibration: {error}", hint=hint) from None


class _Versioned(msgspec.Struct, frozen=True):
    format: str
