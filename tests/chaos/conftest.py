"""What scenarios share, and that nothing is left of each: no task, socket, thread or process."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.http_server import running_server
from support.leftovers import Watch, nothing_left, watched
from support.remote_worker import free_ports


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> None:
    """What the first server of a process opens for all that follow."""
    with running_server(None, is_attached=False):
        pass


@pytest.fixture(scope="module")
def watch(_made_once: None) -> Iterator[Watch]:
    with watched() as watch:
        yield watch


@pytest.fixture(scope="module", autouse=True)
def _clusters(watch: Watch) -> None:
    """Before those of a module are opened."""


@pytest.fixture(autouse=True)
def _nothing_left(watch: Watch) -> Iterator[None]:
    with nothing_left(watch):
        yield


@pytest.fixture
def port() -> int:
    """Of a front end that workers come to by themselves."""
    return free_ports(1)[0]


@pytest.fixture
def stack(_nothing_left: None) -> Iterator[ExitStack]:
    """What a scenario opens is closed before anybody looks for what it has left."""
    with ExitStack() as stack:
        yield stack
