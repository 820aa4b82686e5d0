"""What a request would cost at the workers that could take it, and which of them a policy prefers.

Decides nothing that lasts: whoever asks may ask again.
"""

from headrace.core.base.types import Ns
from headrace.core.config.schema import RouterConfig
from headrace.core.router.caches import Caches
from headrace.core.router.events import RouteRequest
from headrace.core.router.explain import Choice
from headrace.core.router.fleet import Fleet, Survey
from headrace.core.router.policies import Chooser
from headrace.core.router.predict import Quote
from headrace.core.router.pricing import NOBODY, Pricing
from headrace.core.router.waiting import WaitingRoom
from headrace.core.router.worker import Worker


class Choices:
    def __init__(
        self, config: RouterConfig, fleet: Fleet, caches: Caches, room: WaitingRoom
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._caches = caches
        self._room = room
        self._chooser = Chooser(config.seed)

    def price(self, now: Ns, request: RouteRequest, source: Worker | None = None) -> Pricing:
        """`source` computes the prompt of a request that is coming."""
        hits = self._caches.match(now, request.block_names)
        holders = NOBODY
        if self._config.fetch_kv and self._config.kv_link and not request.is_coming:
            holders = self._caches.holders(request.block_names, hits)
        return Pricing(now, request, self._config, self._fleet, hits, holders, source)

    def quote(
        self, now: Ns, request: RouteRequest, survey: Survey, source: Worker | None
    ) -> Quote | None:
        """What it would cost where it costs least; None where there is nobody."""
        workers = [*survey.usable, *survey.full]
        if not workers:
            return None
        pricing = self.price(now, request, source)
        totals, _ = self.totals(survey, pricing, workers)
        total_ns = min(totals)
        worker = workers[totals.index(total_ns)]
        return Quote(worker.worker_id, total_ns, pricing.terms(worker))

    def choose(self, survey: Survey, pricing: Pricing) -> Choice | None:
        """The policy's choice; under `kv` that may be a worker without room, worth waiting for."""
        policy = self._config.policy
        workers = [*survey.usable, *survey.full] if policy == "kv" else survey.usable
        if not workers:
            return None
        totals, blind = self.totals(survey, pricing, workers)
        index, num_tied = self._chooser.choose(policy, workers, totals, pricing, self._fleet)
        return Choice(workers, totals, blind, index, num_tied, index < len(survey.usable))

    def totals(
        self, survey: Survey, pricing: Pricing, workers: list[Worker]
    ) -> tuple[list[float], int]:
        """As Pricing's; where there is no room, others may wait for it, too."""
        totals, blind = pricing.totals(workers)
        for index in range(len(survey.usable), len(workers)):
            totals[index] += self._room.held_ns(workers[index].worker_id)
        return totals, blind
