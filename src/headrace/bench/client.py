"""One streamed completion, timed as its client sees it.

Decides which moment is called what; refuses to know who serves.
"""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from headrace.core.base.errors import HeadraceError


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds of one monotonic clock; counts are the server's own usage figures."""

    sent_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first one."""
        return (self.last_token_s - self.first_token_s) / max(self.num_output_tokens - 1, 1)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data)
    raise HeadraceError("stream ended before [DONE]")


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
) -> Answer:
    """Send `body` to /v1/completions and read the stream to its end. Failures are HeadraceError."""
    sent_s = time.perf_counter()
    first_token_s = last_token_s = 0.0
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
            for choice in event.get("choices", ()):
                # The last event may carry nothing but the reason of the end.
                if choice.get("text") or choice.get("finish_reason") is None:
                    last_token_s = time.perf_counter()
                    first_token_s = first_token_s or last_token_s
    if not usage or not first_token_s:
        raise HeadraceError("stream had no usage or no token", usage=usage)
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        sent_s=sent_s,
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        num_prompt_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        num_cached_tokens=details.get("cached_tokens") or 0,
    )
