"""One streamed answer, timed as its client sees it.

Decides which moment is called what; refuses to know who serves.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.core.base.metrics import e2e_ns, tpot_ns, ttft_ns
from headrace.core.base.types import Ns

if TYPE_CHECKING:
    import aiohttp

REQUEST_TIMEOUT_S = 1200.0
_JSON = {"content-type": "application/json"}
KEEP_ALIVE_S = 3.0  # shorter than any server's, so that none closes what is about to be used


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Times are those of one monotonic clock; counts are the server's own usage figures."""

    sent_ns: Ns
    first_token_ns: Ns
    last_token_ns: Ns
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    # False = its stream states none: the prompt's are 0, and its own are those that were asked for.
    is_counted: bool = True

    @property
    def ttft_ns(self) -> Ns:
        return ttft_ns(self.sent_ns, self.first_token_ns)

    @property
    def tpot_ns(self) -> float | None:
        e2e = e2e_ns(self.sent_ns, self.last_token_ns)
        return tpot_ns(e2e, self.ttft_ns, self.num_output_tokens)


def now() -> Ns:
    return Ns(time.perf_counter_ns())


def connect(
    *, timeout_s: float = REQUEST_TIMEOUT_S, is_reused: bool = False
) -> "aiohttp.ClientSession":
    """A session whose requests have each a connection of their own, since clients do not know each
    other, or else reuse those that are idle. ConfigError where the client's library is not
    installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            f"the load client is not installed: {error}",
            hint="pip install '.[bench]' in headrace's checkout",
        ) from error
    kept = {"keepalive_timeout": KEEP_ALIVE_S} if is_reused else {"force_close": True}
    connector = aiohttp.TCPConnector(limit=0, **kept)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    )


class StreamError(HeadraceError):
    """An answer that is none; `kind` is one of few, for counting."""

    def __init__(self, kind: str, message: str, **data: object) -> None:
        super().__init__(message, hint="", **data)
        self.kind = kind


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server states them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return (
            None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens
        )


class _Delta(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_token(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """A token may have no text of its own, as half a character has none. The event that begins
        a chat has none either, but tells the role; the last one may tell the reason only.
        """
        if self.text or (self.delta is not None and self.delta.has_token):
            return True
        return self.finish_reason is None and (self.delta is None or self.delta.role is None)


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Stream:
    """What has come of one answer so far. An error leaves it as it is."""

    __slots__ = ("finish_reason", "is_done", "sent_ns", "texts", "token_times_ns", "usage")

    def __init__(self) -> None:
        self.sent_ns = Ns(0)
        self.token_times_ns: list[Ns] = []  # of events with tokens; one may carry several
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.is_done = False  # [DONE] came
        self.usage: Usage | None = None

    def take(self, data: bytes, at_ns: Ns) -> None:
        """One event. Raises StreamError."""
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            raise StreamError("not understood", f"an event is not OpenAI's: {error}") from error
        if event.error is not None:
            raise StreamError("server failed", "server failed", error=event.error)
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            if choice.has_token:
                self.token_times_ns.append(at_ns)
                text = choice.text or (choice.delta and choice.delta.content)
                if text:
                    self.texts.append(text)
            self.finish_reason = choice.finish_reason or self.finish_reason


async def read_answer(
    session: "aiohttp.ClientSession",
    url: str,
    payload: bytes,
    stream: Stream,
    headers: Mapping[str, str] = _JSON,
) -> None:
    """Send `payload` to `url` and read the stream up to [DONE]. Raises StreamError."""
    import aiohttp

    stream.sent_ns = now()
    try:
        async with session.post(
            url, data=payload, headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                kind = f"status {response.status}"
                raise StreamError(kind, "server refused", status=response.status, body=text)
            await _read_events(response, stream)
    except TimeoutError:
        raise StreamError("timed out", "no whole answer in time") from None
    except aiohttp.ClientConnectorError as error:
        raise StreamError("no connection", f"no connection: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        if not stream.is_done:
            raise StreamError("broken off", f"answer broke off: {error}") from None


async def _read_events(response: "aiohttp.ClientResponse", stream: Stream) -> None:
    """To the end of the body, by which the connection is free for another request."""
    rest = b""
    async for piece in response.content.iter_any():
        at_ns = now()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not stream.is_done:
                data = line[5:].strip()
                if data == b"[DONE]":
                    stream.is_done = True
                else:
                    stream.take(data, at_ns)
    if not stream.is_done:
        raise StreamError("broken off", "stream ended before [DONE]")


async def complete(
    session: "aiohttp.ClientSession",
    url: str,
    body: Mapping[str, Any],
) -> Answer:
    """Send `body` to /v1/completions and read the stream to its end. Failures are HeadraceError."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    stream = Stream()
    await read_answer(session, f"{url}/v1/completions", msgspec.json.encode(asked), stream)
    usage, times = stream.usage, stream.token_times_ns
    if not times:
        raise HeadraceError("stream had no token", usage=usage)
    is_counted = usage is not None
    if usage is None:
        if stream.finish_reason != "length":
            raise HeadraceError(
                "stream had no usage, and did not end for its length", reason=stream.finish_reason
            )
        usage = Usage(completion_tokens=body["max_tokens"])
    return Answer(
        sent_ns=stream.sent_ns,
        first_token_ns=times[0],
        last_token_ns=times[-1],
        num_prompt_tokens=usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens,
        num_cached_tokens=usage.cached_tokens or 0,
        is_counted=is_counted,
    )
