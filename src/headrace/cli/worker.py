"""`headrace worker`: a worker for front ends on other machines."""

import re
import socket
from collections.abc import Sequence

from headrace.adapters.handshake import read_secret
from headrace.cli.logs import start_logging
from headrace.cluster.remote import Leaving, address_of, serve_fronts
from headrace.cluster.wire import WORKER_NAME
from headrace.core.base.errors import ConfigError
from headrace.core.base.worker import Role

MAX_DRAIN_S = 100_000


def worker(
    connect: Sequence[str],
    secret_file: str,
    *,
    role: str,
    name: str,
    drain_timeout_s: float = 30.0,
) -> None:
    """Until it is stopped, and what it has begun is done."""
    if role not in list(Role):
        raise ConfigError(f"--role is {role!r}; choose one of {', '.join(Role)}")
    name = name or socket.gethostname()
    if not re.match(WORKER_NAME, name):
        raise ConfigError(
            f"the worker's name is {name!r}; it may have 1 to 64 of A-Z a-z 0-9 . _ -",
            hint="choose another with --name",
        )
    if not 0 <= drain_timeout_s <= MAX_DRAIN_S:
        raise ConfigError(f"--drain-timeout-s is {drain_timeout_s:g}; it may be 0 to {MAX_DRAIN_S}")
    start_logging("warning")
    fronts = [address_of(text) for text in dict.fromkeys(connect)]
    secret = read_secret(secret_file)
    leaving = Leaving(drain_timeout_s)
    leaving.take_signals()
    serve_fronts(fronts, secret, role=Role(role), name=name, leaving=leaving)
