"""The listening socket, which is there before anything that serves on it."""

import errno
import resource
import socket

from headrace.core.base.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. ConfigError where the address cannot be had.

    It listens from here on: clients that come before the server runs wait instead of being refused.
    The process may open as many files as the system lets it from here on, too.
    """
    file_limit()
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = "another server has this port; choose one with `--port`, or 0 for any free one"
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}", hint=hint) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def file_limit() -> int:
    """How many files this process may open, as many as the system lets it: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20
