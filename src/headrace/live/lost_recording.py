"""What the log says where a recording cannot go on. Decides what an operator has to know of that;
refuses to know what is recorded.
"""

import errno
import logging
from pathlib import Path
from typing import Final

_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


def tell_end(log: logging.Logger, what: str, path: Path, error: Exception) -> None:
    """One line where the file is at fault, and a traceback where we are. Serving goes on."""
    if not isinstance(error, OSError):
        log.error("%s has ended in %s by a fault of headrace; serving goes on", what, path,
                  exc_info=error)  # fmt: skip
        return
    remedy = "make room or name another file" if error.errno in _ROOM else "name another file"
    log.error(
        "%s has ended: cannot write %s: %s; serving goes on without it; to have one again, %s and"
        " start again",
        what,
        path,
        (error.strerror or str(error)).lower(),
        remedy,
    )
