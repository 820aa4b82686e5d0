"""Requests of a workload as requests of the API, and answers as outcomes."""

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.bench.client import Stream, StreamError, now, read_answer
from headrace.bench.serve.asked import CHAT, PATHS, Target
from headrace.bench.serve.outcome import Outcome
from headrace.bench.serve.wording import Wording
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns

if TYPE_CHECKING:
    import aiohttp


class Asker:
    """Asks one server. `begin_ns` is where the run's times count from."""

    def __init__(
        self, session: "aiohttp.ClientSession", target: Target, wording: Wording, begin_ns: Ns
    ) -> None:
        self._session = session
        self._target = target
        self._wording = wording
        self._begin_ns = begin_ns
        self._url = target.url + PATHS[target.endpoint]
        self._headers = target.headers

    def now(self) -> Ns:
        return Ns(now() - self._begin_ns)

    def payload(self, spec: SeqSpec) -> bytes:
        """Made before the request is due: a long prompt takes a millisecond."""
        target, tokens = self._target, spec.prompt_tokens
        prompt: dict[str, Any] = (
            {"messages": self._wording.messages(tokens)}
            if target.endpoint == CHAT
            else {"prompt": self._wording.text(tokens)}
        )
        usage = {"stream_options": {"include_usage": True}} if target.asks_usage else {}
        asked = {"model": target.model, "temperature": 0, "max_tokens": spec.params.max_tokens}
        return msgspec.json.encode(
            {**asked, **target.extra_body, **prompt, "stream": True, **usage}
        )

    async def ask(self, spec: SeqSpec, payload: bytes, due_ns: Ns) -> tuple[Outcome, str]:
        """The outcome and the answer's text. A failure is an outcome too."""
        stream, fault, detail = Stream(), "", ""
        try:
            await read_answer(self._session, self._url, payload, stream, self._headers)
        except StreamError as error:
            fault, detail = error.kind, str(error)
        usage, begin_ns = stream.usage, self._begin_ns
        outcome = Outcome(
            request_id=spec.request_id,
            due_ns=due_ns,
            sent_ns=Ns(stream.sent_ns - begin_ns),
            ended_ns=self.now(),
            token_times_ns=array("q", [at_ns - begin_ns for at_ns in stream.token_times_ns]),
            fault=fault,
            detail=detail,
            asked_prompt_tokens=len(spec.prompt_tokens),
            asked_output_tokens=spec.params.max_tokens,
            num_prompt_tokens=usage.prompt_tokens if usage else None,
            num_usage_tokens=usage.completion_tokens if usage else None,
            num_cached_tokens=usage.cached_tokens if usage else None,
        )
        return outcome.checked(), "".join(stream.texts)
