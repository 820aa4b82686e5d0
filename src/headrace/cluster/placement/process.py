"""A worker's life on a machine that a placer has found, as a WorkerProcess.

It is Awaited until its worker comes to the door with the life's ticket, and Arrived from then on.
"""

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from headrace.cluster.placement.port import Ended, News, NoPlace, Order, Placed, Placer
from headrace.cluster.process import RemoteProcess
from headrace.cluster.wire import Configure, FromWorker, ToWorker, Unfit
from headrace.core.base.errors import TransferError
from headrace.core.base.worker import Role

TICKET_BYTES: Final = 16


class _Life:
    """What the placer has said of it. `on_news` is called on the placer's thread."""

    def __init__(self, placer: Placer, order: Order, on_news: Callable[[], None]) -> None:
        self.placer = placer
        self.ticket = order.ticket
        self.on_news = on_news
        self.placed: Placed | None = None
        self.last: NoPlace | Ended | None = None
        self.is_over = threading.Event()

    def hear(self, news: News) -> None:
        if isinstance(news, Placed):
            self.placed = news
            return
        self.last = news
        self.is_over.set()
        self.on_news()

    def end(self) -> None:
        if self.last is None:
            self.placer.end(self.ticket)

    def wait(self, timeout_s: float) -> bool:
        return self.is_over.wait(timeout_s)

    def exit_status(self) -> str | None:
        return None if self.last is None else self.last.reason

    @property
    def where(self) -> str:
        return "" if self.placed is None else f" on node {self.placed.node}"


class Awaited:
    """A WorkerProcess that has not come yet. What it is to hear first is kept for it."""

    pid = None
    has_unsent = False

    def __init__(self, placer: Placer, order: Order) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._unsent: list[ToWorker] = []
        self._life = _Life(placer, order, self._ring)
        placer.place(order, self._life.hear)

    def _ring(self) -> None:
        with suppress(OSError):  # nobody listens any more
            self._bell.send(b"\0")

    @property
    def ticket(self) -> str:
        return self._life.ticket

    def fileno(self) -> int:
        return self._ear.fileno()

    def send(self, message: ToWorker) -> None:
        self._unsent.append(message)

    def flush(self) -> None: ...

    def receive(self) -> list[FromWorker]:
        with suppress(BlockingIOError):
            self._ear.recv(1)
        match self._life.last:
            case NoPlace(_, reason, hint):
                return [Unfit(reason, hint)]
            case Ended():
                raise EOFError
        return []

    def arrive(self, process: RemoteProcess) -> "Arrived":
        """The same life from here on, with what was kept sent."""
        self._close_bell()
        arrived = Arrived(self._life, process)
        for message in self._unsent:
            arrived.send(message)
        return arrived

    def close(self) -> None:
        """It has nothing to finish."""
        self.kill()

    def kill(self) -> None:
        self._close_bell()
        self._life.end()

    def _close_bell(self) -> None:
        self._ear.close()
        self._bell.close()

    def wait(self, timeout_s: float) -> bool:
        return self._life.wait(timeout_s)

    def exit_status(self) -> str | None:
        return self._life.exit_status()


class Arrived:
    """A WorkerProcess whose worker has come to the door."""

    pid = None

    def __init__(self, life: _Life, process: RemoteProcess) -> None:
        self._life = life
        self._process = process
        self._closing = threading.Lock()  # between the two threads that may touch the stream
        self._is_closed = False
        life.on_news = self._sever
        if life.last is not None:  # meanwhile
            self._sever()

    def _sever(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._process.sever()

    @property
    def has_unsent(self) -> bool:
        return self._process.has_unsent

    def fileno(self) -> int:
        return self._process.fileno()

    def send(self, message: ToWorker) -> None:
        placed = self._life.placed
        if isinstance(message, Configure) and placed is not None:
            message = Configure(
                config=message.config, role=message.role, num_sharing=placed.num_sharing
            )
        self._process.send(message)

    def flush(self) -> None:
        self._process.flush()

    def receive(self) -> list[FromWorker]:
        try:
            messages = self._process.receive()
        except EOFError:
            # The placer's word for it may take a while, in which others would wait.
            reason = self._life.exit_status()
            raise TransferError(
                f"its connection{self._life.where} has ended"
                if reason is None
                else f"its process has ended, with {reason}"
            ) from None
        return [self._with_node(message) for message in messages]

    def _with_node(self, message: FromWorker) -> FromWorker:
        if isinstance(message, Unfit):
            return Unfit(message.message + self._life.where, message.hint)
        return message

    def close(self) -> None:
        with self._closing:
            self._is_closed = True
            self._process.close()

    def kill(self) -> None:
        self.close()
        self._life.end()

    def wait(self, timeout_s: float) -> bool:
        return self._life.wait(timeout_s)

    def exit_status(self) -> str | None:
        return self._life.exit_status()


class Launcher:
    """Begins lives that come to one front end."""

    def __init__(
        self,
        placer: Placer,
        *,
        front: tuple[str, int],
        secret: bytes,
        num_cpus: float,
        timeout_s: float,
    ) -> None:
        self._placer = placer
        self._front = front
        self._secret = secret
        self._num_cpus = num_cpus
        self._timeout_s = timeout_s

    def __call__(self, name: str, role: Role) -> Awaited:
        host, port = self._front
        order = Order(
            ticket=secrets.token_hex(TICKET_BYTES),
            name=name,
            role=role,
            num_cpus=self._num_cpus,
            timeout_s=self._timeout_s,
            host=host,
            port=port,
            secret=self._secret,
        )
        return Awaited(self._placer, order)
