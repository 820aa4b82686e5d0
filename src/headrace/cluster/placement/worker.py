"""The worker's process where a placer has found room for it.

    python -m headrace.cluster.placement.worker < ORDER

The order is one line of standard input; when that ends, whoever began this process is gone. It
comes to the front end once: a life that is over does not come again.
"""

import logging
import os
import sys
import threading
from contextlib import closing
from typing import Final, NoReturn

import msgspec

from headrace.cluster.placement.port import GONE, MAX_ORDER_BYTES, NO_FRONT, UNFIT, Order
from headrace.cluster.remote import Leaving, meet_front
from headrace.cluster.shared import SharedEngine
from headrace.cluster.wire import Hello
from headrace.cluster.worker import end_with_parent
from headrace.core.base.errors import ConfigError, TransferError
from headrace.live.boot import AsWorker

_log = logging.getLogger(__name__)

STDIN: Final = 0
LEAVE_WITHIN_S: Final = 1e5  # the front end has the say


def main() -> int:
    end_with_parent()
    order = msgspec.json.decode(_first_line(), type=Order)
    threading.Thread(target=_end_with_input, daemon=True).start()
    hello = Hello(name=order.name, role=order.role, ticket=order.ticket)
    leaving = Leaving(LEAVE_WITHIN_S)
    leaving.take_signals()
    has_met = False

    def note() -> None:
        nonlocal has_met
        has_met = True

    try:
        with closing(SharedEngine(AsWorker(secret=order.secret))) as engine:
            meet_front((order.host, order.port), order.secret, hello, engine, leaving, note)
    except ConfigError as error:
        _log.error("%s", error)
        return UNFIT
    except (EOFError, OSError, TransferError) as error:
        if not has_met:
            _log.error("no front end at %s port %d: %s", order.host, order.port, error)
            return NO_FRONT
    return GONE


# Both read without the interpreter's buffer, whose lock a thread that waits would keep to the end.


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_ORDER_BYTES:
        data = os.read(STDIN, MAX_ORDER_BYTES)
        if not data:
            break
        line += data
    return line


def _end_with_input() -> NoReturn:
    while os.read(STDIN, MAX_ORDER_BYTES):
        pass
    os._exit(GONE)


if __name__ == "__main__":
    sys.exit(main())
