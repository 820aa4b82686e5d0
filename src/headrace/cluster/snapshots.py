"""What workers have cached, told in parts, put together again. Belongs to the crew's thread."""

from headrace.cluster.wire import Snapshot
from headrace.core.base.errors import TransferError
from headrace.core.base.types import WorkerId
from headrace.core.router.events import WorkerKvSnapshot


class Snapshots:
    def __init__(self) -> None:
        self._parts: dict[WorkerId, list[bytes]] = {}  # names, of those that are not whole yet

    def hear(self, worker_id: WorkerId, part: Snapshot, num_blocks: int) -> WorkerKvSnapshot | None:
        """The snapshot that is whole by this part. TransferError where it has more than the
        worker's blocks.
        """
        names = self._parts.pop(worker_id, [])
        names += part.names
        if len(names) > num_blocks:
            raise TransferError(f"a snapshot of more than the {num_blocks} blocks that there are")
        if part.is_last:
            return WorkerKvSnapshot(worker_id, part.kv_no, tuple(names))
        self._parts[worker_id] = names
        return None

    def lose(self, worker_id: WorkerId) -> None:
        self._parts.pop(worker_id, None)
