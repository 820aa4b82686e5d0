"""The front end's driver of Ray: a process beside it, so that no fault of Ray is one of the server.

    python -m headrace.cluster.placement.driver HOST PORT

Reads orders, one JSON line each, and writes news. Each life is a placement group of one bundle (all
that one replica takes, on one node) and an actor in it, which Ray never restarts by itself: the
supervisor decides when another life begins, and gives it a group of its own. When standard input
ends, the front end is gone, and so are all actors.
"""

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, BinaryIO, Final

import msgspec

from headrace.cluster.placement.port import MAX_ORDER_BYTES, Ended, News, NoPlace, Order, Placed
from headrace.core.base.errors import ConfigError

REACH_TIMEOUT_S: Final = 5.0
NODES_SHOWN: Final = 8
NAMESPACE: Final = "headrace"


class End(msgspec.Struct, frozen=True, tag=True):
    """What the placer says beside orders: end that life."""

    ticket: str


_decode_asked: Final = msgspec.json.Decoder(Order | End).decode


class Driver:
    """One thread for each life, which mostly waits."""

    def __init__(self, ray: Any, out: BinaryIO) -> None:
        self._ray = ray
        self._out = out
        self._saying = threading.Lock()
        self._actors: dict[str, Any] = {}  # by ticket; None = it has no place yet
        self._guard = threading.Lock()  # over the actors

    def obey(self, asked: Order | End) -> None:
        if isinstance(asked, Order):
            with self._guard:
                self._actors[asked.ticket] = None
            threading.Thread(target=self._live, args=(asked,), daemon=True).start()
            return
        with self._guard:
            actor = self._actors.pop(asked.ticket, None)
        if actor is not None:
            self._ray.kill(actor)

    def end_all(self) -> None:
        with self._guard:
            actors, self._actors = list(self._actors.values()), {}
        for actor in actors:
            if actor is not None:
                self._ray.kill(actor)

    def _say(self, news: News) -> None:
        with self._saying:
            self._out.write(msgspec.json.encode(news) + b"\n")
            self._out.flush()

    def _live(self, order: Order) -> None:
        group = None
        try:
            group = self._group(order)
            last = self._have_place(order, group)
        except Exception as error:  # of many kinds, and all of them mean that nothing can be had
            last = NoPlace(order.ticket, f"Ray has failed: {_first_line(error)}")
        with self._guard:
            self._actors.pop(order.ticket, None)
        with suppress(Exception):  # it goes with this process at the latest
            if group is not None:
                self._ray.util.remove_placement_group(group)
        self._say(last)

    def _group(self, order: Order) -> Any:
        # One bundle is one node, as tensor parallelism wants it; Ray takes the emptiest for each.
        return self._ray.util.placement_group([{"CPU": order.num_cpus}], strategy="STRICT_PACK")

    def _have_place(self, order: Order, group: Any) -> News:
        if not group.wait(order.timeout_s):
            return NoPlace(order.ticket, *self._shortage(order))
        actor = self._begin(order, group)
        if actor is None:
            return Ended(order.ticket, "no place any more")
        try:
            self._ray.get(actor.ping.remote())
        except Exception as error:
            if "No module named 'headrace" in str(error):
                return NoPlace(
                    order.ticket,
                    "headrace is not installed on a node of the Ray cluster",
                    "install the same version in the environment that `ray start` runs in",
                )
            return Ended(order.ticket, self._end_of(error, None))
        node = self._node_of(group)
        self._say(Placed(order.ticket, node["NodeManagerAddress"], _sharing(node, order)))
        try:
            front = f"{order.host} port {order.port}"
            return Ended(
                order.ticket,
                self._ray.get(actor.run.remote(msgspec.json.encode(order), front))
                + f" on node {node['NodeManagerAddress']}",
            )
        except Exception as error:
            return Ended(order.ticket, self._end_of(error, node))

    def _begin(self, order: Order, group: Any) -> Any:
        """The actor; None where the life is over before it has begun."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from headrace.cluster.placement.actor import WorkerActor

        with self._guard:
            if order.ticket not in self._actors:
                return None
            actor = (
                self._ray.remote(WorkerActor)
                .options(
                    name=f"{order.name}-{order.ticket[:8]}",
                    num_cpus=order.num_cpus,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group),
                )
                .remote()
            )
            self._actors[order.ticket] = actor
        return actor

    def _node_of(self, group: Any) -> dict[str, Any]:
        nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        return next(node for node in self._ray.nodes() if node["NodeID"] in nodes.values())

    def _end_of(self, error: Exception, node: dict[str, Any] | None) -> str:
        if node is not None:
            alive = {one["NodeID"] for one in self._ray.nodes() if one["Alive"]}
            if node["NodeID"] not in alive:
                return f"its node {node['NodeManagerAddress']}"
            return f"its actor on node {node['NodeManagerAddress']}"
        return f"its actor: {_first_line(error)}"

    def _shortage(self, order: Order) -> tuple[str, str]:
        """Why there is no place, and what to do."""
        free = self._ray._private.state.available_resources_per_node()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        shown = ", ".join(
            f"{node['NodeManagerAddress']} has {free.get(node['NodeID'], {}).get('CPU', 0):g} of"
            f" {node['Resources'].get('CPU', 0):g}"
            for node in nodes[:NODES_SHOWN]
        )
        more = f" and {len(nodes) - NODES_SHOWN} nodes more" if len(nodes) > NODES_SHOWN else ""
        return (
            f"no node of the Ray cluster has room for worker {order.name} within"
            f" {order.timeout_s:g} s: it asks for {order.num_cpus:g} free CPUs, and {shown}{more}",
            "start fewer workers, ask for less with --on-cpus, or add nodes with `ray start`",
        )


def _sharing(node: dict[str, Any], order: Order) -> int:
    return max(1, int(node["Resources"].get("CPU", 1) // order.num_cpus))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def connect(host: str, port: int) -> Any:
    """Ray, as a driver of the cluster at this address. ConfigError where that cannot be."""
    address = f"{host}:{port}"
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Ray cannot be imported: {error}", hint="pip install 'headrace[ray]'"
        ) from None
    try:
        socket.create_connection((host, port), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster at {address}: {(error.strerror or str(error)).lower()}",
            hint="the address is that of `ray start --head`, 6379 unless it has another --port",
        ) from None
    options = {}
    if _is_extra_loopback(host):
        options["_node_ip_address"] = host  # which no route tells
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **options,
        )
    except Exception as error:
        raise ConfigError(
            f"the Ray cluster at {address} does not take this machine as a driver:"
            f" {_first_line(error)}",
            hint=f"the front end's machine has to be a node of it: ray start --address {address}"
            " --num-cpus 0; and where the cluster wants a token, `serve` needs RAY_AUTH_MODE=token"
            " and the same RAY_AUTH_TOKEN (or ~/.ray/auth_token) as its nodes",
        ) from None
    return ray


def _is_extra_loopback(host: str) -> bool:
    """Of the addresses by which several nodes live on one machine."""
    with suppress(ValueError):
        address = ip_address(host)
        return address.is_loopback and address != ip_address("127.0.0.1")
    return False


def main() -> int:
    # What anybody prints is for people; the news have a way of their own.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        ray = connect(sys.argv[1], int(sys.argv[2]))
    except ConfigError as error:
        out.write(msgspec.json.encode(NoPlace("", error.message, error.hint)) + b"\n")
        out.flush()
        return 2
    driver = Driver(ray, out)
    while line := sys.stdin.buffer.readline(MAX_ORDER_BYTES):
        driver.obey(_decode_asked(line))
    driver.end_all()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
