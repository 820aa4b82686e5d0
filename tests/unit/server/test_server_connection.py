"""What a connection and an exchange have from the start."""

import asyncio
import uuid

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from headrace.server.connection import Connection
from headrace.server.exchange import Exchange


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that nobody asks."""


def test_a_connection_begins_as_uvicorns_own() -> None:
    """With all that uvicorn's code counts on, and nothing in it that differs, loggers apart."""

    async def begin() -> None:
        config = uvicorn.Config(nothing, ws="none", lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        ours = vars(Connection(config, state, {"a": 1}))
        theirs = vars(HttpToolsProtocol(config, state, {"a": 1}))
        own = {"parser", "logger", "access_logger", "access_log"}
        assert {name: ours[name] for name in theirs.keys() - own} == {
            name: theirs[name] for name in theirs.keys() - own
        }
        assert own <= ours.keys()

    asyncio.run(begin())


def exchange(*headers: tuple[bytes, bytes]) -> Exchange:
    return Exchange.begin({"type": "http", "headers": list(headers)})


def test_of_headers_with_one_name_the_first_counts() -> None:
    given = exchange((b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2"))
    assert dict(given.headers) == {"a": "1", "b": "é"}


def test_a_request_without_an_id_gets_one_of_its_own() -> None:
    ids = [exchange().request_id for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(str(uuid.UUID(one)) == one and uuid.UUID(one).version == 4 for one in ids)
    assert exchange((b"x-request-id", b"mine")).request_id == "mine"
    assert exchange((b"x-request-id", b"not mine")).request_id != "not mine"
