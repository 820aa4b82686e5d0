"""Whether a worker that failed lately gets requests: a circuit breaker for each name.

Failures add up and fade, whatever succeeds in between, since a worker that crashes every two
seconds succeeds in between. An open breaker lets single probes through after a while; enough of
them close it, a failed one opens it for twice as long. So does a failure soon after it was closed:
probes are short, and succeed between two crashes.
"""

from typing import Final

from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.schema import RouterConfig

HALF_LIFE_NS: Final = 30 * NS_PER_S  # of a failure
MUCH_FADED: Final = 0.5  # failures: what was before is forgiven
MAX_DOUBLINGS: Final = 5


class Breaker:
    __slots__ = (
        "_config",
        "_faded_ns",
        "_failures",
        "_num_opened",
        "_num_probes_ok",
        "is_closed",
        "is_probed",
        "until_ns",
    )

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._failures = 0.0
        self._faded_ns = Ns(0)
        self._num_opened = 0  # since it was well for long
        self._num_probes_ok = 0
        self.is_closed = True
        self.is_probed = False  # a probe is on its way
        self.until_ns = Ns(0)  # no probe before

    def allows(self, now: Ns) -> bool:
        return self.is_closed or (now >= self.until_ns and not self.is_probed)

    def is_forgettable(self, now: Ns) -> bool:
        return self.is_closed and self._faded(now) < 0.1

    def fail(self, now: Ns) -> None:
        if self.is_closed and self._faded(now) < MUCH_FADED:
            self._num_opened = 0
        self._failures = self._faded(now) + 1.0
        self._faded_ns = now
        if not self.is_closed or self._failures > self._config.breaker_failures - 0.5:
            self._open(now)

    def succeed(self, now: Ns) -> None:
        """A request ended well; only an open breaker cares."""
        if self.is_closed:
            return
        self.is_probed = False
        self._num_probes_ok += 1
        if self._num_probes_ok >= self._config.breaker_probes:
            self.is_closed = True
            # So that one is enough, and is remembered where one always is.
            self._failures = max(1.0, self._config.breaker_failures - 1.0)
            self._faded_ns = now

    def _open(self, now: Ns) -> None:
        if not self.is_closed and now < self.until_ns:
            return  # what was under way when it opened fails too, and says nothing new
        open_s = self._config.breaker_open_s * (1 << min(self._num_opened, MAX_DOUBLINGS))
        self.until_ns = Ns(now + round(open_s * NS_PER_S))
        self.is_closed = self.is_probed = False
        self._num_opened += 1
        self._num_probes_ok = 0

    def _faded(self, now: Ns) -> float:
        num_half_lives = (now - self._faded_ns) / HALF_LIFE_NS
        return self._failures * float(0.5**num_half_lives)
