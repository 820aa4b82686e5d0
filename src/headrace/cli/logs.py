"""Where log lines go: standard error, one line each, from the level that the operator chose."""

import logging
import sys


def start_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )
    logging.captureWarnings(True)
    # Its starts and stops are said by the table and the exit code.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
