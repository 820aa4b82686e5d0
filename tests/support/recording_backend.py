"""A backend whose programs compute nothing and record what they are asked for."""

import threading
from collections.abc import Sequence

from headrace.core.base.plan import BlockCopy, TokenLogprob
from headrace.ops.interface import (
    NO_TOKEN,
    KvFile,
    KvLayout,
    RowRequest,
    RowResult,
    StepBatch,
)


class RecordingProgram:
    """Answers each row with its request's target, or 100 + the position to sample.

    `faults` are raised by the call they name, once; a pass waits for `may_run`.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.spoilt_rows: set[int] = set()  # of every pass
        self.tokens: list[list[int]] = []  # of every pass
        self.requests: list[Sequence[RowRequest]] = []
        self.num_readied = 0
        self.is_ready = threading.Event()
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, batch: StepBatch) -> None:
        assert self.may_run.wait(10)
        self.tokens.append(list(batch.tokens))
        self._called("run")

    def finish_rows(self, requests: Sequence[RowRequest]) -> list[RowResult]:
        self.requests.append(requests)
        self._called("finish")
        return [
            RowResult(NO_TOKEN, None, "not a number")
            if row in self.spoilt_rows
            else RowResult(_token(request), _score(request))
            for row, request in enumerate(requests)
        ]

    def logits(self) -> list[list[float]]:
        return []

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._called("copy")

    def ready_blocks(self) -> bool:
        self.num_readied += 1
        self.is_ready.set()
        return self.num_readied < 3

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults.pop(name)


def _token(request: RowRequest) -> int:
    if request.sample is not None:
        return 100 + request.sample.position
    assert request.target is not None
    return request.target


def _score(request: RowRequest) -> TokenLogprob | None:
    return None if request.num_top is None else TokenLogprob(_token(request), -1.0, 0)


class RecordingBackend:
    name = "recording"
    batch_invariant = True
    arithmetic = "recorded"

    def __init__(self) -> None:
        self.program = RecordingProgram()
        self.compiled: tuple[KvLayout, int] | None = None

    def load_weight(self, view: object) -> object:
        return view

    def weight_bytes(self) -> int:
        return 0

    def compile(
        self,
        forward: object,
        kv: KvLayout,
        max_tokens: int,
        kv_file: KvFile | None = None,
    ) -> RecordingProgram:
        self.compiled = kv, max_tokens
        return self.program
