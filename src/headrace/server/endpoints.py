"""The two routes that generate. Each is one straight line: body, checks, prompts, engine, bytes."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.base.errors import RequestError
from headrace.core.base.request import Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns
from headrace.live.generate import GenerateRequest
from headrace.server import params, sse
from headrace.server.answer import Answer, answer_for
from headrace.server.body import decode_body, read_body
from headrace.server.callers import session_of
from headrace.server.chat import ChatStream, ChatWhole
from headrace.server.completions import CompletionStream, CompletionWhole
from headrace.server.delivery import Delivery
from headrace.server.errors import JSON, ClientGone
from headrace.server.exchange import CLIENT_GONE, Exchange, until_gone
from headrace.server.generation import write
from headrace.server.prompts import check_messages, prompt_forms
from headrace.server.service import Served, Service
from headrace.server.wire import ChatRequest, CompletionRequest, GenerationRequest

Result = TypeVar("Result")


class ChatEndpoint:
    """POST /v1/chat/completions, as an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, exchange = self._service, Exchange.of(scope)
        service.enter()
        body = await read_body(exchange.headers, receive, service.config.max_body_bytes)
        request, exchange.ignored_fields = decode_body(body, ChatRequest)
        served = service.model(request.model)
        params.check_common(request, 1, service.config)
        params.check_chat(request, service.config)
        check_messages(request.messages)
        source = self._source(exchange, request, served, params.slo_of(exchange.headers))
        await deliver(service, exchange, request, source, receive, send)

    async def _source(
        self, exchange: Exchange, request: ChatRequest, served: Served, slo: Slo
    ) -> AsyncGenerator[bytes, None]:
        try:
            prompts = [await served.prompts.of_chat(request)]
        except RequestError as error:
            raise _named_as_in_chat(error, request) from None
        answer = answer_for(
            request,
            served,
            prompts,
            prefix="chatcmpl",
            show_logprobs=bool(request.logprobs),
        )
        exchange.tally = answer.tally
        asked = request.max_completion_tokens
        asked = request.max_tokens if asked is None else asked
        sampling = params.sampling_params(
            request,
            max_tokens=served.text_engine.max_model_len if asked is None else asked,
            logprobs=params.chat_logprobs(request),
            prompt_logprobs=request.prompt_logprobs,
        )
        requests = engine_requests(
            self._service, exchange, request, answer, sampling, slo, is_explicit=asked is not None
        )
        writer = ChatStream(answer) if request.stream else ChatWhole(answer)
        chunks = write(served.text_engine, requests, answer.tally, writer, outlet=exchange.outlet)
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    yield chunk
            except RequestError as error:
                raise _named_as_in_chat(error, request) from None


class CompletionEndpoint:
    """POST /v1/completions, as an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, exchange = self._service, Exchange.of(scope)
        service.enter()
        body = await read_body(exchange.headers, receive, service.config.max_body_bytes)
        request, exchange.ignored_fields = decode_body(body, CompletionRequest)
        served = service.model(request.model)
        given = prompt_forms(request)
        params.check_common(request, len(given), service.config)
        params.check_completion(request, service.config)
        source = self._source(exchange, request, given, served, params.slo_of(exchange.headers))
        await deliver(service, exchange, request, source, receive, send)

    async def _source(
        self,
        exchange: Exchange,
        request: CompletionRequest,
        given: list[str | list[int]],
        served: Served,
        slo: Slo,
    ) -> AsyncGenerator[bytes, None]:
        prompts = await served.prompts.of_completion(given)
        answer = answer_for(
            request,
            served,
            prompts,
            prefix="cmpl",
            show_logprobs=request.logprobs is not None,
            echo=bool(request.echo),
        )
        exchange.tally = answer.tally
        asked = request.max_tokens
        sampling = params.sampling_params(
            request,
            max_tokens=params.DEFAULT_COMPLETION_TOKENS if asked is None else asked or 1,
            logprobs=request.logprobs,
            prompt_logprobs=params.completion_prompt_logprobs(request),
        )
        requests = engine_requests(
            self._service, exchange, request, answer, sampling, slo, is_explicit=asked is not None
        )
        writer = CompletionStream(answer) if request.stream else CompletionWhole(answer)
        chunks = write(
            served.text_engine,
            requests,
            answer.tally,
            writer,
            outlet=exchange.outlet,
            discard_output=asked == 0,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk


def _named_as_in_chat(error: RequestError, request: ChatRequest) -> RequestError:
    """The engine names the fields of a completion; a chat has other names for two of them."""
    if error.param == "prompt":
        error.param = "messages"
    elif error.param == "max_tokens" and request.max_completion_tokens is not None:
        error.param = "max_completion_tokens"
    return error


def engine_requests(
    service: Service,
    exchange: Exchange,
    request: GenerationRequest,
    answer: Answer,
    sampling: SamplingParams,
    slo: Slo,
    *,
    is_explicit: bool,
) -> Sequence[GenerateRequest]:
    """One request of the engine for each prompt."""
    timeout_ns = int(service.config.request_timeout_s * NS_PER_S)
    ids = [answer.id]
    if len(answer.prompts) > 1:
        ids = [f"{answer.id}-{index}" for index in range(len(answer.prompts))]
    exchange.engine_ids = ids
    session = session_of(exchange.headers, request.prompt_cache_key, request.user)
    tenant = service.tenants.of(exchange.headers, request.cache_salt or "")
    exchange.find_decision = answer.served.text_engine.engine.decision
    return [
        GenerateRequest(
            request_id=request_id,
            prompt_tokens=prompt.tokens,
            params=sampling,
            n=answer.num_choices,
            stop=params.stops(request),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=answer.skip_special,
            priority=request.priority or 0,
            salt=request.cache_salt or "",
            session=session,
            tenant=tenant,
            slo=slo,
            deadline_ns=Ns(exchange.arrived_ns + timeout_ns),
            arrived_ns=Ns(exchange.arrived_ns),
            is_max_tokens_explicit=is_explicit,
        )
        for request_id, prompt in zip(ids, answer.prompts, strict=True)
    ]


async def deliver(
    service: Service,
    exchange: Exchange,
    request: GenerationRequest,
    source: AsyncGenerator[bytes, None],
    receive: Receive,
    send: Send,
) -> None:
    """Send what the source makes, as it comes or whole; whatever happens, the source has ended by
    the end.

    The status is decided by the first bytes: until they come, or the first keep-alive is due, an
    error is an HTTP error.
    """
    is_stream = bool(request.stream)
    exchange.is_stream = is_stream
    delivery = Delivery(
        source,
        limit_bytes=service.config.stream_buffer_bytes if is_stream else None,
        error_bytes=sse.error_event,
        cut=exchange.abort,
    )
    if is_stream:
        exchange.outlet = delivery  # before the source begins, which runs in a task
    service.begin(delivery)
    try:
        if is_stream:
            await _unless_gone(receive, delivery.first(sse.KEEP_ALIVE_S))
            delivery.commit()
            pipe = sse.pipe_of(exchange)
            if pipe is not None:
                await _unless_gone(receive, sse.push_stream(delivery, pipe, send))
            else:
                await sse.stream_response(delivery)(exchange.scope, receive, send)
            if not delivery.is_done:
                exchange.status = CLIENT_GONE
        else:
            body = await _unless_gone(receive, delivery.whole())
            await Response(body, media_type=JSON)(exchange.scope, receive, send)
    finally:
        if delivery.error is not None:
            exchange.note_error(delivery.error)
        await service.end(delivery, exchange.engine_ids)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work comes to; ClientGone, and the work cancelled, where the client leaves first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))
