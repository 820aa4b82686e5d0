"""One streamed completion, timed as its client sees it.

Decides which moment is called what; refuses to know who serves.
"""

import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.core.base.metrics import e2e_ns, tpot_ns, ttft_ns
from headrace.core.base.types import Ns

if TYPE_CHECKING:
    import aiohttp

REQUEST_TIMEOUT_S = 1200.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Times are those of one monotonic clock; counts are the server's own usage figures."""

    sent_ns: Ns
    first_token_ns: Ns
    last_token_ns: Ns
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def ttft_ns(self) -> Ns:
        return ttft_ns(self.sent_ns, self.first_token_ns)

    @property
    def tpot_ns(self) -> float | None:
        e2e = e2e_ns(self.sent_ns, self.last_token_ns)
        return tpot_ns(e2e, self.ttft_ns, self.num_output_tokens)


def now() -> Ns:
    return Ns(time.perf_counter_ns())


def connect() -> "aiohttp.ClientSession":
    """A session with a connection for each request: clients do not know each other. ConfigError
    where the client's library is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            f"the load client is not installed: {error}",
            hint="pip install '.[bench]' in headrace's checkout",
        ) from error
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def events(response: "aiohttp.ClientResponse") -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data)
    raise HeadraceError("stream ended before [DONE]")


async def complete(
    session: "aiohttp.ClientSession",
    url: str,
    body: Mapping[str, Any],
) -> Answer:
    """Send `body` to /v1/completions and read the stream to its end. Failures are HeadraceError."""
    sent_ns = now()
    token_times_ns: list[Ns] = []
    usage: dict[str, Any] = {}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=asked) as response:
        if response.status != 200:
            text = (await response.text())[:500]
            raise HeadraceError("server refused", status=response.status, body=text)
        async for event in events(response):
            if "error" in event:
                raise HeadraceError("server failed", error=event["error"])
            usage = event.get("usage") or usage
            # The last event may carry nothing but the reason of the end.
            token_times_ns += [
                now()
                for choice in event.get("choices", ())
                if choice.get("text") or choice.get("finish_reason") is None
            ]
    if not usage or not token_times_ns:
        raise HeadraceError("stream had no usage or no token", usage=usage)
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        sent_ns=sent_ns,
        first_token_ns=token_times_ns[0],
        last_token_ns=token_times_ns[-1],
        num_prompt_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        num_cached_tokens=details.get("cached_tokens") or 0,
    )
