"""The virtual driver of one EngineCore: its device takes time, one step after the other.

Where sequences decode for a while, their steps are taken at once (see core/engine/glide.py): only
those are looked at with which a sequence ends, with which a reader has had enough tokens for the
router to hear of it, or around which a prompt is computed; what becomes of blocks between is seen
to with the next of them, or when somebody asks. Whatever else happens meanwhile ends the glide
first.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

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
from headrace.core.base.plan import StepPlan, StepResult
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.engine.core import EngineCore
from headrace.core.engine.glide import Glide
from headrace.core.engine.passed import Passed
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import WorkerLoad
from headrace.core.telemetry import RequestRecord, Telemetry
from headrace.core.telemetry.runs import Stretch
from headrace.sim.cores import SharedCores
from headrace.sim.runtime import SimRuntime
from headrace.sim.steps import ListedSteps
from headrace.sim.untold import Run, Untold
from headrace.sim.way import MAX_STEPS, Way

if TYPE_CHECKING:
    from headrace.sim.loads import LoadReport

TokenTimes = Mapping[SeqId, Sequence[Ns]]
NO_TIMES: Final[TokenTimes] = {}
Told = tuple[Sequence[EngineEffect], TokenTimes]
"""Words to a reader."""
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
        delay_ns: Ns | None = None,
        on_plan: Callable[[StepPlan], None] | None = None,
        cores: SharedCores | None = None,
    ) -> None:
        """On `cores` that others use too nobody knows beforehand when a step will end, so nothing
        glides.

        What becomes of blocks matters to others so long after it: until then, and until they ask,
        it may be told later (`catch_up`). None = it is to be told as soon as it happens.
        """
        self.core = core
        self._steps = steps
        self._telemetry = telemetry
        self._runtime = runtime
        self._reader = reader
        self._glides = glides and cores is None
        self._tells_at_once, self._delay_ns = delay_ns is None, delay_ns or Ns(0)
        self._cores = cores
        self._on_plan = on_plan
        self._started: deque[StepPlan] = deque()  # the first one runs
        self._end: StepDone | StepFailed | None = None  # of that one
        self._end_ns = self._elapsed_ns = Ns(0)
        self._busy_ns = 0  # in steps that began outside of glides
        self._epoch = 0  # calls that were asked for in another one mean nothing any more
        self._way: Way | None = None  # of a glide
        self._stretch: Stretch | None = None  # the same for the telemetry
        self._untold = Untold()
        self.reports: list[LoadReport] = []  # to be counted before anything changes here

    def count_loads(self) -> None:
        """Of the reports, those that somebody may ask for; a glide need not end for it."""
        for report in self.reports:
            if not report.is_dropped:
                report.load = self._count_load(report.at_ns)
        self.reports.clear()

    def _count_load(self, at_ns: Ns) -> WorkerLoad:
        """As of then, since when nothing has been looked at."""
        way = self._way
        if way is not None:
            self._pass_to(way, min(way.num_done(at_ns), way.looked_at - 1))
            return way.load(self.core, at_ns)
        return WorkerLoad.of(self.core.stats())

    def stats(self) -> EngineStats:
        """As of now; a glide need not end for it."""
        self.catch_up()
        if self._way is not None:
            return self._way.stats(self.core.stats(), self._runtime.now)
        return self.core.stats()

    @property
    def busy_ns(self) -> int:
        """In steps that have begun."""
        way = self._way
        return self._busy_ns + (way.busy_ns(way.num_done(self._runtime.now)) if way else 0)

    def stop(self) -> None:
        """Nothing more will happen here."""
        self._epoch += 1
        if self._cores is not None:
            self._cores.stop(self)

    def handle(self, event: EngineEvent) -> None:
        """Something happens from outside, now."""
        self.count_loads()
        way = self._way
        if way is not None and isinstance(event, Arrive) and way.glide.takes_all(event.seqs):
            self._take(way, event)
            return
        self.settle()
        self._turn(self._runtime.now, event)
        self._try_to_glide()

    def catch_up(self) -> None:
        """Let the reader know what has become of blocks by now."""
        self.count_loads()
        way = self._way
        if way is not None:
            self._pass_to(way, min(way.num_done(self._runtime.now), way.looked_at - 1))

    def settle(self) -> None:
        """Bring the core to what it has done by now."""
        way = self._way
        if way is None:
            return
        num_done = way.num_done(self._runtime.now)
        is_at_end = num_done > way.glide.done and way.ends_ns[num_done - 1] == self._runtime.now
        self._pass_to(way, num_done - is_at_end)
        self._land(way)
        if is_at_end:
            self._finish_step(self._end_ns)
        else:
            self._call_at_end()

    def runs(self, until_ns: Ns, unheard: Sequence[Told]) -> list[Run]:
        """Tokens up to then of which its reader has not heard; `unheard` is what it was told last,
        in this order, and has not heard either.
        """
        for words, times in reversed(unheard):
            self._untold.put_back(words, times)
        if self._way is not None:
            self._way.tell(self._way.num_done(until_ns))
        return self._untold.take_until(until_ns)

    # ---- one by one

    def _turn(self, at_ns: Ns, event: EngineEvent) -> None:
        effects = self.core.handle(at_ns, event)
        records = self._telemetry.observe(at_ns, event, effects)
        for effect in effects:
            if isinstance(effect, StartStep):
                if self._on_plan is not None:
                    self._on_plan(effect.plan)
                self._started.append(effect.plan)
                if len(self._started) == 1:
                    self._begin(at_ns)
        self._hear(at_ns, effects, records)

    def _hear(
        self, at_ns: Ns, effects: Sequence[EngineEffect], records: Sequence[RequestRecord]
    ) -> None:
        if self._glides:
            told, times = self._untold.filter(at_ns, effects)
            self._reader.hear(at_ns, told, records, times)
        else:
            self._reader.hear(at_ns, effects, records, NO_TIMES)

    def _begin(self, at_ns: Ns) -> None:
        self._end, self._elapsed_ns = self._steps.outcome(self._started[0])
        if self._cores is not None:
            end, num_tokens = partial(self._shared_step_ends, at_ns), self._started[0].num_tokens
            self._cores.start(self, self._elapsed_ns, end, num_tokens)
            return
        self._busy_ns += self._elapsed_ns
        self._end_ns = Ns(at_ns + self._elapsed_ns)
        self._call_at_end()

    def _call_at_end(self) -> None:
        self._epoch += 1
        self._runtime.call_at(self._end_ns, partial(self._step_ends, self._epoch))

    def _shared_step_ends(self, began_ns: Ns) -> None:
        """It has taken what it took, which its engine learns from."""
        now = self._runtime.now
        elapsed_ns = Ns(now - began_ns)
        self._busy_ns += elapsed_ns
        if isinstance(self._end, StepDone):
            result = msgspec.structs.replace(self._end.result, elapsed_ns=elapsed_ns)
            self._end = StepDone(result)
        self._finish_step(now)

    def _step_ends(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._finish_step(self._end_ns)
        self._try_to_glide()

    def _finish_step(self, at_ns: Ns) -> None:
        self.count_loads()
        end = self._end
        assert end is not None
        self._started.popleft()
        if self._started:
            self._begin(at_ns)
        self._turn(at_ns, end)

    # ---- many at once

    def _try_to_glide(self) -> None:
        if not self._glides or self._way is not None:
            return
        glide = Glide.begin(self.core, self._steps.tokens)
        if glide is None:
            return
        self._way = Way(
            glide,
            self._end_ns,
            self._elapsed_ns,
            self._steps,
            self._untold,
            tells_at_once=self._tells_at_once,
        )
        began_ns = Ns(self._end_ns - self._elapsed_ns)
        self._stretch = Stretch(self._telemetry, began_ns)
        for one in glide.decoding:
            self._stretch.join(one.seq_id)
        prompts = glide.prompts_of(1)
        if prompts is not None:
            whole = glide.whole_shape(1)
            self._stretch.begin_mixed(StepId(glide.first_id), began_ns, prompts.shares, whole)
        is_busy = glide.is_busy or prompts is not None
        self._look_at(self._way, 1 if is_busy else self._way.next_border(0))

    def _take(self, way: Way, event: Arrive) -> None:
        """Sequences come, which the step that is planned after the one that runs may have."""
        now = self._runtime.now
        num_done = way.num_done(now)
        if num_done > way.glide.done and way.ends_ns[num_done - 1] == now:
            self._pass_step(self._epoch, way, num_done)
            self.handle(event)
            return
        effects = way.glide.arrive(now, event)
        self._hear(now, effects, self._telemetry.observe(now, event, effects))
        self._look_at(way, num_done + 1)

    def _look_at(self, way: Way, step: int) -> None:
        """When it ends; and at no other step until then."""
        self._epoch += 1
        way.looked_at = step
        call = partial(self._pass_step, self._epoch, way, step)
        self._runtime.call_at(way.ends_ns[step - 1], call)

    def _pass_step(self, epoch: int, way: Way, step: int) -> None:
        if epoch != self._epoch:
            return
        self.count_loads()
        glide, at_ns = way.glide, way.ends_ns[step - 1]
        self._pass_to(way, step - 1)
        if step >= MAX_STEPS or not glide.can_pass(step):
            self._land(way)
            self._finish_step(at_ns)
            self._try_to_glide()
            return
        is_mixed = glide.prompts_of(step) is not None
        if step in glide.ends and not is_mixed:
            self._tell_stretch(way, step)
        passed = glide.pass_step(at_ns, way.elapsed_ns[step - 1])
        self._say(way, step, passed, is_mixed=is_mixed)
        if passed.is_over:
            way.next_step(step)
            self._land(way, is_landed=True)
            self._call_at_end()
        elif glide.is_busy or glide.prompts_of(step + 1) is not None:
            self._look_at(way, way.next_step(step))
        else:
            self._look_at(way, way.next_border(step))

    def _pass_to(self, way: Way, step: int) -> None:
        """Steps are done with which nobody begins or ends: their blocks are told with their times,
        and together where those have passed.
        """
        heard = way.num_done(Ns(self._runtime.now - self._delay_ns))
        for number in (min(heard, step), *range(max(heard, way.glide.done) + 1, step + 1)):
            changes = way.glide.pass_to(number, way.elapsed_ns)
            if changes:
                self._reader.hear(way.ends_ns[number - 1], (KvChanged(changes),), (), NO_TIMES)

    def _say(self, way: Way, step: int, passed: Passed, *, is_mixed: bool) -> None:
        """What readers hear of a step, and the telemetry."""
        stretch, at_ns = self._stretch, way.ends_ns[step - 1]
        assert stretch is not None
        event: EngineEvent = NOTHING
        if is_mixed:
            stretch.end_mixed(step, at_ns)
            step_id = StepId(way.glide.first_id + step - 1)
            event = StepDone(StepResult(step_id, (), way.elapsed_ns[step - 1]))
        last_words = dict(passed.decoded)
        effects: list[EngineEffect] = []
        times: dict[SeqId, Sequence[Ns]] = {}
        for one in way.heard_with(step, last_words):
            way.tell_one(one, step)
            if one not in last_words:
                effects.append(self._untold.take(one.seq_id))
                times[one.seq_id] = ()
                continue
            emit, times[one.seq_id] = self._untold.end(one.seq_id)
            effects += [emit, last_words[one]]
            stretch.leave(one.seq_id, one.length, way.ends_ns)
            way.leave(one)
        records: list[RequestRecord] = []
        if is_mixed or last_words or passed.effects:
            seen = [*last_words.values(), *passed.effects]
            records = self._telemetry.observe(at_ns, event, seen)
            told, more = self._untold.filter(at_ns, passed.effects)
            effects += told
            times |= more
        if passed.changes:
            effects.append(KvChanged(passed.changes))
        for one in passed.joined:
            stretch.join(one.seq_id)
            way.join(one)
        self._begin_next(way, step, is_mixed=is_mixed)
        if effects:
            self._reader.hear(at_ns, effects, records, times)

    def _begin_next(self, way: Way, step: int, *, is_mixed: bool) -> None:
        """Let the telemetry know of the step after this one, where it is of another kind."""
        stretch, glide, at_ns = self._stretch, way.glide, way.ends_ns[step - 1]
        assert stretch is not None
        step_id = StepId(glide.first_id + step)
        prompts = glide.prompts_of(step + 1)
        if prompts is not None:
            self._tell_stretch(way, step)
            stretch.begin_mixed(step_id, at_ns, prompts.shares, glide.whole_shape(step + 1))
        elif is_mixed:
            stretch.only_decodes(step_id, at_ns)

    def _tell_stretch(self, way: Way, step: int) -> None:
        """Of all steps up to this one, since which the same sequences decode."""
        stretch = self._stretch
        assert stretch is not None
        first = way.glide.shape(stretch.step + 1)
        stretch.decode(first, way.glide.shape(step), step, way.ends_ns)

    def _land(self, way: Way, *, is_landed: bool = False) -> None:
        """The glide is over: the core is where the glide has brought it, and a step runs."""
        glide, stretch = way.glide, self._stretch
        assert stretch is not None
        done = glide.done
        way.tell(done)
        self._tell_stretch(way, done)
        for one in glide.decoding:
            stretch.leave(one.seq_id, one.length, way.ends_ns)
        plans = [running.plan for running in self.core._steps] if is_landed else glide.land()
        self._end_ns = way.ends_ns[done]
        stretch.end(Ns(self._end_ns - way.elapsed_ns[done]), plans)
        self._started = deque(plans)
        self._end, self._elapsed_ns = self._steps.outcome(plans[0])
        self._busy_ns += way.busy_ns(done)
        self._way = self._stretch = None
        self._epoch += 1
