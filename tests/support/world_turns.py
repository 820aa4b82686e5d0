"""How requests come to a simulated cluster, and which of its workers are away meanwhile."""

from collections.abc import Callable, Iterable, Iterator
from random import Random

from headrace.core.base.request import SeqSpec
from headrace.core.base.worker import Role
from support.cluster_parts import Line, Worker
from support.cluster_world import ClusterWorld


def turns(
    world: ClusterWorld,
    rng: Random,
    asked: Iterable[tuple[SeqSpec, ...]],
    *,
    share: float = 0.05,
    step: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Until all requests have come, one in this share of turns, and ended. Each turn ends with a
    step, of the world's own if nobody has another.
    """
    advance = step or world.advance
    waiting = list(asked)
    while waiting or world.living:
        if waiting and (not world.living or rng.random() < share):
            world.submit(waiting.pop(0))
        yield
        advance()


class Away:
    """Workers that the only front end has given up, and that live on."""

    def __init__(self, world: ClusterWorld, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._workers: list[Worker] = []

    def send(self, worker: Worker) -> bool:
        """False where it is away already."""
        if worker in self._workers:
            return False
        self._workers.append(worker)
        self._world.cut(worker.lines[-1])
        return True

    def come_back(self, share: float) -> Iterator[Line]:
        """Some do in this share of turns, and at once where nobody is left who decodes."""
        while self._workers and (self._is_hopeless or self._rng.random() < share):
            yield self._heal(self._workers.pop(self._rng.randrange(len(self._workers))))

    def all_come_back(self) -> None:
        while self._workers:
            self._heal(self._workers.pop(0))

    def _heal(self, worker: Worker) -> Line:
        return self._world.heal(worker, self._world.fronts[0])

    @property
    def _is_hopeless(self) -> bool:
        workers = self._world.workers
        return all(one in self._workers or one.role is Role.PREFILL for one in workers)
