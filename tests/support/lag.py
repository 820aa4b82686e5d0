"""How late a machine wakes whoever sleeps, for limits that hold where it has too much to do."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from support.beside import again_and_again

NAP_S = 0.005
FEW = 20  # waits, one after another, in anything that is measured


@dataclass
class Lag:
    worst_s: float = 0.0

    @property
    def forgiven_s(self) -> float:
        """What may be later than it should be, by the machine's fault."""
        return FEW * self.worst_s


@contextmanager
def measured_lag() -> Iterator[Lag]:
    lag = Lag()

    def nap() -> None:
        begin_s = time.monotonic()
        time.sleep(NAP_S)
        lag.worst_s = max(lag.worst_s, time.monotonic() - begin_s - NAP_S)

    with again_and_again(nap):
        yield lag
