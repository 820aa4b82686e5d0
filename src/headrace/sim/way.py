"""A glide with its times, as far as they are known, and what was told of it.

Decides when a step of it has to be looked at; refuses to know what is done then.
"""

from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate, islice
from typing import Final

import msgspec

from headrace.core.base.types import Ns
from headrace.core.engine.core import EngineCore
from headrace.core.engine.glide import Glide
from headrace.core.engine.plain import Decoding, by_key
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import WorkerLoad
from headrace.core.router.front import PROGRESS_TOKENS
from headrace.sim.steps import ListedSteps
from headrace.sim.untold import Untold

MAX_STEPS: Final = 4096  # of one glide
# Whose times are looked for at once: somebody may come long before. Twice as many each time that
# nobody has.
FAR_STEPS: Final = 32


class Way:
    """`ends_ns` and `elapsed_ns` are of steps from the first one on, up to the next one that is to
    be looked at.
    """

    def __init__(
        self,
        glide: Glide,
        end_ns: Ns,
        elapsed_ns: Ns,
        steps: ListedSteps,
        untold: Untold,
        *,
        tells_at_once: bool,
    ) -> None:
        """`tells_at_once`: of blocks others hear as soon as something becomes of them."""
        self.glide = glide
        self.looked_at = 1  # the step that is to be looked at next
        self._tells_at_once = tells_at_once
        self.ends_ns = [end_ns]
        self.elapsed_ns = [elapsed_ns]
        self._steps = steps
        self._untold = untold
        self._far_steps = FAR_STEPS
        # By step modulo that many: whose reader has had so many tokens that the router hears of it.
        self._progress: dict[int, list[Decoding]] = {}
        for one in glide.decoding:
            self.join(one)

    def next_border(self, step: int) -> int:
        """The first step after this one, which was looked at, that is to be looked at.

        Until a sequence has a block of which others have heard, they could not ask for what comes
        after it.
        """
        glide, ends_ns, elapsed_ns = self.glide, self.ends_ns, self.elapsed_ns
        size, is_ahead = glide.block_size, glide.is_ahead
        far = step + self._far_steps
        border = max(step + 1, min(far, MAX_STEPS, glide.last_step, *glide.ends))
        for place in self._progress:
            border = min(border, _next_at(place, step, PROGRESS_TOKENS))
        if self._tells_at_once or not all(one.seq.chain.names for one in glide.decoding):
            for place in glide.places:
                border = min(border, _next_at(place, step, size))
                border = min(border, _next_at(place - is_ahead, step, size))
        border = glide.last_with_room(step, border)
        if border == far:
            self._far_steps *= 2
        if border > len(ends_ns):
            known = len(ends_ns)
            times_ns = self._steps.decode_ns(glide.shape(known + 1), border - known)
            elapsed_ns += times_ns
            ends_ns += islice(accumulate(times_ns, initial=ends_ns[-1]), 1, None)
        low_ns, high_ns = glide.alike_ns
        between_ns = elapsed_ns[step : border - 1]
        if not between_ns or (low_ns <= min(between_ns) and max(between_ns) < high_ns):
            return border
        are_alike = [low_ns <= one < high_ns for one in between_ns]
        return step + 1 + are_alike.index(False)

    def next_step(self, step: int) -> int:
        """The one after this, where prompts may be in it."""
        self._far_steps = FAR_STEPS
        del self.ends_ns[step:], self.elapsed_ns[step:]
        self.add(self._steps.elapsed_ns(self.glide.whole_shape(step + 1)))
        return step + 1

    def add(self, elapsed_ns: Ns) -> None:
        """How long the next step takes."""
        self.ends_ns.append(Ns(self.ends_ns[-1] + elapsed_ns))
        self.elapsed_ns.append(elapsed_ns)

    def num_done(self, now: Ns) -> int:
        return bisect_right(self.ends_ns, now)

    def busy_ns(self, num_done: int) -> int:
        """In steps that began within it, after the first one."""
        return sum(self.elapsed_ns[1 : num_done + 1])

    # ---- what readers hear

    def join(self, one: Decoding) -> None:
        place = (one.since + self._untold.num_until_told(one.seq_id)) % PROGRESS_TOKENS
        self._progress.setdefault(place, []).append(one)
        self._progress[place].sort(key=by_key)

    def leave(self, one: Decoding) -> None:
        for place, members in self._progress.items():
            if one in members:
                members.remove(one)
                if not members:
                    del self._progress[place]
                return

    def heard_with(self, step: int, ended: Collection[Decoding]) -> list[Decoding]:
        """Those of whom a reader hears with this step, in the order of plans."""
        due = self._progress.get(step % PROGRESS_TOKENS, ())
        if not ended:
            return [one for one in due if one.told < step]
        return sorted({*ended, *(one for one in due if one.told < step)}, key=by_key)

    def tell(self, step: int) -> None:
        """What everybody has after this step."""
        for one in self.glide.decoding:
            self.tell_one(one, step)

    def tell_one(self, one: Decoding, step: int) -> None:
        if one.told < step:
            tokens = self.glide.tokens(one, one.told, step)
            self._untold.add(one.seq_id, tokens, self.ends_ns[one.told : step])
            one.told = step

    # ---- what the core would say, had it not glided

    def load(self, core: EngineCore, now: Ns) -> WorkerLoad:
        kv, scheduler = core._kv, core._scheduler
        return WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued_prefill_tokens=scheduler.num_prefill_tokens if self.glide.is_busy else 0,
            num_kv_tokens=self.glide.num_planned_tokens(self.num_done(now)),
            num_free_blocks=kv.num_free,
            num_cached_blocks=kv.num_cached,
            num_pinned_blocks=kv.num_blocks - kv.num_free - kv.num_cached,
        )

    def stats(self, stats: EngineStats, now: Ns) -> EngineStats:
        num_more = self.num_done(now) - self.glide.done
        return msgspec.structs.replace(
            stats,
            num_steps=stats.num_steps + num_more,
            num_computed_tokens=stats.num_computed_tokens + num_more * len(self.glide.decoding),
            num_kv_tokens=self.glide.num_planned_tokens(self.num_done(now)),
        )


def _next_at(place: int, step: int, size: int) -> int:
    """The first step after this one that is at the place, modulo that many."""
    return step + 1 + (place - step - 1) % size
