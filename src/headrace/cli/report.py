"""The figures of a model that was or could be booted, and the same figures as a table."""

import json
from typing import TYPE_CHECKING, Any

from headrace.core.config.ledger import ByteLedger, KvPlan
from headrace.core.config.units import counted, format_bytes

if TYPE_CHECKING:
    from headrace.cluster.boot import BootedCluster
    from headrace.live.boot import Booted

USUAL_TOKENS = 512  # of a request, for those who ask how many fit


def memory_figures(ledger: ByteLedger) -> dict[str, int]:
    return {
        "weights_bytes": ledger.weights,
        "activations_bytes": ledger.activations,
        "kv_bytes": ledger.kv,
        "staging_bytes": ledger.staging,
        "other_bytes": ledger.other,
        "total_bytes": ledger.total,
        "available_bytes": ledger.available,
    }


def kv_figures(kv: KvPlan, dtype: str) -> dict[str, Any]:
    usual = min(USUAL_TOKENS, kv.max_model_len)
    return {
        "dtype": dtype,
        "num_blocks": kv.num_blocks,
        "block_size_tokens": kv.block_size,
        "block_bytes": kv.block_bytes,
        "num_tokens": kv.num_tokens,
        "num_seqs_by_num_tokens": {
            str(num_tokens): kv.num_seqs_of(num_tokens)
            for num_tokens in dict.fromkeys((usual, kv.max_model_len))
        },
        "reason": kv.reason,
    }


def serve_figures(booted: "Booted | BootedCluster", url: str, started_s: float) -> dict[str, Any]:
    """What an operator should know at the start; units are in the keys. Where there are several
    workers, device, memory and KV are those of each.
    """
    description, device = booted.description, booted.config.device
    return {
        "url": url,
        "model": {
            "name": booted.name,
            "architecture": description.architecture,
            "num_parameters": description.num_parameters,
            "weight_types": description.weight_types,
            "file_bytes": description.file_bytes,
            "max_model_len_tokens": booted.kv.max_model_len,
            "has_chat_template": booted.chat_template is not None,
        },
        "device": {
            "backend": device.backend,
            "isa": device.isa,
            "num_threads": device.threads,
            "activations": device.activations,
            "attention": device.attention,
        },
        "memory": memory_figures(booted.ledger),
        "kv": kv_figures(booted.kv, booted.config.kv.dtype),
        "num_workers": booted.config.cluster.num_workers,
        "started_s": round(started_s, 3),
    }


def serve_facts(figures: dict[str, Any]) -> dict[str, dict[str, str]]:
    """`serve_figures` in words."""
    model, device = figures["model"], figures["device"]
    workers = {}
    if figures["num_workers"] > 1:
        workers["workers"] = f"{figures['num_workers']} processes; what follows is of each"
    return {
        "model": {
            "name": model["name"],
            "weights": f"{model['architecture']}, {_count(model['num_parameters'])} parameters,"
            f" {model['weight_types']}",
            "longest": f"{model['max_model_len_tokens']} tokens, prompt and answer",
        },
        "device": workers | {"backend": _device(device)},
        "memory": memory_facts(figures["memory"]),
        "KV": kv_facts(figures["kv"]),
        "address": {
            "URL": f"{figures['url']}/v1  (ready after {figures['started_s']:.1f} s,"
            " Ctrl-C drains and stops)",
        },
    }


def memory_facts(memory: dict[str, int]) -> dict[str, str]:
    words = {
        "weights": "weights_bytes",
        "activations": "activations_bytes",
        "KV pool": "kv_bytes",
        "staging": "staging_bytes",
        "other": "other_bytes",
        "total": "total_bytes",
    }
    facts = {word: f"{format_bytes(memory[key]):>9}" for word, key in words.items() if memory[key]}
    share = memory["total_bytes"] / max(1, memory["available_bytes"])
    facts["total"] += f"  {share:.0%} of {format_bytes(memory['available_bytes'])} available"
    return facts


def kv_facts(kv: dict[str, Any]) -> dict[str, str]:
    fits = ", or ".join(
        f"{counted(count, 'request')} of {num_tokens}"
        for num_tokens, count in kv["num_seqs_by_num_tokens"].items()
    )
    return {
        "fits": f"{kv['num_tokens']} tokens in {kv['num_blocks']} {kv['dtype']} blocks: {fits}",
        "size": kv["reason"],
    }


def _device(device: dict[str, Any]) -> str:
    """The torch backend chooses neither an instruction set nor a precision of its own."""
    chosen = [device["backend"]]
    if device["backend"] == "native":
        chosen += [device["isa"], f"{device['activations']} activations"]
        chosen += [f"{device['attention']} attention"]
    return ", ".join([*chosen, counted(device["num_threads"], "thread")])


def _count(number: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return str(number)


def drain_line(num_requests: int, timeout_s: float) -> str:
    """What whoever stopped the server is told while it goes on."""
    requests = counted(num_requests, "request")
    return f"draining {requests} (up to {timeout_s:g} s); press Ctrl-C again to stop now"


def curl_line(figures: dict[str, Any]) -> str:
    """A request that can be pasted into a shell."""
    name = figures["model"]["name"]
    if figures["model"]["has_chat_template"]:
        path = "chat/completions"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, body = "completions", {"prompt": "Once upon a time"}
    text = json.dumps({"model": name, **body}, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {figures['url']}/v1/{path} -H 'Content-Type: application/json' -d '{text}'"
