"""What a request would cost at each worker, in predicted nanoseconds.

    total = queue + prefill weight * prefill + transfer + interference weight * interference
            + neighbour weight * neighbours

- queue: the prefill that is due there before it;
- prefill: of its tokens that are not cached there;
- transfer: of blocks that it would fetch from the worker that has most of them, where that is
  quicker than to compute them, or that come from the one that computes its prompt. Between workers
  of one machine they go through memory, between others over the network (`AUTO_LINK`);
- interference: by which its own steps and output tokens come later, because other sequences decode
  beside it;
- neighbours: each sequence that decodes beside the prompt has a token that comes later by the time
  this takes. What a prefill worker holds does not decode there.

The form follows Mooncake's Conductor (Qin et al., 2025), with the cost model in the place of a
regression of its own, and with the decode side in the same currency.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.core.base.types import NS_PER_MS, Ns
from headrace.core.base.worker import Role
from headrace.core.config.schema import RouterConfig
from headrace.core.router.decision import Candidate
from headrace.core.router.events import RouteRequest
from headrace.core.router.fleet import Fleet
from headrace.core.router.index import bits_of
from headrace.core.router.predict import Predictor, Terms
from headrace.core.router.worker import Worker

NOBODY: Final = (0, 0)
AUTO_LINK: Final = "auto"  # a link for each pair of workers, as cost models call it:
MEMORY, NETWORK = "memory", "tcp"


class Pricing:
    """The prices of one request at one time."""

    def __init__(
        self,
        now: Ns,
        request: RouteRequest,
        config: RouterConfig,
        fleet: Fleet,
        hits: Iterable[tuple[int, int]],
        holders: tuple[int, int] = NOBODY,
        source: Worker | None = None,
    ) -> None:
        """`holders` have so many of its blocks, the most that anybody can be asked for. What comes
        from elsewhere comes from `source`.
        """
        self.request = request
        self.now = now
        self._config = config
        self._fleet = fleet
        self._num_output = min(request.max_tokens, config.expected_output_tokens)
        self._terms: dict[tuple[Predictor, int, str], Terms] = {}
        self._depths: dict[Worker, int] = {}
        have_most, self._deepest = holders
        self._holder = _best_source(map(fleet.with_bit, bits_of(have_most)), request)
        self._source = source if request.is_coming else self._holder
        is_moved = request.is_coming or self._holder is not None
        self._has_links = is_moved and config.kv_link == AUTO_LINK
        for workers, depth in hits:
            for bit in bits_of(workers):
                worker = fleet.with_bit(bit)
                self._depths[worker] = depth

    def num_hit_blocks(self, worker: Worker) -> int:
        return self._depths.get(worker, 0)

    def loads(self, workers: Sequence[Worker]) -> list[float]:
        """The part of the cost that has nothing to do with what is asked, for each worker."""
        now, output_weight = self.now, self._config.interference_weight * self._num_output
        return [
            (until_ns - now if (until_ns := worker.busy_until_ns) > now else 0)
            + output_weight * worker.output_extra_ns
            for worker in workers
        ]

    def totals(self, workers: Sequence[Worker]) -> tuple[list[float], int]:
        """(the cost for each worker, the index of the cheapest if nobody had cached anything).

        Most workers of a large fleet have nothing of a prompt: those of a kind are priced by one
        pair of figures, in as few operations as there can be.
        """
        now, output_weight = self.now, self._config.interference_weight * self._num_output
        misses = {} if self._has_links else self._misses()
        if len(misses) == 1:
            ((ttft_ns, num_steps),) = misses.values()
            totals = [
                (until_ns - now if (until_ns := worker.busy_until_ns) > now else 0)
                + output_weight * worker.output_extra_ns
                + num_steps * worker.step_extra_ns
                + ttft_ns
                for worker in workers
            ]
        else:
            totals = [
                load + (miss := self._miss(misses, worker))[0] + miss[1] * worker.step_extra_ns
                for worker, load in zip(workers, self.loads(workers), strict=True)
            ]
        if self.request.neighbour_weight:
            delays = [self._neighbours_ns(worker, 0) for worker in workers]
            totals = [total + delay for total, delay in zip(totals, delays, strict=True)]
        blind = totals.index(min(totals))
        depths = self._depths
        for index in [i for i, worker in enumerate(workers) if worker in depths] if depths else ():
            worker = workers[index]
            ttft_ns, num_steps = self._weighed(self.terms(worker))
            (load,) = self.loads((worker,))
            totals[index] = load + ttft_ns + num_steps * worker.step_extra_ns
            totals[index] += self._neighbours_ns(worker, depths[worker])
        return totals, blind

    def _misses(self) -> dict[tuple[Predictor, str], tuple[float, float]]:
        """What it costs each kind of worker that has nothing of it."""
        link = self._config.kv_link
        return {
            (predictor, link): self._weighed(self._terms_of(predictor, 0, link))
            for predictor in self._fleet.predictors
        }

    def _miss(
        self, misses: dict[tuple[Predictor, str], tuple[float, float]], worker: Worker
    ) -> tuple[float, float]:
        kind = worker.predictor, self._link_to(worker)
        miss = misses.get(kind)
        if miss is None:
            miss = misses[kind] = self._weighed(self._terms_of(worker.predictor, 0, kind[1]))
        return miss

    def _link_to(self, worker: Worker) -> str:
        """Over which what it lacks would come."""
        if not self._has_links:
            return self._config.kv_link
        source = self._source
        is_near = source is not None and source.up.machine == worker.up.machine != ""
        return MEMORY if is_near else NETWORK

    def _weighed(self, terms: Terms) -> tuple[float, float]:
        cost_ns = self._config.prefill_weight * terms.prefill_ns + terms.transfer_ns
        return cost_ns, self._config.interference_weight * terms.num_steps

    def _neighbours_ns(self, worker: Worker, depth: int) -> float:
        """What the delays of others count."""
        weight = self.request.neighbour_weight
        if not weight or worker.up.role is Role.PREFILL:
            return 0.0
        terms = self._terms_of(worker.predictor, depth, self._link_to(worker))
        return weight * worker.num_decoding * terms.prefill_ns

    def num_new_tokens(self, worker: Worker) -> int:
        """KV that it will hold there beside its hits, if it has the expected output."""
        num_tokens = self.request.num_tokens + self._num_output * self.request.num_choices
        return max(0, num_tokens - self.num_hit_blocks(worker) * worker.spec.block_size)

    def terms(self, worker: Worker) -> Terms:
        depth = self.num_hit_blocks(worker)
        return self._terms_of(worker.predictor, depth, self._link_to(worker))

    def _terms_of(self, predictor: Predictor, depth: int, link: str) -> Terms:
        kind = predictor, depth, link
        terms = self._terms.get(kind)
        if terms is None:
            terms = self._terms[kind] = self._find_terms(predictor, depth, link)
        return terms

    def _find_terms(self, predictor: Predictor, depth: int, link: str) -> Terms:
        num_tokens = max(1, self.request.num_tokens)
        if self.request.is_coming:
            num_coming = len(self.request.block_names) - depth
            coming_ns = self._fetch_ns(predictor, num_coming, link) or 0
            return Terms(predictor, num_tokens, depth + num_coming, num_coming, coming_ns)
        terms = Terms(predictor, num_tokens, depth)
        if (deepest := self._deepest) > depth:
            transfer_ns = self._fetch_ns(predictor, deepest - depth, link)
            if transfer_ns is not None:
                fetched = Terms(predictor, num_tokens, deepest, deepest - depth, transfer_ns)
                return min(terms, fetched, key=lambda either: either.ttft_ns)
        return terms

    def _fetch_ns(self, predictor: Predictor, num_blocks: int, link: str) -> int | None:
        gb_s = self._config.kv_network_gb_s
        if link != NETWORK or not gb_s:
            return predictor.fetch_ns(num_blocks, link)
        return round(num_blocks * predictor.block_bytes / gb_s) if predictor.block_bytes else None

    def first_token_ns(self, worker: Worker) -> int:
        """From now, if it goes to this worker."""
        return worker.due_ns(self.now) + self.terms(worker).ttft_ns

    def candidate(self, worker: Worker, total_ns: float) -> Candidate:
        terms = self.terms(worker)
        interference_ns = (
            self._num_output * worker.output_extra_ns + terms.num_steps * worker.step_extra_ns
        )
        holder = self._holder if terms.num_fetched else None
        age_ns = None if worker.stats_ns is None else self.now - worker.stats_ns
        return Candidate(
            worker_id=worker.worker_id,
            name=worker.name,
            num_hit_blocks=self.num_hit_blocks(worker),
            queue_ms=worker.due_ns(self.now) / NS_PER_MS,
            prefill_ms=terms.prefill_ns / NS_PER_MS,
            transfer_ms=terms.transfer_ns / NS_PER_MS,
            interference_ms=interference_ns / NS_PER_MS,
            neighbours_ms=self._neighbours_ns(worker, self.num_hit_blocks(worker)) / NS_PER_MS,
            total_ms=total_ns / NS_PER_MS,
            stats_age_ms=None if age_ns is None else age_ns / NS_PER_MS,
            num_fetched_blocks=terms.num_fetched,
            fetch_from=None if holder is None else holder.name,
            fetch_from_id=None if holder is None else holder.worker_id,
        )


def _best_source(holders: Iterable[Worker], request: RouteRequest) -> Worker | None:
    """Any of these, but none that may have stopped while there is another one."""
    last: Worker | None = None
    for last in holders:
        if last.worker_id not in request.excluded:
            break
    return last
