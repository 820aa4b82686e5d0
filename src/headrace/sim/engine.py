"""The virtual driver of one EngineCore: its device takes time, one step after the other.

Where steps are all alike for a while, they are taken at once (see core/engine/glide.py): only those
are looked at with which a block becomes full or is needed, or with which a reader has had enough
tokens for the router to hear of it. Whatever else happens meanwhile ends the glide first.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from headrace.core.base.events import (
    Arrive,
    EngineEffect,
    EngineEvent,
    KvChanged,
    StartStep,
    StepDone,
    StepFailed,
)
from headrace.core.base.plan import StepPlan
from headrace.core.base.types import Ns, SeqId
from headrace.core.engine.core import EngineCore
from headrace.core.engine.glide import MIN_STEPS, Glide
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import WorkerLoad
from headrace.core.router.front import PROGRESS_TOKENS
from headrace.core.telemetry import RequestRecord, Telemetry
from headrace.core.telemetry.runs import pass_decoding, plan_ahead
from headrace.sim.cores import SharedCores
from headrace.sim.runtime import SimRuntime
from headrace.sim.steps import ListedSteps
from headrace.sim.untold import Run, Untold

TokenTimes = Mapping[SeqId, Sequence[Ns]]
NO_TIMES: Final[TokenTimes] = {}
MAX_STEPS: Final = 4096  # of one glide
NOTHING: Final = Arrive(())  # stands for the event where sequences end within a glide


class Reader(Protocol):
    """Whoever hears what an engine does."""

    def hear(
        self,
        at_ns: Ns,
        effects: Sequence[EngineEffect],
        records: Sequence[RequestRecord],
        times: TokenTimes,
    ) -> None:
        """What came of an event, or of steps taken at once; StartStep is carried out already.
        `times` of tokens that came one by one, by their sequence.
        """
        ...


class SimEngine:
    def __init__(
        self,
        core: EngineCore,
        steps: ListedSteps,
        telemetry: Telemetry,
        runtime: SimRuntime,
        reader: Reader,
        *,
        glides: bool = True,
        on_plan: Callable[[StepPlan], None] | None = None,
        cores: SharedCores | None = None,
    ) -> None:
        """On `cores` that others use too nobody knows beforehand when a step will end, so nothing
        glides.
        """
        self.core = core
        self._steps = steps
        self._telemetry = telemetry
        self._runtime = runtime
        self._reader = reader
        self._glides = glides and cores is None
        self._cores = cores
        self._on_plan = on_plan
        self._started: deque[StepPlan] = deque()  # the first one runs
        self._end: StepDone | StepFailed | None = None  # of that one
        self._end_ns = self._elapsed_ns = Ns(0)
        self.busy_ns = 0  # in steps
        self._epoch = 0  # calls that were asked for in another one mean nothing any more
        self._glide: _Way | None = None
        self._untold = Untold()
        self._load: WorkerLoad | None = None  # as it has been since the last event

    def load(self) -> WorkerLoad:
        """As of now; a glide need not end for it."""
        if self._glide is not None:
            return self._glide.load(self._runtime.now)
        if self._load is None:
            stats = self.core.stats()
            self._load = WorkerLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_queued_prefill_tokens=stats.num_prefill_tokens,
                num_kv_tokens=stats.num_kv_tokens,
                num_free_blocks=stats.num_free_blocks,
                num_cached_blocks=stats.num_cached_blocks,
                num_pinned_blocks=stats.num_pinned_blocks,
            )
        return self._load

    def stats(self) -> EngineStats:
        """As of now; a glide need not end for it."""
        if self._glide is not None:
            return self._glide.stats(self.core.stats(), self._runtime.now)
        return self.core.stats()

    def stop(self) -> None:
        """Nothing more will happen here."""
        self._epoch += 1
        self._glide = None
        if self._cores is not None:
            self._cores.stop(self)

    def handle(self, event: EngineEvent) -> None:
        """Something happens from outside, now."""
        self.settle()
        self._turn(self._runtime.now, event)
        self._try_to_glide()

    def settle(self) -> None:
        """Bring the core to what it has done by now."""
        way = self._glide
        if way is None:
            return
        num_done = way.num_done(self._runtime.now)
        if num_done and way.ends_ns[num_done - 1] == self._runtime.now:
            self._land(way, num_done)
            return
        self._glide = None
        if num_done:
            self._stop_after(way, num_done)
            self._end_ns = way.ends_ns[num_done]
        self._call_at_end()

    def runs(self, until_ns: Ns) -> list[Run]:
        """Tokens up to then of which its reader has not heard."""
        way = self._glide
        if way is not None:
            way.tell(way.num_done(until_ns), self._untold)
        return self._untold.take_until(until_ns)

    # ---- one by one

    def _turn(self, at_ns: Ns, event: EngineEvent, known: Container[SeqId] = ()) -> None:
        """Of those who are `known`, the tokens are with the untold already."""
        self._load = None
        effects = self.core.handle(at_ns, event)
        records = self._telemetry.observe(at_ns, event, effects)
        for effect in effects:
            if isinstance(effect, StartStep):
                if self._on_plan is not None:
                    self._on_plan(effect.plan)
                self._started.append(effect.plan)
                if len(self._started) == 1:
                    self._begin(at_ns)
        if self._glides:
            told, times = self._untold.filter(at_ns, effects, known)
            self._reader.hear(at_ns, told, records, times)
        else:
            self._reader.hear(at_ns, effects, records, NO_TIMES)

    def _begin(self, at_ns: Ns) -> None:
        self._end, self._elapsed_ns = self._steps.outcome(self._started[0])
        if self._cores is not None:
            end, num_tokens = partial(self._shared_step_ends, at_ns), self._started[0].num_tokens
            self._cores.start(self, self._elapsed_ns, end, num_tokens)
            return
        self.busy_ns += self._elapsed_ns
        self._end_ns = Ns(at_ns + self._elapsed_ns)
        self._call_at_end()

    def _call_at_end(self) -> None:
        self._epoch += 1
        self._runtime.call_at(self._end_ns, partial(self._step_ends, self._epoch))

    def _shared_step_ends(self, began_ns: Ns) -> None:
        """It has taken what it took, which its engine learns from."""
        now = self._runtime.now
        elapsed_ns = Ns(now - began_ns)
        self.busy_ns += elapsed_ns
        if isinstance(self._end, StepDone):
            result = msgspec.structs.replace(self._end.result, elapsed_ns=elapsed_ns)
            self._end = StepDone(result)
        self._finish_step(now)

    def _step_ends(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._finish_step(self._end_ns)
        self._try_to_glide()

    def _finish_step(self, at_ns: Ns, known: Container[SeqId] = ()) -> None:
        end = self._end
        assert end is not None
        self._started.popleft()
        if self._started:
            self._begin(at_ns)
        self._turn(at_ns, end, known)

    # ---- many at once

    def _try_to_glide(self) -> None:
        if not self._glides or self._glide is not None:
            return
        glide = Glide.begin(self.core, self._steps.tokens)
        if glide is not None:
            way = _Way(glide, self._end_ns, self._elapsed_ns, self._steps, self._untold)
            if way.num_steps >= MIN_STEPS:
                self._epoch += 1
                self._glide, self._load = way, None
                self._next_border(way, 0)

    def _next_border(self, way: "_Way", step: int) -> None:
        step = way.next_border(step)
        self._runtime.call_at(
            way.ends_ns[step - 1], partial(self._pass_border, self._epoch, way, step)
        )

    def _pass_border(self, epoch: int, way: "_Way", step: int) -> None:
        if epoch != self._epoch:
            return
        if step >= way.num_steps or not way.glide.has_room(step):
            self._land(way, step)
            self._try_to_glide()
            return
        effects: list[EngineEffect] = []
        changes, last_words = way.glide.pass_border(step)
        if changes:
            effects.append(KvChanged(changes))
        records: list[RequestRecord] = []
        if last_words:
            outline = way.glide.outline
            self._tell_telemetry(way, step, outline(step), [outline(step + 1)])
            at_ns = way.ends_ns[step - 1]
            records = self._telemetry.observe(at_ns, NOTHING, list(last_words.values()))
        times: dict[SeqId, Sequence[Ns]] = {}
        for index in way.heard_with(step, last_words):
            seq_id = way.glide.seqs[index].seq_id
            way.tell_one(index, step, self._untold)
            emit, times[seq_id] = self._untold.take(seq_id)
            effects.append(emit)
            if index in last_words:
                effects.append(last_words[index])
                way.forget(index)
                self._untold.forget(seq_id)
        if effects:
            self._reader.hear(way.ends_ns[step - 1], effects, records, times)
        self._next_border(way, step)

    def _land(self, way: "_Way", num_done: int) -> None:
        """All but the last of the steps that are done are taken for done; that one is done."""
        self._glide = None
        at_ns = way.ends_ns[num_done - 1]
        if num_done > 1:
            self._stop_after(way, num_done - 1)
        self._finish_step(at_ns, way.told_at(num_done))

    def _stop_after(self, way: "_Way", num_done: int) -> None:
        """So many steps are done, at least one, and the next one runs."""
        way.tell(num_done, self._untold)
        plans = way.glide.land(way.ends_ns[:num_done], way.elapsed_ns)
        self._tell_telemetry(way, num_done, plans[0], plans)
        self._started = deque(plans)
        self._end, self._elapsed_ns = self._steps.outcome(plans[0])
        self.busy_ns += sum(way.elapsed_ns[1 : num_done + 1])

    def _tell_telemetry(
        self, way: "_Way", num_done: int, last: StepPlan, plans: Sequence[StepPlan]
    ) -> None:
        """So many steps are done, of which the last one was like `last`, and `plans` run."""
        ends_ns = way.ends_ns[way.num_folded : num_done]
        if ends_ns:
            pass_decoding(self._telemetry, ends_ns, last, plans)
            way.num_folded = num_done
        else:
            plan_ahead(self._telemetry, plans)


class _Way:
    """A glide with its times, as far as they are known."""

    def __init__(
        self, glide: Glide, end_ns: Ns, elapsed_ns: Ns, steps: ListedSteps, untold: Untold
    ) -> None:
        self.glide = glide
        self.num_steps = min(glide.num_steps, MAX_STEPS)
        self.ends_ns: list[Ns] = []
        self.elapsed_ns: list[Ns] = []
        self._steps = steps
        self._told = [0] * len(glide.seqs)  # steps whose tokens are with the untold, or told
        self.num_folded = 0  # steps of which telemetry knows
        self._end_steps = set(glide.ends)
        # By step modulo that many: whose reader has had so many tokens that the router hears of it.
        self._progress: dict[int, list[int]] = {}
        for index, seq in enumerate(glide.seqs):
            place = untold.num_until_told(seq.seq_id) % PROGRESS_TOKENS
            self._progress.setdefault(place, []).append(index)
        self._add(end_ns, elapsed_ns)

    def next_border(self, step: int) -> int:
        """The first step after this one with which something is to be done, or the last one."""
        glide, ends_ns, progress = self.glide, self.ends_ns, self._progress
        end_steps = self._end_steps
        places, size = glide.border_places, glide.block_size
        while step < self.num_steps:
            step += 1
            if step > len(ends_ns):
                elapsed_ns = self._steps.elapsed_ns(glide.shape(step))
                self._add(Ns(ends_ns[-1] + elapsed_ns), elapsed_ns)
            if step % size in places or step % PROGRESS_TOKENS in progress or step in end_steps:
                return step
        return self.num_steps

    def num_done(self, now: Ns) -> int:
        return bisect_right(self.ends_ns, now)

    def told_at(self, step: int) -> set[SeqId]:
        """Who has the step's token told."""
        pairs = zip(self._told, self.glide.seqs, strict=True)
        return {seq.seq_id for told, seq in pairs if told >= step}

    def tell(self, step: int, untold: Untold) -> None:
        """What everybody has after this step."""
        for index in range(len(self._told)):
            self.tell_one(index, step, untold)

    def heard_with(self, step: int, last_words: Mapping[int, EngineEffect]) -> list[int]:
        """The places of those of whom a reader hears with this step, in the order of plans."""
        due = self._progress.get(step % PROGRESS_TOKENS, ())
        if not last_words:
            return [index for index in due if self._told[index] < step]
        return [
            index
            for index, told in enumerate(self._told)
            if index in last_words or (index in due and told < step)
        ]

    def forget(self, index: int) -> None:
        """It has ended, and there is no more to tell."""
        self._told[index] = self.num_steps

    def tell_one(self, index: int, step: int, untold: Untold) -> None:
        told = self._told[index]
        if told < step:
            self._told[index] = step
            tokens = self.glide.tokens(index, told, step)
            untold.add(self.glide.seqs[index].seq_id, tokens, self.ends_ns[told:step])

    def load(self, now: Ns) -> WorkerLoad:
        """What the core would show, had it not glided."""
        kv = self.glide.kv
        return WorkerLoad(
            num_running=self.glide.num_running,
            num_waiting=0,
            num_queued_prefill_tokens=0,
            num_kv_tokens=self.glide.num_planned_tokens(self.num_done(now)),
            num_free_blocks=kv.num_free,
            num_cached_blocks=kv.num_cached,
            num_pinned_blocks=kv.num_blocks - kv.num_free - kv.num_cached,
        )

    def stats(self, stats: EngineStats, now: Ns) -> EngineStats:
        """What the core would say, had it not glided."""
        num_done = self.num_done(now)
        num_tokens = self.glide.num_done_tokens(num_done)
        return msgspec.structs.replace(
            stats,
            num_steps=stats.num_steps + num_done,
            num_computed_tokens=stats.num_computed_tokens + num_tokens,
            num_prefill_tokens=0,
            num_kv_tokens=self.glide.num_planned_tokens(num_done),
        )

    def _add(self, end_ns: Ns, elapsed_ns: Ns) -> None:
        self.ends_ns.append(end_ns)
        self.elapsed_ns.append(elapsed_ns)
        if not self.glide.is_alike(elapsed_ns):
            self.num_steps = min(self.num_steps, len(self.ends_ns))
