"""Where log lines go: standard error, one line each, from the level that the operator chose."""

import logging
import sys
from typing import Any, Final

from headrace.core.base.names import one_line

MAX_CHARS: Final = 8192  # of a line, which may tell of others' words
MAX_TRACE_LINES: Final = 200


class OneLine(logging.Formatter):
    """A message is one line, whatever somebody else has said in it: nothing in it drives the
    terminal, or looks like a line of ours. Tracebacks keep their lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record), MAX_CHARS)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(one_line(line, MAX_CHARS) for line in lines[-MAX_TRACE_LINES:])


def start_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    # What becomes of workers is a few lines in a day, and worth more than one of each request.
    is_shown = logging.root.level <= logging.WARNING
    logging.getLogger("headrace.fleet").setLevel(logging.INFO if is_shown else logging.NOTSET)
    # Its starts and stops are said by the table and the exit code.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
