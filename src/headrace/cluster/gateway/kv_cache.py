"""What one engine has cached, from its feed to the router.

Decides when the router hears of it anew: the engine is a new worker each time that it comes up.
"""

from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.kv_blocks import Changes, EngineBlocks
from headrace.cluster.gateway.kv_wire import Unreadable, read_batch
from headrace.cluster.gateway.switch import Switch
from headrace.core.router.events import WorkerKv, WorkerKvSnapshot


class EngineCache:
    def __init__(self, engine: Engine, switch: Switch) -> None:
        self.blocks = EngineBlocks()
        self.num_batches = 0
        self.num_unreadable = 0  # of these
        self._engine = engine
        self._switch = switch
        self._num_told = 0  # changes, since the engine came up

    def heard(self, payload: bytes) -> None:
        self.num_batches += 1
        try:
            events = read_batch(payload)
        except Unreadable:
            self.num_unreadable += 1
            return
        is_void, changes = self.blocks.apply(events)
        if is_void:
            self._tell_all(())
        self._tell(changes)

    def began_anew(self) -> None:
        self.blocks.clear()
        self._tell_all(())

    def came_up(self) -> None:
        """The router knows the engine, and nothing of its cache."""
        self._num_told = 0
        if names := self.blocks.names():
            self._tell_all(names)

    def _tell_all(self, names: tuple[bytes, ...]) -> None:
        if self._engine.worker_id is not None:
            self._switch.tell(WorkerKvSnapshot(self._engine.worker_id, self._num_told, names))

    def _tell(self, changes: Changes) -> None:
        if self._engine.worker_id is not None and changes:
            self._switch.tell(WorkerKv(self._engine.worker_id, self._num_told, tuple(changes)))
            self._num_told += len(changes)
