"""How other people's engines are given the default model and started as servers.

Decides what each needs for the same work: the default model's weights, as many threads, room for
every load, a prefix cache where it has one. Refuses to know what is offered.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.machine import machine
from headrace.bench.server import free_port
from headrace.live.machine import machine_facts
from headrace.models.hub import ensure_default_model
from support.engine_process import EngineProcess
from support.llama_cpp_server import LlamaCppServer
from support.peers.environments import folder_of, python_of, run, version_of

HERE = Path(__file__).parent
CONTEXT_TOKENS = 4096
EXPORT_TIMEOUT_S = 600.0
VLLM_KV_GB = 2


@dataclass(frozen=True)
class Peer:
    """`extra`: what of a request makes it ignore the end of text, as JSON."""

    start: Callable[[Path], EngineProcess]  # with its log
    start_timeout_s: float
    extra: str = '{"ignore_eos": true}'


def start_llama_cpp(log: Path) -> EngineProcess:
    return LlamaCppServer(
        log,
        free_port(),
        threads=machine_facts().num_cores,
        context=CONTEXT_TOKENS,
        python=python_of("llama-cpp"),
        model=version_of("llama-cpp"),
    )


def start_openvino(log: Path) -> EngineProcess:
    port, folder = (
        free_port(),
        _exported("openvino", "openvino_model.py", "openvino_model.xml", log),
    )
    command = [str(python_of("openvino")), str(HERE / "openvino_server.py"), str(folder)]
    command += ["--port", str(port), "--threads", str(machine_facts().num_cores)]
    command += ["--name", version_of("openvino")]
    return EngineProcess(command, f"http://127.0.0.1:{port}", log, {})


def start_vllm(
    log: Path,
    *,
    port: int = 0,
    threads: int = 0,
    model: str = "",
    kv_events: Mapping[str, object] | None = None,
    is_eager: bool = False,
) -> EngineProcess:
    """All threads, a free port and its version as the model's name unless others are given. What is
    eager starts without compiling, and is slower."""
    port, threads = port or free_port(), threads or machine_facts().num_cores
    arguments: dict[str, object] = {
        "model": vllm_model(log),
        "served-model-name": model or version_of("vllm"),
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": CONTEXT_TOKENS,
        # Without instructions for bf16 its products are many times slower than those of floats.
        "dtype": "bfloat16" if "avx512_bf16" in machine().isa else "float32",
    }
    if kv_events is not None:
        arguments["kv-events-config"] = json.dumps(kv_events)
    command = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    if is_eager:
        command.append("--enforce-eager")
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GB),
        # Else it leaves a core to its other processes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    return EngineProcess(command, f"http://127.0.0.1:{port}", log, environment)


def vllm_model(log: Path) -> Path:
    """The default model's folder as vLLM reads it, tokenizer included."""
    return _exported("vllm", "vllm_model.py", "model.safetensors", log)


def _exported(engine: str, script: str, result: str, log: Path) -> Path:
    """The model's folder, made by the engine's own environment where it is not there yet."""
    folder = folder_of(engine) / "model"
    if not (folder / result).exists():
        folder.mkdir(exist_ok=True)
        gguf = ensure_default_model()
        run([python_of(engine), HERE / script, gguf, folder], log, EXPORT_TIMEOUT_S)
    return folder


PEERS: Mapping[str, Peer] = {
    # It has no field that ignores the end of text: its two ends are made impossible instead.
    "llama-cpp": Peer(start_llama_cpp, 120.0, '{"logit_bias": {"0": -100, "2": -100}}'),
    "openvino": Peer(start_openvino, 300.0),
    "vllm": Peer(start_vllm, 1200.0),
}
