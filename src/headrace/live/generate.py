"""TextEngine: requests in, text out, over an Engine.

A request of n choices is n sequences that arrive together and share their prompt's blocks. Tokens
become text on the reader's side (the event loop, or the calling thread), so the engine thread never
waits for text.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, ref

import msgspec

from headrace.core.base.errors import HeadraceError, OverloadError, RequestError
from headrace.core.base.events import Admitted, Emit, EngineEffect, Finish, Reject
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.live.bounds import check_request, resolve_params
from headrace.live.choice import Choice, ChoiceDelta
from headrace.live.choice import ChoiceFinish as ChoiceFinish
from headrace.live.listeners import RETRY_AFTER_S
from headrace.live.outbox import AsyncInbox, Outbox
from headrace.live.port import Engine
from headrace.models.text.detokenizer import Detokenizer
from headrace.models.text.stops import StopMatcher
from headrace.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request in tokens. Times are those of the monotonic clock."""

    request_id: str
    prompt_tokens: Sequence[int]
    params: SamplingParams
    n: int = 1
    stop: Sequence[str] = ()
    include_stop: bool = False  # stop strings and stop tokens stay in the text
    skip_special_tokens: bool = True
    priority: int = 0  # lower runs earlier
    salt: str = ""
    session: str = ""
    tenant: str = ""
    slo: Slo = field(default_factory=Slo)
    deadline_ns: Ns | None = None
    arrived_ns: Ns = field(default_factory=lambda: Ns(time.monotonic_ns()))
    # False: nobody asked for params.max_tokens, so it is cut to what fits instead of being refused.
    is_max_tokens_explicit: bool = True


Recipient = TypeVar("Recipient")


class _Flushable(Protocol):
    def flush(self) -> None: ...


class TextEngine:
    """Streams of text. Thread-safe; any number of event loops and threads may read at once."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._lock = threading.Lock()  # over _loops
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopOutbox] = WeakKeyDictionary()
        self._unsent: list[_Flushable] = []  # of whoever says the engine's words
        engine.after_words(self._flush)

    def speak_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Streams are read in this loop, as a rule; so the engine may say there what it has to say
        of steps.
        """
        self.engine.speak_in(loop.call_soon_threadsafe)

    def stream(
        self, request: GenerateRequest, offer: "Offer | None" = None
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """The request's deltas, in the running event loop; each choice's last one has a `finish`.

        A delta without one that comes while the iterator waits for it is shown to `offer` first,
        and left out of the iteration where that takes it.

        Raises RequestError at once for a request out of bounds, and RequestError or OverloadError
        before the first delta where the engine refuses. Closing the iterator, or cancelling the
        task that reads it, cancels the sequences at once.
        """
        return self._stream(self._resolve(request), offer)

    async def _stream(
        self, request: GenerateRequest, offer: "Offer | None"
    ) -> AsyncGenerator[ChoiceDelta, None]:
        loop = asyncio.get_running_loop()
        reader = _LoopReader(loop, offer)
        session = reader.session = self._open(request, self._loop_outbox(loop), reader.inbox)
        try:
            while session.is_open:
                for item in await reader.inbox.take():
                    delta = reader.delta_of(item)
                    if delta is not None:
                        yield delta
        finally:
            session.close()

    def stream_sync(self, request: GenerateRequest) -> Generator[ChoiceDelta, None, None]:
        """As `stream`, for a thread that waits."""
        return self._without_index(self.stream_all((request,)))

    @staticmethod
    def _without_index(
        deltas: Generator[tuple[int, ChoiceDelta], None, None],
    ) -> Generator[ChoiceDelta, None, None]:
        with closing(deltas):
            for _, delta in deltas:
                yield delta

    def stream_all(
        self, requests: Iterable[GenerateRequest], *, max_open: int = 1
    ) -> Generator[tuple[int, ChoiceDelta], None, None]:
        """(index of its request, delta) as they come, of many requests of which at most `max_open`
        run at once.

        All requests are checked before the first one starts. One that the engine refuses ends the
        iteration, and the others are cancelled.
        """
        return self._stream_all([self._resolve(request) for request in requests], max_open)

    def _stream_all(
        self, requests: list[GenerateRequest], max_open: int
    ) -> Generator[tuple[int, ChoiceDelta], None, None]:
        batches: queue.SimpleQueue[list[tuple[int, EngineEffect]]] = queue.SimpleQueue()
        outbox = Outbox(batches.put)
        sessions: dict[int, _Session] = {}
        waiting = deque(enumerate(requests))
        try:
            while waiting or sessions:
                while waiting and len(sessions) < max_open:
                    index, request = waiting.popleft()
                    sessions[index] = self._open(request, outbox, index)
                for index, effect in batches.get():
                    session = sessions.get(index)
                    if session is None:
                        continue
                    delta = session.take(effect)
                    if not session.is_open:
                        del sessions[index]
                    if delta is not None:
                        yield index, delta
        finally:
            for session in sessions.values():
                session.close()

    # ---- a request becomes sequences

    def _resolve(self, request: GenerateRequest) -> GenerateRequest:
        """The request within bounds, what was left open filled in."""
        prompt, stops = tuple(request.prompt_tokens), tuple(request.stop)
        check_request(request.n, stops, request.priority, request.slo)
        params = resolve_params(
            prompt,
            request.params,
            is_max_tokens_explicit=request.is_max_tokens_explicit,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )
        return replace(request, prompt_tokens=prompt, stop=stops, params=params)

    def _open(
        self,
        request: GenerateRequest,
        outbox: "Outbox[tuple[Recipient, EngineEffect]]",
        recipient: Recipient,
    ) -> "_Session":
        specs = [
            SeqSpec(
                seq_id=SeqId(seq_id),
                request_id=request.request_id,
                prompt_tokens=tuple(request.prompt_tokens),
                params=msgspec.structs.replace(request.params, choice=index),
                eos_token_ids=self.tokenizer.eos_token_ids,
                salt=request.salt,
                session=request.session,
                tenant=request.tenant,
                priority=request.priority,
                slo=request.slo,
                deadline_ns=request.deadline_ns,
                arrived_ns=request.arrived_ns,
            )
            for index, seq_id in enumerate(self.engine.next_seq_ids(request.n))
        ]
        choices = {spec.seq_id: self._choice(request, spec) for spec in specs}

        def sink(effect: EngineEffect) -> None:
            if outbox.put((recipient, effect)):
                self._unsent.append(outbox)

        session = _Session(self.engine, choices)
        self.engine.submit(specs, sink)
        return session

    def _choice(self, request: GenerateRequest, spec: SeqSpec) -> Choice:
        ends = spec.params.stop_token_ids
        if not spec.params.ignore_eos:
            ends += spec.eos_token_ids
        return Choice(
            spec.params.choice,
            spec.params,
            num_prompt_tokens=len(spec.prompt_tokens),
            hidden_tokens=frozenset(() if request.include_stop else ends),
            detokenizer=Detokenizer(self.tokenizer, skip_special=request.skip_special_tokens),
            stops=StopMatcher(request.stop, include=request.include_stop),
        )

    # ---- from the engine thread to the readers

    def _loop_outbox(self, loop: asyncio.AbstractEventLoop) -> "_LoopOutbox":
        with self._lock:
            outbox = self._loops.get(loop)
            if outbox is None:
                outbox = self._loops[loop] = Outbox(partial(self._wake, ref(loop), deque()))
            return outbox

    def _flush(self) -> None:
        for outbox in self._unsent:
            outbox.flush()
        self._unsent.clear()

    def _wake(
        self,
        loop_ref: "ref[asyncio.AbstractEventLoop]",
        mail: "deque[_Letter]",
        letters: "list[_Letter]",
    ) -> None:
        """`mail` is what the loop has not got yet: later letters never go before earlier ones."""
        mail.extend(letters)
        loop = loop_ref()
        if loop is not None and loop is asyncio._get_running_loop():
            _scatter(mail)
            return
        try:
            if loop is not None:
                loop.call_soon_threadsafe(_scatter, mail)
                return
        except RuntimeError:
            pass  # the loop is closed
        while mail:
            _, effect = mail.popleft()
            if isinstance(effect, Admitted | Emit):
                self.engine.cancel(effect.seq_id)


Offer: TypeAlias = Callable[[ChoiceDelta], bool]
"""Whether it has taken a delta."""
_Word: TypeAlias = EngineEffect | ChoiceDelta | Exception
_Letter: TypeAlias = tuple[AsyncInbox[_Word], EngineEffect]
_LoopOutbox = Outbox[_Letter]


def _scatter(mail: deque[_Letter]) -> None:
    while mail:
        inbox, effect = mail.popleft()
        inbox.put(effect)


class _LoopReader:
    """Where one stream's words come to, in a loop; they become deltas as they come, if somebody
    takes these at once.
    """

    session: "_Session"

    def __init__(self, loop: asyncio.AbstractEventLoop, offer: Offer | None) -> None:
        self._offer = offer
        self.inbox: AsyncInbox[_Word] = AsyncInbox(loop, *(() if offer is None else (self._look,)))

    def _look(self, word: _Word) -> _Word | None:
        assert self._offer is not None
        if not isinstance(word, Emit):
            return word
        try:
            delta = self.session.take(word)
            if delta is None or (delta.finish is None and self._offer(delta)):
                return None
        except Exception as error:  # for whoever reads, and for nobody else in this turn
            return error
        return delta

    def delta_of(self, word: _Word) -> ChoiceDelta | None:
        if isinstance(word, ChoiceDelta):
            return word
        if isinstance(word, Exception):
            raise word
        return self.session.take(word)


class _Session:
    """A request that runs: which of its choices have not ended."""

    def __init__(self, engine: Engine, choices: dict[SeqId, Choice]) -> None:
        self._engine = engine
        self._choices = choices

    @property
    def is_open(self) -> bool:
        return bool(self._choices)

    def take(self, effect: EngineEffect) -> ChoiceDelta | None:
        """What one word of the engine means to the reader. Words about a choice that has ended mean
        nothing.
        """
        match effect:
            case Emit(seq_id) if seq_id in self._choices:
                delta = self._choices[seq_id].emit(effect)
                if delta is not None and delta.finish is not None:
                    del self._choices[seq_id]
                    self._engine.cancel(seq_id, delta.finish.reason)
                return delta
            case Reject():
                self.close()
                raise _refusal(effect)
            case Admitted(seq_id, num_cached_tokens) if seq_id in self._choices:
                self._choices[seq_id].admit(num_cached_tokens)
            case Finish(seq_id) if seq_id in self._choices:
                return self._choices.pop(seq_id).finish(effect)
        return None

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        for seq_id in self._choices:
            self._engine.cancel(seq_id)
        self._choices = {}


def _refusal(words: Reject) -> HeadraceError:
    if words.retry_after_s is None and words.status_hint not in (429, 503):
        return RequestError(
            words.message, status_hint=words.status_hint, code=words.code, hint=words.hint
        )
    return OverloadError(
        words.message,
        retry_after_s=RETRY_AFTER_S if words.retry_after_s is None else words.retry_after_s,
        status_hint=words.status_hint,
        hint=words.hint,
    )
