"""The gateway's application: the routes that are passed on, and those that are its own."""

from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import headrace
from headrace.cluster.gateway.gateway import GENERATION, Gateway
from headrace.cluster.gateway.relay import Relay
from headrace.core.base.errors import HeadraceError, RequestError
from headrace.core.router.decision import Filtered
from headrace.core.router.fleet import ADAPTER, MODEL
from headrace.server.admin import check_is_local, decision_response
from headrace.server.app import Front, answer_error
from headrace.server.errors import JSON
from headrace.server.exchange import Exchange
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.service import RETRY_AFTER_S, Door


def create_gateway_app(gateway: Gateway) -> Starlette:
    """The gateway is `app.state.service`; it answers once it is `open`."""

    def get(path: str, answer: "partial[Response]") -> Route:
        async def endpoint(request: Request) -> Response:
            return answer(request)

        return Route(path, endpoint, methods=["GET"])

    relay = Relay(gateway)
    app = Starlette(
        routes=[
            *(Route(path, relay, methods=["POST"]) for path in GENERATION),
            get("/v1/models", partial(_models, gateway)),
            get("/v1/models/{id:path}", partial(_model, gateway)),
            get("/admin/decisions/{id:int}", partial(_decision, gateway)),
            get("/health", partial(_health, gateway)),
            get("/ready", partial(_ready, gateway)),
            get("/metrics", partial(_metrics, gateway)),
            get("/version", partial(_version)),
        ],
        exception_handlers={HTTPException: answer_error, HeadraceError: answer_error},
    )
    app.router.redirect_slashes = False
    # In the place of Starlette's outermost layer: the front does what that would.
    app.middleware_stack = Front(Shortcut(app.build_middleware_stack(), relay), gateway.metrics)
    app.state.service = gateway
    return app


class Shortcut:
    """What is passed on goes past the router of Starlette and its layers."""

    def __init__(self, app: ASGIApp, relay: Relay) -> None:
        self._app = app
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_hot = scope["type"] == "http" and scope["method"] == "POST"
        if not (is_hot and scope["path"] in GENERATION):
            await self._app(scope, receive, send)
            return
        try:
            await self._relay(scope, receive, send)
        except HeadraceError as error:
            if Exchange.of(scope).status:
                raise  # of an answer that has begun, nothing else can be said
            response = await answer_error(Request(scope), error)
            await response(scope, receive, send)


def _models(gateway: Gateway, request: Request) -> Response:
    return _json({"object": "list", "data": gateway.cards()})


def _model(gateway: Gateway, request: Request) -> Response:
    name = request.path_params["id"]
    card = gateway.card(name)
    if card is None:
        raise RequestError(
            "no such model", status_hint=404, code="model_not_found", model=name[:100]
        )
    return _json(card)


def _decision(gateway: Gateway, request: Request) -> Response:
    check_is_local(request)
    decision = gateway.switch.router.decision(request.path_params["id"])
    if decision is not None:
        decision = msgspec.structs.replace(
            decision, filtered=tuple(map(_as_of_engines, decision.filtered))
        )
    return decision_response(decision)


def _as_of_engines(filtered: Filtered) -> Filtered:
    """To the router a model of an engine is what an adapter is to a worker: see Engine.come_up."""
    if filtered.reason != ADAPTER:
        return filtered
    return msgspec.structs.replace(filtered, reason=MODEL)


def _health(gateway: Gateway, request: Request) -> Response:
    """Whether the process should live on: engines come and go."""
    return _json({"status": gateway.door}, 503 if gateway.door is Door.FAILED else 200)


def _ready(gateway: Gateway, request: Request) -> Response:
    """Whether a request may come now: some engine is up."""
    states = {one.name: one.reason or "up" for one in gateway.engines}
    is_open = gateway.door is Door.OPEN
    told: dict[str, object] = {"status": gateway.door, "engines": states}
    if gateway.door is Door.WAITING:
        told["detail"] = "no engine is up; requests wait for one, then they are refused"
    response = _json(told, 200 if is_open else 503)
    if not is_open:
        response.headers["retry-after"] = str(round(RETRY_AFTER_S))
    return response


def _metrics(gateway: Gateway, request: Request) -> Response:
    return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)


def _version(request: Request) -> Response:
    return _json({"version": headrace.__version__})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
