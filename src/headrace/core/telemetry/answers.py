"""When answers have left the server: the last word on a record, for what ended may still be unread.

The engine hands tokens on at its own pace, so a client that reads slowly shows nowhere in what the
engine does. It shows in what the server still had to send when the sequence had ended.
"""

from collections.abc import Sequence

import msgspec

from headrace.core.base.events import Arrive, EngineEffect, EngineEvent, Reject
from headrace.core.base.types import Ns, SeqId
from headrace.core.telemetry.record import RequestRecord


class ClientWait(msgspec.Struct, frozen=True):
    """The time before an answer's last bytes left in which, without a pause, bytes were ready and
    its client had no room for them.
    """

    since_ns: Ns
    until_ns: Ns

    def after(self, finished_ns: Ns) -> Ns:
        """The part of it after a sequence's end."""
        return Ns(max(0, self.until_ns - max(self.since_ns, finished_ns)))


class Answers:
    """Holds the records of an answer's sequences until it has left, and charges its client for the
    wait.

    Feed it every event, with the records that Telemetry made of it; and tell it once that an answer
    has left. That may be before its sequences end: a stop string, or a client that is gone, ends
    the answer first.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, _Answer] = {}
        self._request_by_seq: dict[SeqId, str] = {}

    @property
    def num_known(self) -> int:
        return len(self._by_request)

    def observe(
        self,
        event: EngineEvent,
        effects: Sequence[EngineEffect],
        records: Sequence[RequestRecord],
    ) -> list[RequestRecord]:
        """The records, of these, whose answers have left."""
        if isinstance(event, Arrive):
            for spec in event.seqs:
                self._request_by_seq[spec.seq_id] = spec.request_id
                self._by_request.setdefault(spec.request_id, _Answer()).num_open += 1
        for effect in effects:
            if isinstance(effect, Reject):
                self._end(effect.seq_id, None)
        ready = [self._end(record.seq_id, record) for record in records]
        return [record for record in ready if record is not None]

    def leave(self, request_id: str, wait: ClientWait | None) -> list[RequestRecord]:
        """The records that waited for this. `wait` None: the client kept up.

        An answer of which no sequence has arrived will have none, and is not remembered.
        """
        answer = self._by_request.get(request_id)
        if answer is None:
            return []
        answer.has_left, answer.wait = True, wait
        held, answer.held = answer.held, []
        self._forget(request_id, answer)
        return [_charged(record, wait) for record in held]

    def _end(self, seq_id: SeqId, record: RequestRecord | None) -> RequestRecord | None:
        """`record` as it is final, or None where it has to wait."""
        request_id = self._request_by_seq.pop(seq_id, None)
        if request_id is None:
            return record
        answer = self._by_request[request_id]
        answer.num_open -= 1
        if record is not None:
            if answer.has_left:
                record = _charged(record, answer.wait)
            else:
                answer.held.append(record)
                record = None
        self._forget(request_id, answer)
        return record

    def _forget(self, request_id: str, answer: "_Answer") -> None:
        """Once nothing more can come. An answer refused whole has nothing to wait for."""
        if not answer.num_open and not answer.held:
            del self._by_request[request_id]


class _Answer:
    """What is known of one request."""

    __slots__ = ("has_left", "held", "num_open", "wait")

    def __init__(self) -> None:
        self.num_open = 0  # sequences that have not ended
        self.has_left = False
        self.wait: ClientWait | None = None
        self.held: list[RequestRecord] = []


def _charged(record: RequestRecord, wait: ClientWait | None) -> RequestRecord:
    wait_ns = 0 if wait is None else wait.after(record.finished_ns)
    return record.with_client_wait(Ns(wait_ns)) if wait_ns else record
