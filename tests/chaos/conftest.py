"""After each scenario nothing is left of it: no task, no socket, no thread, no process."""

from collections.abc import Iterator

import pytest

from support.http_server import running_server
from support.leftovers import Watch, nothing_left, watched


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
