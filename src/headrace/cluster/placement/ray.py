"""A placer that asks a Ray cluster, through a driver in a process of its own.

Decides when that driver is started again; refuses to import Ray.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from headrace.cluster.placement.driver import End
from headrace.cluster.placement.port import Ended, News, NoPlace, Order, Placed
from headrace.cluster.remote import address_of
from headrace.core.base.errors import ConfigError

LOCAL: Final = "ray"
SCHEME: Final = "ray://"
CLOSE_TIMEOUT_S: Final = 10.0
_CURRENT_CLUSTER: Final = "ray_current_cluster"  # where `ray start` says how to reach it

_decode_news: Final = msgspec.json.Decoder(News).decode
_Hear: TypeAlias = Callable[[News], None]
_Driver: TypeAlias = "subprocess.Popen[bytes]"


def cluster_address(on: str) -> tuple[str, int]:
    """Of the cluster that `on` names. ConfigError where it names none."""
    if on == LOCAL:
        return _local_address()
    if not on.startswith(SCHEME):
        raise ConfigError(
            f"--on is {on!r}, which names no cluster",
            hint="--on ray for the cluster that this machine is a node of, or ray://HOST:PORT",
        )
    return address_of(on.removeprefix(SCHEME).rstrip("/"))


def _local_address() -> tuple[str, int]:
    if address := os.environ.get("RAY_ADDRESS", "").strip():
        if address.startswith(SCHEME):
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, of a client of Ray, and a driver is needed",
                hint="give the address of the head itself, HOST:PORT without ray://",
            )
        if address != "auto":
            return address_of(address)
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / _CURRENT_CLUSTER
    with suppress(OSError):
        return address_of(file.read_text().strip())
    raise ConfigError(
        "no Ray cluster runs on this machine",
        hint="begin one with `ray start --head`, or name one with --on ray://HOST:PORT",
    )


def check_ray_is_installed() -> None:
    """ConfigError where it is not."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed", hint="pip install 'headrace[ray]'")


class RayPlacer:
    """Owns the driver. One that ends takes the lives with it; the next order begins another."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, str(port)
        self._lock = threading.Lock()  # over all that follows
        self._driver: _Driver | None = None
        self._lives: dict[str, _Hear] = {}
        self._is_closed = False

    def place(self, order: Order, hear: _Hear) -> None:
        with self._lock:
            if not self._is_closed:
                self._lives[order.ticket] = hear
                driver = self._begin_driver() if self._driver is None else self._driver
                _tell(driver, order)
                return
        hear(Ended(order.ticket, "the front end"))

    def end(self, ticket: str) -> None:
        with self._lock:
            if ticket in self._lives and self._driver is not None:
                _tell(self._driver, End(ticket))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            driver = self._driver
        if driver is None:
            return
        assert driver.stdin is not None
        with suppress(OSError):
            driver.stdin.close()
        try:
            driver.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            driver.kill()  # Ray ends what a driver leaves behind
            driver.wait()

    def _begin_driver(self) -> _Driver:
        driver = subprocess.Popen(
            [sys.executable, "-m", "headrace.cluster.placement.driver", *self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,  # a terminal's Ctrl-C is for the front end
        )
        self._driver = driver
        threading.Thread(target=self._listen, args=(driver,), daemon=True).start()
        return driver

    def _listen(self, driver: _Driver) -> None:
        assert driver.stdout is not None
        why = NoPlace("", "the driver of Ray has ended")
        with contextlib.closing(driver.stdout):
            for line in driver.stdout:
                news = _decode_news(line)
                if isinstance(news, NoPlace) and not news.ticket:
                    why = news  # none of all that it was asked for
                    continue
                self._pass_on(news)
        driver.wait()
        assert driver.stdin is not None
        with self._lock:
            with suppress(OSError):
                driver.stdin.close()
            self._driver = None
            lives, self._lives = self._lives, {}
        for ticket, hear in lives.items():
            hear(NoPlace(ticket, why.reason, why.hint))

    def _pass_on(self, news: News) -> None:
        with self._lock:
            hear = self._lives.get(news.ticket)
            if not isinstance(news, Placed):
                self._lives.pop(news.ticket, None)
        if hear is not None:
            hear(news)


def _tell(driver: _Driver, asked: Order | End) -> None:
    assert driver.stdin is not None
    with suppress(OSError):  # whoever listens to it finds out
        driver.stdin.write(msgspec.json.encode(asked) + b"\n")
        driver.stdin.flush()
