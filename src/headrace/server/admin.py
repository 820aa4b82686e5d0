"""What operators ask: routes for whoever is on this machine, and nobody else."""

import ipaddress
from collections.abc import Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.base.errors import RequestError
from headrace.core.router.decision import Decision
from headrace.live.port import WorkerState
from headrace.server.errors import JSON


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
