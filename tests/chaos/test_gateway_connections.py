"""What a gateway's own connections do: those that engines close, those that it cannot open."""

import errno
import socket
from typing import Any

import aiohttp
import pytest

from chaos.test_gateway import GOOD, GOOD_BYTES, ask, gateway_over
from support import stub_engine as stub
from support.raw_http import eventually


def test_an_answer_without_a_body_has_no_length() -> None:
    head = b"HTTP/1.1 204 x\r\ncontent-length: 5\r\n\r\n"
    with gateway_over(stub.sends(head)) as (gateway, _):
        response = ask(gateway)
        assert (response.status_code, response.content) == (204, b"")
        assert "content-length" not in response.headers


def test_a_connection_that_was_closed_while_it_waited_is_nobodys_fault() -> None:
    def serve(sock: socket.socket, asked: stub.Asked) -> None:
        sock.sendall(stub.answer(200, b"{}").replace(b"connection: close", b"x: y"))
        if len(engine.asked) == 1:
            engine.asked.append(stub.read_request(sock))  # and then it hangs up

    with gateway_over(serve) as (gateway, (engine,)):
        for _ in range(2):
            response = ask(gateway, stream=False)
            assert (response.status_code, response.content) == (200, b"{}")
        assert len(engine.asked) == 3
        assert gateway.gateway.engines[0].num_faults == 0


def test_a_gateway_without_descriptors_takes_no_engine_for_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = OSError(errno.EMFILE, "too many open files")
    num_looks = 0

    async def take(*args: Any, **named: Any) -> Any:
        raise error

    async def get(*args: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        raise aiohttp.ClientConnectorError(Any, error)  # type: ignore[arg-type]

    with gateway_over(GOOD) as (gateway, _):
        with monkeypatch.context() as patch:
            patch.setattr("headrace.cluster.gateway.link.Links.take", take)
            patch.setattr("headrace.cluster.gateway.watch.Watch._get", get)
            response = ask(gateway)
            assert response.status_code == 503
            assert "no more connections" in response.text
            assert int(response.headers["retry-after"]) >= 1
            eventually(lambda: num_looks > 1)
        assert gateway.is_up("e0")
        assert gateway.gateway.engines[0].num_faults == 0
        assert ask(gateway).content == GOOD_BYTES
