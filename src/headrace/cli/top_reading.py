"""What `headrace top` reads: a server's /metrics, and what has grown between two looks."""

import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from headrace.core.base.errors import ConfigError

TIMEOUT_S = 5.0
MAX_PAGE_BYTES = 8 << 20

_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a server's metrics."""

    at_s: float
    samples: dict[_Key, float]

    def value(self, name: str, **labels: str) -> float:
        return self.samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def labels_of(self, name: str, label: str) -> list[str]:
        """The values that a label has, in the page's order."""
        return [dict(labels)[label] for found, labels in self.samples if found == name and labels]


@dataclass(frozen=True, slots=True)
class Span:
    """From one reading to the next; what needs both is None while there is one alone."""

    now: Reading
    before: Reading | None

    def grown(self, name: str) -> float | None:
        return None if self.before is None else self.now.value(name) - self.before.value(name)

    def rate(self, name: str) -> float | None:
        """By the second."""
        if self.before is None or self.now.at_s <= self.before.at_s:
            return None
        return (self.grown(name) or 0.0) / (self.now.at_s - self.before.at_s)

    def mean_ms(self, name: str) -> float | None:
        """Of a histogram of seconds."""
        count = self.grown(f"{name}_count")
        return 1e3 * (self.grown(f"{name}_sum") or 0.0) / count if count else None

    def share(self, part: str, whole: str) -> float | None:
        grown = self.grown(whole)
        return (self.grown(part) or 0.0) / grown if grown else None


def read(url: str) -> Reading:
    """ConfigError where there is no headrace at that address."""
    if not is_http(url):
        raise ConfigError(f"{url!r} is no http address", hint="for instance http://127.0.0.1:8000")
    page = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_PAGE_BYTES).decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"{page} cannot be read: {reason}") from None
    samples = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
    }
    if not any(name.startswith("headrace_") for name, _ in samples):
        raise ConfigError(f"{page} is not of headrace")
    return Reading(time.monotonic(), samples)


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return False


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
