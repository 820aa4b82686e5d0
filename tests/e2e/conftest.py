"""A server on a model whose answers are known, and the official client of it."""

from collections.abc import Iterator

import openai
import pytest

from support.fake_engine import FakeBooted, formula_model
from support.http_server import RunningServer, running_server


@pytest.fixture(scope="module")
def booted() -> Iterator[FakeBooted]:
    with formula_model() as booted:
        yield booted


@pytest.fixture(scope="module")
def server(booted: FakeBooted) -> Iterator[RunningServer]:
    with running_server(booted) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
