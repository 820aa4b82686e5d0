"""The ASGI application: routes, and the front that names, answers and logs every request."""

import logging
from functools import partial
from typing import Protocol

import msgspec
from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import headrace
from headrace.core.base.errors import HeadraceError
from headrace.core.config.schema import ServerConfig
from headrace.core.config.telemetry import TelemetryConfig
from headrace.live.traffic import TrafficRecorder
from headrace.server.admin import (
    change_role,
    check_is_local,
    decision_response,
    workers_response,
)
from headrace.server.endpoints import ChatEndpoint, CompletionEndpoint
from headrace.server.errors import JSON, ClientGone, failure_of
from headrace.server.exchange import CLIENT_GONE, Exchange
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.service import RETRY_AFTER_S, Answerer, Door, Served, Service
from headrace.server.wire import ModelCard, ModelList

_log = logging.getLogger(__name__)


def create_app(
    model: Answerer | None,
    config: ServerConfig,
    *,
    telemetry: TelemetryConfig | None = None,
    recorder: TrafficRecorder | None = None,
) -> Starlette:
    """The application over a running engine, which stays the caller's to close, as `recorder` does.

    With None the door stays shut (`/ready` says loading) until `app.state.service.attach(model)`.
    """
    service = Service(config, telemetry or TelemetryConfig(), recorder)
    if model is not None:
        service.attach(model)
    app = Starlette(
        routes=_routes(service),
        middleware=[Middleware(Front, metrics=service.metrics)],
        exception_handlers={HTTPException: answer_error, HeadraceError: answer_error},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


class HttpMetrics(Protocol):
    """What is counted of every request."""

    @property
    def http_in_flight(self) -> Gauge: ...

    def count_http(self, method: str, path: str, status: int) -> None: ...


class Front:
    """Outermost: every request gets an id, an answer whatever went wrong, a log line and its place
    in the counts.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._num_in_flight = 0
        metrics.http_in_flight.set_function(lambda: self._num_in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.begin(scope)
        send = exchange.sender(send)
        self._num_in_flight += 1
        try:
            await self._app(scope, receive, send)
        except ClientGone:
            exchange.status = CLIENT_GONE
        except Exception as error:
            _log.exception("request %s failed", exchange.request_id)
            exchange.error = f"{type(error).__name__}: {error}"
            if exchange.status == 0:
                await failure_of(error).response()(scope, receive, send)
            else:
                exchange.abort()
        finally:
            self._num_in_flight -= 1
            self._metrics.count_http(scope["method"], scope["path"], exchange.status)
            exchange.log()


async def answer_error(request: Request, error: Exception) -> Response:
    """What a client is told of an error that nobody else answers."""
    exchange = Exchange.of(request.scope)
    exchange.error = f"{type(error).__name__}: {error}"
    return failure_of(error).response()


def _routes(service: Service) -> list[Route]:
    def get(path: str, answer: "partial[Response]") -> Route:
        async def endpoint(request: Request) -> Response:
            return answer(request)

        return Route(path, endpoint, methods=["GET"])

    return [
        Route("/v1/chat/completions", ChatEndpoint(service), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(service), methods=["POST"]),
        get("/v1/models", partial(_models, service)),
        get("/v1/models/{id:path}", partial(_model, service)),
        get("/admin/decisions/{id}", partial(_decision, service)),
        get("/admin/workers", partial(_workers, service)),
        Route("/admin/workers/{id}/role", partial(_change_role, service), methods=["POST"]),
        get("/health", partial(_health, service)),
        get("/ready", partial(_ready, service)),
        get("/metrics", partial(_metrics, service)),
        get("/version", partial(_version)),
    ]


def _models(service: Service, request: Request) -> Response:
    return _json(ModelList(data=[_card(service.enter())]))


def _model(service: Service, request: Request) -> Response:
    name = request.path_params["id"]
    if not name:
        raise HTTPException(404)
    return _json(_card(service.model(name)))


def _decision(service: Service, request: Request) -> Response:
    """Of a request to one of several workers, by the id of its answer."""
    check_is_local(request)
    engine = service.enter().text_engine.engine
    return decision_response(engine.decision(request.path_params["id"]))


def _workers(service: Service, request: Request) -> Response:
    check_is_local(request)
    return workers_response(service.enter().text_engine.engine.workers())


async def _change_role(service: Service, request: Request) -> Response:
    check_is_local(request)
    return await change_role(request, service.enter().text_engine.engine)


def _health(service: Service, request: Request) -> Response:
    """Whether the process should live on."""
    return _json({"status": service.door}, 503 if service.door is Door.FAILED else 200)


def _ready(service: Service, request: Request) -> Response:
    """Whether a request that comes now is computed soon."""
    door, detail = service.readiness()
    if door is Door.OPEN:
        return _json({"status": door})
    status: dict[str, str] = {"status": door}
    if detail:
        status["detail"] = detail
    response = _json(status, 503)
    response.headers["retry-after"] = str(round(RETRY_AFTER_S))
    return response


def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


def _version(request: Request) -> Response:
    return _json({"version": headrace.__version__})


def _card(served: Served) -> ModelCard:
    return ModelCard(
        id=served.name,
        created=served.created_s,
        root=served.name,
        max_model_len=served.text_engine.max_model_len,
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
