"""`headrace top`: what a server does, live in the terminal, from its /metrics.

Decides which figures an operator wants to see at a glance; refuses to know more than any other
reader of /metrics.
"""

import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli.output import console, print_facts, print_json
from headrace.core.base.errors import ConfigError
from headrace.core.base.names import one_line

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
    if any(name == "headrace_engine_up" for name, _ in samples):
        raise ConfigError(
            f"{page} is of a gateway, which computes nothing itself",
            hint="look at its engines, where these are headrace; its own figures are on that page",
        )
    return Reading(time.monotonic(), samples)


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return False


def figures(now: Reading, before: Reading | None) -> dict[str, Any]:
    """What is shown; rates and means are those since the reading before, or None."""

    def grown(name: str, **labels: str) -> float | None:
        return None if before is None else now.value(name, **labels) - before.value(name, **labels)

    def rate(name: str) -> float | None:
        if before is None or now.at_s <= before.at_s:
            return None
        return (grown(name) or 0.0) / (now.at_s - before.at_s)

    def mean_ms(name: str) -> float | None:
        count = grown(f"{name}_count")
        return 1e3 * (grown(f"{name}_sum") or 0.0) / count if count else None

    queried = grown("headrace_prefix_queried_tokens_total")
    return {
        "num_running_seqs": round(now.value("headrace_running_seqs")),
        "num_waiting_seqs": round(now.value("headrace_waiting_seqs")),
        "kv_usage_ratio": now.value("headrace_kv_usage_ratio"),
        "output_tokens_per_s": rate("headrace_output_tokens_total"),
        "computed_tokens_per_s": rate("headrace_computed_tokens_total"),
        "steps_per_s": rate("headrace_steps_total"),
        "prefix_hit_ratio": (grown("headrace_prefix_hit_tokens_total") or 0.0) / queried
        if queried
        else None,
        "ttft_ms_mean": mean_ms("headrace_ttft_seconds"),
        "itl_ms_mean": mean_ms("headrace_itl_seconds"),
        "e2e_ms_mean": mean_ms("headrace_e2e_seconds"),
        "by_window": _windows(now),
        "num_migrations": round(now.value("headrace_migrations_total")),
        "num_handoffs": round(now.value("headrace_handoffs_total")),
        "num_preemptions": round(now.value("headrace_preemptions_total")),
        "workers": _workers(now),
    }


def _windows(now: Reading) -> dict[str, Any]:
    name, attainment = "headrace_goodput_requests_per_second", "headrace_slo_attainment_ratio"
    return {
        window: {
            "goodput_requests_per_s": now.value(name, window=window),
            "slo_attainment_ratio": now.samples.get((attainment, (("window", window),))),
        }
        for window in now.labels_of(name, "window")
    }


def _workers(now: Reading) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "is_up": bool(now.value("headrace_worker_up", worker=name)),
            "role": _label(now, "headrace_worker_role", "role", worker=name),
            "phase": _label(now, "headrace_worker_phase", "phase", worker=name),
            "num_losses": _sum(now, "headrace_worker_losses_total", worker=name),
            "last_loss": _label(now, "headrace_worker_last_loss", "cause", worker=name),
            "num_starts": round(now.value("headrace_worker_starts_total", worker=name)),
            "num_running_seqs": round(now.value("headrace_worker_running_seqs", worker=name)),
            "num_waiting_seqs": round(now.value("headrace_worker_waiting_seqs", worker=name)),
            "kv_usage_ratio": now.value("headrace_worker_kv_usage_ratio", worker=name),
        }
        for name in now.labels_of("headrace_worker_up", "worker")
    ]


def _label(now: Reading, name: str, label: str, **others: str) -> str:
    """The value of a label that tells a state; empty = there is none."""
    for found, labels in now.samples:
        if found == name and others.items() <= dict(labels).items():
            return dict(labels)[label]
    return ""


def _sum(now: Reading, name: str, **labels: str) -> int:
    return round(
        sum(
            value
            for (found, all_labels), value in now.samples.items()
            if found == name and labels.items() <= dict(all_labels).items()
        )
    )


def facts(shown: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The figures of all workers together, in words."""
    groups = {
        "work": {
            "sequences": f"{shown['num_running_seqs']} running,"
            f" {shown['num_waiting_seqs']} waiting",
            "tokens": f"{_number(shown['output_tokens_per_s'])}/s sent,"
            f" {_number(shown['computed_tokens_per_s'])}/s computed"
            f" in {_number(shown['steps_per_s'])} steps/s",
            "KV": f"{shown['kv_usage_ratio']:.0%} held,"
            f" {_share(shown['prefix_hit_ratio'])} of prompts found",
        },
        "latency": {
            "TTFT": f"{_number(shown['ttft_ms_mean'])} ms",
            "ITL": f"{_number(shown['itl_ms_mean'])} ms",
            "E2E": f"{_number(shown['e2e_ms_mean'])} ms",
        },
        "goodput": {
            window: f"{of['goodput_requests_per_s']:.2f} requests/s kept every limit,"
            f" {_share(of['slo_attainment_ratio'])} of all"
            for window, of in shown["by_window"].items()
        },
        "since start": {
            "preemptions": str(shown["num_preemptions"]),
            "migrations": str(shown["num_migrations"]),
            "hand-offs": str(shown["num_handoffs"]),
        },
    }
    for worker in shown["workers"]:
        groups.setdefault("workers", {})[one_line(worker["name"])] = one_line(
            f"{_role(worker)}{worker['phase'] or ('up' if worker['is_up'] else 'down')},"
            f" started {worker['num_starts']} x{_losses(worker)},"
            f" {worker['num_running_seqs']} running, {worker['num_waiting_seqs']} waiting,"
            f" KV {worker['kv_usage_ratio']:.0%}"
        )
    return groups


def _role(worker: dict[str, Any]) -> str:
    return f"{worker['role']}, " if worker["role"] else ""


def _losses(worker: dict[str, Any]) -> str:
    if not worker["num_losses"]:
        return ""
    return f", lost {worker['num_losses']} x (last: {worker['last_loss'].replace('_', ' ')})"


def top(url: str, *, every_s: float, is_once: bool, as_json: bool) -> int:
    """Until Ctrl-C; once where nobody watches."""
    if not 0.1 <= every_s <= 3600:
        raise ConfigError(f"--every is {every_s:g}, it may be 0.1 to 3600 seconds")
    out = console()
    before = read(url)
    if as_json or is_once or not out.is_terminal:
        time.sleep(min(every_s, 1.0))
        shown = figures(read(url), before)
        print_json(shown) if as_json else print_facts(facts(shown))
        return 0
    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                now = read(url)
            except ConfigError as error:
                live.update(Text(one_line(str(error)), "bold red"), refresh=True)
                continue
            live.update(_page(url, facts(figures(now, before))), refresh=True)
            before = now
    return 0


def _page(url: str, groups: dict[str, dict[str, str]]) -> Group:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for title, rows in groups.items():
        for index, (name, value) in enumerate(rows.items()):
            table.add_row(Text("" if index else title, "bold"), Text(name), Text(value))
    return Group(Text(f"{url}    {time.strftime('%H:%M:%S')}    Ctrl-C ends", "dim"), table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
