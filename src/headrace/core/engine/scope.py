"""The sequences of one front end at an engine that works for several. Pure.

Front ends number their sequences without knowing of each other, and a front end that comes again
begins anew. So an engine has numbers of its own, and a scope, one for each life of each front end,
is the dictionary between the two. What is not in it is somebody else's.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from headrace.core.base.errors import TransferError
from headrace.core.base.events import Admitted, Computed, Emit, Finish, Preempted, Reject
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import SeqId

Word: TypeAlias = Admitted | Computed | Emit | Preempted | Finish | Reject


class Scope:
    """Outer ids are the front end's, inner ones the engine's."""

    def __init__(self) -> None:
        self._inner: dict[SeqId, SeqId] = {}  # of the living, by their outer ids
        self._outer: dict[SeqId, SeqId] = {}  # the same the other way round
        self._lent: dict[SeqId, SeqId] = {}  # inner ids of those that have ended, and lend blocks
        self._leased: set[SeqId] = set()  # outer ids of the living that will
        self._expected: dict[SeqId, SeqId] = {}  # inner ids, by outer ones, of those that will come
        # The first inner id of each request on its way, or of whom of it is expected.
        self._arriving: set[SeqId] = set()

    def __contains__(self, inner: SeqId) -> bool:
        """Whether a sequence lives and is this front end's."""
        return inner in self._outer

    def enter(self, specs: Sequence[SeqSpec], ids: Iterable[int]) -> tuple[SeqSpec, ...]:
        """The sequences of a request, at least one, as the engine knows them by these ids.
        TransferError where the front end has used an id that lives.
        """
        inward = []
        is_expected = False
        for spec, number in zip(specs, ids, strict=True):
            inner = self._expected.pop(spec.seq_id, None)
            is_expected = is_expected or inner is not None
            inner = SeqId(number) if inner is None else inner
            if spec.seq_id in self._inner:
                raise TransferError(f"the front end uses sequence id {spec.seq_id} twice")
            self._outer[inner] = spec.seq_id
            self._inner[spec.seq_id] = inner
            if spec.is_leased:
                self._leased.add(spec.seq_id)
            inward.append(msgspec.structs.replace(spec, seq_id=inner))
        if not is_expected:
            self._arriving.add(inward[0].seq_id)
        return tuple(inward)

    def expect(self, outer: SeqId, number: int) -> SeqId:
        """The inner id of a sequence that will come. TransferError where it is expected already."""
        if outer in self._expected:
            raise TransferError(f"the front end announces sequence id {outer} twice")
        inner = self._expected[outer] = SeqId(number)
        self._arriving.add(inner)
        return inner

    def expected(self, outer: SeqId) -> SeqId | None:
        return self._expected.get(outer)

    def has_come(self, first: SeqId) -> bool:
        """The engine knows of the request that begins with this inner id, or is announced by it:
        whether it is this front end's. True once for each.
        """
        if first not in self._arriving:
            return False
        self._arriving.remove(first)
        return True

    def inner(self, outer: SeqId) -> SeqId | None:
        return self._inner.get(outer)

    def outward(self, word: Word) -> Word | None:
        """The engine's word as the front end knows it; None where that is not its own. The last
        word on a sequence frees its id.
        """
        outer = self._outer.get(word.seq_id)
        if outer is None:
            return None
        if isinstance(word, Finish | Reject):
            self._end(word, outer)
        return msgspec.structs.replace(word, seq_id=outer)

    def _end(self, word: Finish | Reject, outer: SeqId) -> None:
        del self._outer[word.seq_id], self._inner[outer]
        if outer in self._leased:
            self._leased.remove(outer)
            if isinstance(word, Finish) and word.reason is FinishReason.LENGTH:
                self._lent[outer] = word.seq_id

    def end_lease(self, outer: SeqId) -> SeqId | None:
        """The inner id of a sequence that has ended and lends blocks, or was expected, and is that
        no longer.
        """
        inner = self._lent.pop(outer, None)
        return self._expected.pop(outer, None) if inner is None else inner

    def living(self) -> list[SeqId]:
        """Their inner ids."""
        return list(self._outer)

    def held(self) -> list[SeqId]:
        """Inner ids of those that have ended and lend blocks, and of those that are expected."""
        return [*self._lent.values(), *self._expected.values()]
