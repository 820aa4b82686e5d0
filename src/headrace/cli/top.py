"""`headrace top`: what a server does, live in the terminal, from its /metrics.

Decides which figures an operator wants to see at a glance; refuses to know more than any other
reader of /metrics.
"""

import time
from contextlib import suppress
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli import top_gateway
from headrace.cli.output import console, print_facts, print_json
from headrace.cli.top_reading import Reading, Span, number, percent, read
from headrace.core.base.errors import ConfigError
from headrace.core.base.names import one_line


def figures(now: Reading, before: Reading | None) -> dict[str, Any]:
    """What is shown; rates and means are those since the reading before, or None."""
    span = Span(now, before)
    return {
        "num_running_seqs": round(now.value("headrace_running_seqs")),
        "num_waiting_seqs": round(now.value("headrace_waiting_seqs")),
        "kv_usage_ratio": now.value("headrace_kv_usage_ratio"),
        "output_tokens_per_s": span.rate("headrace_output_tokens_total"),
        "computed_tokens_per_s": span.rate("headrace_computed_tokens_total"),
        "steps_per_s": span.rate("headrace_steps_total"),
        "prefix_hit_ratio": span.share(
            "headrace_prefix_hit_tokens_total", "headrace_prefix_queried_tokens_total"
        ),
        "ttft_ms_mean": span.mean_ms("headrace_ttft_seconds"),
        "itl_ms_mean": span.mean_ms("headrace_itl_seconds"),
        "e2e_ms_mean": span.mean_ms("headrace_e2e_seconds"),
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
            "tokens": f"{number(shown['output_tokens_per_s'])}/s sent,"
            f" {number(shown['computed_tokens_per_s'])}/s computed"
            f" in {number(shown['steps_per_s'])} steps/s",
            "KV": f"{shown['kv_usage_ratio']:.0%} held,"
            f" {percent(shown['prefix_hit_ratio'])} of prompts found",
        },
        "latency": {
            "TTFT": f"{number(shown['ttft_ms_mean'])} ms",
            "ITL": f"{number(shown['itl_ms_mean'])} ms",
            "E2E": f"{number(shown['e2e_ms_mean'])} ms",
        },
        "goodput": {
            window: f"{of['goodput_requests_per_s']:.2f} requests/s kept every limit,"
            f" {percent(of['slo_attainment_ratio'])} of all"
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
        shown = _figures(read(url), before)
        print_json(shown) if as_json else print_facts(_facts(shown))
        return 0
    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                now = read(url)
            except ConfigError as error:
                live.update(Text(one_line(str(error)), "bold red"), refresh=True)
                continue
            live.update(_page(url, _facts(_figures(now, before))), refresh=True)
            before = now
    return 0


def _figures(now: Reading, before: Reading | None) -> dict[str, Any]:
    of = top_gateway.figures if top_gateway.is_gateway(now) else figures
    return of(now, before)


def _facts(shown: dict[str, Any]) -> dict[str, dict[str, str]]:
    return top_gateway.facts(shown) if "engines" in shown else facts(shown)


def _page(url: str, groups: dict[str, dict[str, str]]) -> Group:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for title, rows in groups.items():
        for index, (name, value) in enumerate(rows.items()):
            table.add_row(Text("" if index else title, "bold"), Text(name), Text(value))
    return Group(Text(f"{url}    {time.strftime('%H:%M:%S')}    Ctrl-C ends", "dim"), table)
