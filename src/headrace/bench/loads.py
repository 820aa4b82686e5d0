"""The standard loads, and the figures that a run of one gives.

Decides what is offered, when, and how it is counted; refuses to know which server answers.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.bench.client import Answer, complete, connect
from headrace.bench.prompts import PromptWriter
from headrace.core.base.errors import HeadraceError
from headrace.core.base.metrics import per_second, percentile
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns

if TYPE_CHECKING:
    import aiohttp


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy completions that ignore the end of text, all at once or one after another."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int  # two or more, for there to be a time between tokens
    num_shared_tokens: int = 0  # first tokens of the prompt that all requests have in common
    num_warmups: int = 0  # requests of the same kind that come before and are not counted
    at_once: bool = False


LOADS = {
    load.name: load
    for load in (
        Load(
            name="single",
            num_requests=3,
            num_prompt_tokens=512,
            num_output_tokens=128,
            num_warmups=1,
        ),
        Load(
            name="batch",
            num_requests=32,
            num_prompt_tokens=256,
            num_output_tokens=128,
            at_once=True,
        ),
        # The warm-up computes the prefix.
        Load(
            name="shared",
            num_requests=32,
            num_prompt_tokens=1056,
            num_output_tokens=32,
            num_shared_tokens=1024,
            num_warmups=1,
            at_once=True,
        ),
        Load(
            name="shared_cold",
            num_requests=32,
            num_prompt_tokens=1056,
            num_output_tokens=32,
            num_shared_tokens=1024,
            at_once=True,
        ),
        Load(
            name="prefill",
            num_requests=3,
            num_prompt_tokens=2048,
            num_output_tokens=2,
            num_warmups=1,
        ),
    )
}


class Spread(msgspec.Struct, frozen=True):
    p50: float
    mean: float
    p99: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        """Of at least one value."""
        ordered = sorted(values)
        return Spread(percentile(ordered, 0.5), fmean(ordered), percentile(ordered, 0.99))

    def beyond(self, other: "Spread") -> "Spread":
        """What this one has more, figure by figure."""
        return Spread(self.p50 - other.p50, self.mean - other.mean, self.p99 - other.p99)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one load saw. Warm-ups are not in it."""

    load: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    wall_s: float  # first request sent to last token received
    output_tokens_per_s: float
    prefill_tokens_per_s: float  # prompt tokens of one request by its median TTFT
    ttft_ms: Spread
    tpot_ms: Spread

    @staticmethod
    def of(load: Load, answers: Sequence[Answer]) -> "LoadReport":
        wall_ns = Ns(max(a.last_token_ns for a in answers) - min(a.sent_ns for a in answers))
        num_output_tokens = sum(a.num_output_tokens for a in answers)
        ttft_ms = Spread.of(a.ttft_ns / NS_PER_MS for a in answers)
        return LoadReport(
            load=load.name,
            num_requests=len(answers),
            num_prompt_tokens=len(answers) * load.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=sum(a.num_cached_tokens for a in answers),
            wall_s=wall_ns / NS_PER_S,
            output_tokens_per_s=per_second(num_output_tokens, wall_ns),
            prefill_tokens_per_s=1e3 * load.num_prompt_tokens / ttft_ms.p50,
            ttft_ms=ttft_ms,
            tpot_ms=Spread.of(a.tpot_ns / NS_PER_MS for a in answers if a.tpot_ns is not None),
        )


class LoadFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A load that a server did not get through, of which there are no figures."""

    url: str
    model: str
    load: str
    reason: str


class Target(msgspec.Struct, frozen=True):
    """A server of the OpenAI completions endpoint; `extra` goes into every request."""

    url: str
    model: str
    extra: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"ignore_eos": True})


def prompts_of(load: Load, writer: PromptWriter) -> list[str]:
    """One prompt for each warm-up and request. They are the load's own: whatever comes before it
    leaves nothing of them in a cache.
    """

    def write(num_tokens: int, after: str = "") -> str:
        return writer.write(num_tokens, after=after, topic=load.name)

    shared = write(load.num_shared_tokens) if load.num_shared_tokens else ""
    count = load.num_warmups + load.num_requests
    return [write(load.num_prompt_tokens, shared) for _ in range(count)]


async def run_load(target: Target, load: Load, prompts: Sequence[str]) -> LoadReport:
    """Offer `load` and report it. HeadraceError when the server counts other tokens than asked.

    Where streams have no counts, it must have ended for its length, and prompts are taken to have
    as many tokens as they were written with.
    """

    async def ask(session: "aiohttp.ClientSession", prompt: str) -> Answer:
        body = {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": load.num_output_tokens,
            "temperature": 0,
            **target.extra,
        }
        answer = await complete(session, target.url, body)
        num_prompt_tokens = (
            answer.num_prompt_tokens if answer.is_counted else load.num_prompt_tokens
        )
        counted = (num_prompt_tokens, answer.num_output_tokens)
        if counted != (load.num_prompt_tokens, load.num_output_tokens):
            raise HeadraceError(
                "the server counts other tokens than the load asks",
                counted=counted,
                asked=(load.num_prompt_tokens, load.num_output_tokens),
                hint="name the server's tokenizer, and what makes it ignore the end of text",
            )
        return answer

    async with connect() as session:
        for prompt in prompts[: load.num_warmups]:
            await ask(session, prompt)
        measured = prompts[load.num_warmups :]
        if load.at_once:
            answers = await asyncio.gather(*(ask(session, prompt) for prompt in measured))
        else:
            answers = [await ask(session, prompt) for prompt in measured]
    return LoadReport.of(load, answers)


WARM_UP = Load(
    name="warm-up", num_requests=4, num_prompt_tokens=256, num_output_tokens=16, at_once=True
)


async def try_load(
    target: Target, load: Load, prompts: Sequence[str], timeout_s: float
) -> LoadReport | LoadFailure:
    """As `run_load`, within so many seconds, warm-ups included; then its connections are closed."""
    try:
        async with asyncio.timeout(timeout_s):
            return await run_load(target, load, prompts)
    except TimeoutError:
        reason = f"did not end within {timeout_s:g} s"
    except HeadraceError as error:
        reason = str(error)
    return LoadFailure(url=target.url, model=target.model, load=load.name, reason=reason)


async def warm_up(target: Target, writer: PromptWriter) -> None:
    """A little of everything, so that no load pays for the first touch of code and memory."""
    await run_load(target, WARM_UP, prompts_of(WARM_UP, writer))
