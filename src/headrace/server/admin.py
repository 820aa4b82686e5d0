"""What operators ask: routes for whoever is on this machine, and nobody else."""

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.base.errors import OverloadError, RequestError
from headrace.core.base.worker import Role
from headrace.core.router.decision import Decision
from headrace.live.port import Engine, WorkerState
from headrace.server.body import read_body
from headrace.server.errors import JSON

MAX_ADMIN_BYTES: Final = 4096
ROLE_TIMEOUT_S: Final = 10.0  # for a worker to say what it is for


class RoleBody(msgspec.Struct):
    role: str


def check_is_local(request: Request) -> None:
    """A decision names all workers and how busy they are. What a proxy passes on does not come from
    here. HTTPException 404.
    """
    is_forwarded = any(name in request.headers for name in ("forwarded", "x-forwarded-for"))
    if is_forwarded or request.client is None or not _is_loopback(request.client.host):
        raise HTTPException(404)


def decision_response(decision: Decision | None) -> Response:
    """Why a request went where it went; RequestError 404 where that is not known."""
    if decision is None:
        raise RequestError("no such decision, or not any more", status_hint=404, code="not_found")
    return Response(msgspec.json.encode(decision), media_type=JSON)


def workers_response(workers: Sequence[WorkerState]) -> Response:
    """Each process, and why it was lost where it was."""
    return Response(msgspec.json.encode(workers), media_type=JSON)


async def change_role(request: Request, engine: Engine) -> Response:
    """The worker, as it is when it has its new role. RequestError where it cannot have it,
    OverloadError where it does not answer.
    """
    if "origin" in request.headers:  # a page in somebody's browser asks
        raise HTTPException(404)
    body = await read_body(request.headers, request.receive, MAX_ADMIN_BYTES)
    name, role = request.path_params["id"], _role_of(body)
    done = asyncio.wrap_future(engine.set_role(name, role))
    await asyncio.wait((done,), timeout=ROLE_TIMEOUT_S)
    if not done.done():
        reason = f"worker {name} has not answered for {ROLE_TIMEOUT_S:g} s"
        raise OverloadError(reason, retry_after_s=ROLE_TIMEOUT_S)
    done.result()
    worker = next((one for one in engine.workers() if one.name == name), None)
    return Response(msgspec.json.encode(worker), media_type=JSON)


def _role_of(body: bytes) -> Role:
    try:
        return Role(msgspec.json.decode(body, type=RoleBody).role)
    except msgspec.DecodeError as error:
        message = f'a body like {{"role": "decode"}} is expected: {error}'
        raise RequestError(message, code="invalid_body") from None
    except ValueError:
        kinds = ", ".join(Role)
        raise RequestError(f"unknown role, one of {kinds} is expected", param="role") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
