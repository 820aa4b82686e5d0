"""`headrace worker`: a worker for front ends on other machines."""

import re
import socket
from collections.abc import Sequence
from typing import Never

from headrace.adapters.handshake import read_secret
from headrace.cli.logs import start_logging
from headrace.cluster.remote import address_of, serve_fronts
from headrace.cluster.wire import WORKER_NAME
from headrace.core.base.errors import ConfigError
from headrace.core.base.worker import Role


def worker(connect: Sequence[str], secret_file: str, *, role: str, name: str) -> Never:
    """Until it is stopped."""
    if role not in list(Role):
        raise ConfigError(f"--role is {role!r}; choose one of {', '.join(Role)}")
    name = name or socket.gethostname()
    if not re.match(WORKER_NAME, name):
        raise ConfigError(
            f"the worker's name is {name!r}; it may have 1 to 64 of A-Z a-z 0-9 . _ -",
            hint="choose another with --name",
        )
    start_logging("warning")
    fronts = [address_of(text) for text in dict.fromkeys(connect)]
    secret = read_secret(secret_file)
    serve_fronts(fronts, secret, role=Role(role), name=name)
