"""Requests under way: what their readers have heard, so that any worker can go on from there.

Decides what a reader hears of a worker's words, and what a router is told of the request; refuses
to choose a worker. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Admitted,
    Cancel,
    Computed,
    Emit,
    EndLease,
    Expect,
    Finish,
    Preempted,
    Reject,
)
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.kv.names import BlockChain, root_name
from headrace.core.router.decision import Decision
from headrace.core.router.events import RouteReject, RouteRequest

Said = Admitted | Emit | Preempted | Finish | Reject  # what readers hear
Word = Said | Computed  # what workers say


@dataclass(slots=True)
class _Part:
    """One sequence: what its reader has heard."""

    spec: SeqSpec
    output: list[int] = field(default_factory=list)
    num_scores: int = 0  # log probabilities of prompt tokens
    num_known_scores: int = 0  # that this worker will tell again
    is_admitted: bool = False
    is_prefilled: bool = False  # it has its first token, and is to go on elsewhere
    is_lent: bool = False  # its prompt's KV is held for whoever decodes it, who has not come yet
    num_cached_tokens: int | None = None  # at its first admission anywhere
    ending: FinishReason | None = None  # cancelled; its worker has been told

    @property
    def is_complete(self) -> bool:
        return len(self.output) >= self.spec.params.max_tokens

    @property
    def has_told(self) -> bool:
        """Whether its reader has a part of the answer, and so can no longer be refused."""
        return bool(self.output or self.num_scores)


class Flight:
    """A request and its sequences that have not ended. It runs on at most one worker at a time."""

    def __init__(self, request_id: int, specs: Sequence[SeqSpec]) -> None:
        self.request_id = request_id
        self.specs = tuple(specs)
        self.worker_id: WorkerId | None = None  # None = it waits for one
        # At a prefill worker: what is left after its first token goes on elsewhere.
        self.is_prefilling = False
        self.lender: WorkerId | None = None  # who holds the KV of its prompt
        self.excluded: tuple[WorkerId, ...] = ()  # that were lost with it
        self.num_failures = 0  # of these; the others were asked to leave
        self.num_output_tokens = 0  # since it came to its worker
        self._has_begun = False  # its worker has a token of it, or is to keep it in any case
        self._is_recalled = False  # it was, once
        # Workers that it was taken from, and may still say something of these sequences: nobody
        # would know which life of a sequence such a word is about if it were there again.
        self._left: dict[WorkerId, set[SeqId]] = {}
        self._parts = {spec.seq_id: _Part(spec) for spec in specs}

    def __contains__(self, seq_id: SeqId) -> bool:
        """Whether this sequence is one of its own and has not ended."""
        return seq_id in self._parts

    def __iter__(self) -> Iterator[SeqId]:
        return iter(list(self._parts))

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def is_over(self) -> bool:
        return not self._parts

    @property
    def is_prefilled(self) -> bool:
        """Whether all that has not ended is to go on elsewhere by now."""
        return self.is_prefilling and all(part.is_prefilled for part in self._parts.values())

    @property
    def asks_for(self) -> Role:
        """Of the next worker that it goes to."""
        return Role.PREFILL if self.is_prefilling else Role.MIXED

    @property
    def is_handed_over(self) -> bool:
        """Whether its worker is to hand it on, or was handed it and has not begun."""
        is_late = self._is_recalled or self.lender is not None
        return self.is_prefilling or (is_late and not self._has_begun)

    @property
    def num_migrations(self) -> int:
        return len(self.excluded)

    def hear(self, word: Word) -> Said | None:
        """The worker's word as the reader should hear it; None = it knows that already."""
        part = self._parts.get(word.seq_id)
        if part is None:
            return None
        # Where its KV was brought, one step is between its being admitted and its next token. Who
        # was taken from a worker stays where it is admitted: no prompt is computed a third time.
        self._has_begun = self._has_begun or self._is_recalled or isinstance(word, Emit)
        match word:
            case Emit():
                return self._hear_tokens(part, word)
            case Admitted():
                was_admitted, part.is_admitted = part.is_admitted, True
                part.is_lent = part.is_lent and self.is_prefilling
                if was_admitted:  # before it was handed on
                    return None
                if part.num_cached_tokens is None:
                    part.num_cached_tokens = word.num_cached_tokens
            case Computed():
                return None  # it is for whoever is to decode
            case Preempted():
                part.is_admitted = False
            case Finish(reason=FinishReason.LENGTH) if self.is_prefilling and not part.is_complete:
                part.is_prefilled = True
                if part.ending is None:
                    return None
                del self._parts[word.seq_id]
                return self._finish(part, part.ending)
            case Finish():
                del self._parts[word.seq_id]
                cached = part.num_cached_tokens
                return word if cached is None else _with_cached(word, cached)
            case Reject():
                del self._parts[word.seq_id]
                if part.has_told or part.ending:
                    return self._finish(part, part.ending or FinishReason.ERROR, word.message)
        return word

    def cancel(self, seq_id: SeqId, reason: FinishReason) -> Finish | None:
        """Its end at once where no worker computes it; else the worker is to be told."""
        part = self._parts[seq_id]
        if self.worker_id is None or part.is_prefilled:
            del self._parts[seq_id]
            return self._finish(part, reason)
        part.ending = part.ending or reason
        return None

    def end(self, reason: FinishReason, error: str = "") -> list[Said]:
        """The last words on all that have not ended."""
        parts, self._parts = list(self._parts.values()), {}
        return [self._finish(part, part.ending or reason, error) for part in parts]

    def refuse(self, words: RouteReject) -> list[Said]:
        """No worker takes it, or none in time: an end to readers who have a part of it."""
        parts, self._parts = list(self._parts.values()), {}
        is_late = words.code == "deadline_exceeded"
        end = (FinishReason.DEADLINE,) if is_late else (FinishReason.ERROR, words.message)
        return [
            self._finish(part, *end)
            if part.has_told
            else Reject(
                part.spec.seq_id,
                words.status_hint,
                words.code,
                words.message,
                words.hint,
                words.retry_after_s,
            )
            for part in parts
        ]

    def lose_worker(self, reason: str, *, is_failure: bool) -> list[Said]:
        """Its worker is gone: what its readers hear of it. What was cancelled has its end."""
        assert self.worker_id is not None
        self.excluded += (self.worker_id,)
        self.num_failures += is_failure
        return self._leave(reason)

    def farewell(self) -> list[Cancel | EndLease]:
        """What its worker has to be told where it is to go on elsewhere."""
        return [
            EndLease(seq_id) if part.is_prefilled else Cancel(seq_id)
            for seq_id, part in self._parts.items()
        ]

    def recall(self) -> list[Said]:
        """It is taken from its worker, which may have stopped, and decoded elsewhere, prompt and
        all: what its readers hear of it.
        """
        assert self.worker_id is not None
        self._left[self.worker_id] = {
            seq_id for seq_id, part in self._parts.items() if not part.is_prefilled
        }
        self.is_prefilling, self._is_recalled = False, True
        return self._leave("its worker has stopped")

    def has_left(self, worker_id: WorkerId, word: Word) -> bool:
        """Whether this ends the life of a sequence at a worker that it was taken from."""
        left = self._left.get(worker_id, set())
        if not isinstance(word, Finish | Reject) or word.seq_id not in left:
            return False
        left.remove(word.seq_id)
        if not left:
            del self._left[worker_id]
        return True

    def _leave(self, reason: str) -> list[Said]:
        self.worker_id = None
        if not any(part.is_lent for part in self._parts.values()):
            self.lender = None  # nothing is held: its prompt is computed like a new one's
        words: list[Said] = []
        for seq_id, part in list(self._parts.items()):
            if part.is_admitted:
                part.is_admitted = False
                num_lost = len(part.spec.prompt_tokens) + len(part.output)
                words.append(Preempted(seq_id, reason, num_lost))
            if part.ending is not None:
                del self._parts[seq_id]
                words.append(self._finish(part, part.ending))
            elif part.is_complete:
                del self._parts[seq_id]
                words.append(self._finish(part, FinishReason.LENGTH))
        return words

    def begin(
        self, worker_id: WorkerId, kv_source: str = "", num_blocks: int | None = None
    ) -> tuple[SeqSpec, ...]:
        """It goes to this worker: the sequences with all that they have. `num_blocks` of them are
        known to be at the source.
        """
        self.worker_id = worker_id
        self.num_output_tokens = 0
        self._has_begun = False
        return tuple(self._resumed(part, kv_source, num_blocks) for part in self._parts.values())

    def source(self, decision: Decision | None) -> tuple[WorkerId | None, int | None]:
        """Who has its KV, and how many blocks of it: its own prefill worker all that is computed,
        or somebody a prefix.
        """
        if self.lender is not None or decision is None:
            return self.lender, None
        return decision.chosen.fetch_from_id, decision.chosen.num_source_blocks

    def leave_prefill(self) -> None:
        """Its prompt is computed: it waits for a worker that decodes it."""
        self.lender, self.worker_id = self.worker_id, None
        self.is_prefilling = False
        for part in self._parts.values():
            part.is_lent = True

    def coming(self, seq_id: SeqId, source: str) -> Expect:
        """What whoever is to decode this sequence has to know of it beforehand."""
        part = self._parts[seq_id]
        return Expect(
            seq_id=seq_id,
            tokens=(*part.spec.prompt_tokens, *part.output),
            source=source,
            salt=part.spec.salt,
            adapter=part.spec.adapter,
        )

    def as_request(
        self,
        of: WorkerSpec | None,
        neighbour_weight: float = 0.0,
        shunned: tuple[WorkerId, ...] = (),
    ) -> RouteRequest:
        """As the router sees it: what is known of it, and what is still to come. Its blocks have
        the names that any worker gives them, since all serve the same model. The weight counts
        unless its prompt is computed, and held for whoever decodes it.
        """
        spec = self.specs[0]
        tokens = self._known_tokens()
        names: tuple[bytes, ...] = ()
        if of is not None:
            root = root_name(of.model_digest, of.kv_dtype, of.block_size, spec.adapter, spec.salt)
            chain = BlockChain.of(root, of.block_size, spec.prompt_tokens)
            chain.extend(tokens)
            names = tuple(chain.names)
        return RouteRequest(
            request_id=self.request_id,
            block_names=names,
            num_tokens=len(tokens),
            num_choices=len(self),
            max_tokens=len(spec.prompt_tokens) + spec.params.max_tokens - len(tokens),
            priority=spec.priority,
            slo=spec.slo,
            session=spec.session,
            tenant=spec.tenant or spec.salt,
            adapter=spec.adapter,
            arrived_ns=spec.arrived_ns,
            deadline_ns=spec.deadline_ns,
            excluded=(*self.excluded, *self._left, *shunned),
            is_migration=self.num_migrations > 0 or self.lender is not None or self._is_recalled,
            neighbour_weight=neighbour_weight if self.lender is None else 0.0,
        )

    def _known_tokens(self) -> tuple[int, ...]:
        """Of the sequence that has the most."""
        part = max(self._parts.values(), key=lambda part: len(part.output))
        prompt = part.spec.prompt_tokens
        return (*prompt, *part.output) if part.output else prompt

    # ---- parts

    def _hear_tokens(self, part: _Part, word: Emit) -> Emit | None:
        part.output += word.tokens
        self.num_output_tokens += len(word.tokens)
        if not word.prompt_logprobs:
            return word
        num_known = min(part.num_known_scores, len(word.prompt_logprobs))
        part.num_known_scores -= num_known
        fresh = word.prompt_logprobs[num_known:]
        part.num_scores += len(fresh)
        if not (fresh or word.tokens):
            return None
        return msgspec.structs.replace(word, prompt_logprobs=fresh)

    def _resumed(self, part: _Part, kv_source: str, num_blocks: int | None) -> SeqSpec:
        params = part.spec.params
        part.is_prefilled = False
        if part.output:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        else:
            part.num_known_scores = part.num_scores
        num_tokens = len(part.output) + 1  # with the first one that is computed
        goes_on = self.is_prefilling and num_tokens < params.max_tokens
        if goes_on:
            params = msgspec.structs.replace(params, max_tokens=num_tokens)
        return msgspec.structs.replace(
            part.spec,
            output_tokens=tuple(part.output),
            params=params,
            kv_source=kv_source,
            num_source_blocks=num_blocks if kv_source else None,
            is_leased=goes_on,
            session="",
            tenant="",
        )

    def _finish(self, part: _Part, reason: FinishReason, error: str = "") -> Finish:
        return Finish(
            seq_id=part.spec.seq_id,
            reason=reason,
            num_prompt_tokens=len(part.spec.prompt_tokens),
            num_output_tokens=len(part.output),
            num_cached_tokens=part.num_cached_tokens or 0,
            num_preemptions=self.num_migrations,
            error=error,
        )


def _with_cached(word: Finish, num_cached_tokens: int) -> Finish:
    return msgspec.structs.replace(word, num_cached_tokens=num_cached_tokens)


def check_flights(flights: Collection[Flight], flight_of: Mapping[SeqId, Flight]) -> None:
    """Raise InvariantError unless every sequence that lives is under way, once."""
    for flight in flights:
        for seq_id in flight:
            if flight_of.get(seq_id) is not flight:
                raise InvariantError("a request has lost a sequence", seq_id=seq_id)
    num_seqs = sum(len(flight) for flight in flights)
    if num_seqs != len(flight_of) or any(flight.is_over for flight in flights):
        raise InvariantError("sequences do not add up", seqs=num_seqs, living=len(flight_of))
