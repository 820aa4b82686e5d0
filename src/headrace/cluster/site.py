"""Where the workers of a cluster run: on this machine, on those that come to the door, or in places
that Ray finds.

Decides how a worker of the front end begins, and at which address it finds the front end.
"""

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace.adapters.handshake import read_secret
from headrace.cluster.door import Door
from headrace.cluster.fleet import START_TIMEOUT_S, Slot
from headrace.cluster.placement.port import Placer
from headrace.cluster.placement.process import Launcher
from headrace.cluster.placement.ray import RayPlacer, check_ray_is_installed, cluster_address
from headrace.cluster.process import WORKER, LocalProcess, WorkerProcess
from headrace.cluster.remote import address_of
from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import Config
from headrace.server.listener import bind

SECRET_BYTES: Final = 32
ANY_HOSTS: Final = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    launch: Callable[[Slot], WorkerProcess]
    door: Door | None = None
    start_timeout_s: float = START_TIMEOUT_S
    close: Callable[[], None] = lambda: None


def open_site(config: Config, placer: Placer | None = None, *, worker_module: str = WORKER) -> Site:
    """As `config` says; `placer` takes the place of the one that it names, and `worker_module` that
    of the program that workers of this machine run. ConfigError.
    """
    cluster = config.cluster
    if cluster.on:
        return _elsewhere(config, placer)
    door = None
    if cluster.listen:
        secret = read_secret(cluster.secret_file)
        door = Door(bind(*address_of(cluster.listen)), secret)
    return Site(launch=lambda slot: LocalProcess(worker_module), door=door)


def _elsewhere(config: Config, placer: Placer | None) -> Site:
    cluster = config.cluster
    near = "127.0.0.1"  # an address of this machine that its workers reach
    if placer is None:
        check_ray_is_installed()
        head = cluster_address(cluster.on)
        near = _address_towards(*head)
        placer = RayPlacer(*head)
    secret = (
        read_secret(cluster.secret_file)
        if cluster.secret_file
        else secrets.token_bytes(SECRET_BYTES)
    )
    host, port = address_of(cluster.listen) if cluster.listen else (near, 0)
    listener = bind(host, port)
    launcher = Launcher(
        placer,
        front=(near if host in ANY_HOSTS else host, listener.getsockname()[1]),
        secret=secret,
        num_cpus=cluster.on_cpus or config.device.threads or 1,
        timeout_s=cluster.on_timeout_s,
    )
    return Site(
        launch=lambda slot: launcher(slot.name, slot.role),
        door=Door(listener, secret),
        start_timeout_s=cluster.on_timeout_s + START_TIMEOUT_S,
        close=placer.close,
    )


def _address_towards(host: str, port: int) -> str:
    """Which of this machine's addresses packets to there come from."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"no way to the cluster at {host} port {port}: {reason}") from None
