"""From a configuration to an engine that answers, and one clear line where that cannot be."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError, DeviceError
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig, SchedulerConfig
from headrace.core.config.telemetry import TelemetryConfig
from headrace.live import boot as boot_module
from headrace.live.boot import boot, make_backend
from headrace.live.event_log import EventLogReader
from headrace.live.generate import GenerateRequest
from support.fake_engine import FormulaExecutor
from support.model_files import RecordingBackend, gguf_bytes, gguf_tensors, llama_metadata, write

BLOCK_BYTES = 2 * 2 * 2 * 2 * 8 * 16  # K and V, bf16, layers, KV heads, head size, tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", gguf_bytes(llama_metadata(), gguf_tensors()))


@pytest.fixture
def executor() -> Iterator[FormulaExecutor]:
    executor = FormulaExecutor(num_blocks=64, max_model_len=128)
    yield executor
    executor.close()


@pytest.fixture(autouse=True)
def recording_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_module, "make_backend", lambda device: RecordingBackend())


def config(path: Path, **sections: Any) -> Config:
    own = {"path": str(path)} | sections.pop("model", {})
    return Config(model=ModelConfig(**own), **sections)


def test_a_booted_model_answers(model: Path, executor: FormulaExecutor, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    log = tmp_path / "logs" / "engine.hrlog"
    booted = boot(
        config(model, telemetry=TelemetryConfig(event_log=str(log))),
        executor=executor,
        on_progress=lambda *stage: stages.append(stage),
    )
    request = GenerateRequest(
        request_id="r", prompt_tokens=(5, 6), params=SamplingParams(max_tokens=4)
    )
    deltas = list(booted.text_engine.stream_sync(request))
    assert sum(len(delta.token_ids) for delta in deltas) == 4
    assert booted.name == booted.config.model.name == "tiny"
    assert (booted.config.model.max_model_len, booted.text_engine.max_model_len) == (128, 128)
    assert booted.kv.block_bytes == BLOCK_BYTES
    assert booted.ledger.kv == booted.kv.memory_bytes == booted.config.kv.memory_bytes > 0
    assert booted.ledger.weights > 0
    assert booted.ledger.fits
    assert stages[-1][0] == "load"
    assert stages[-1][1] == stages[-1][2] > 0
    # A cost model is measured only for those who decide by it.
    assert executor.num_steps == 4
    booted.close()
    booted.close()
    with EventLogReader(log) as frames:
        assert len(list(frames)) == 5


def test_early_rejection_gets_a_measured_cost_model(model: Path, executor: FormulaExecutor) -> None:
    boot(config(model, scheduler=SchedulerConfig(early_reject=True)), executor=executor)
    assert executor.num_steps > 10


def test_settings_decide_name_and_length(model: Path, executor: FormulaExecutor) -> None:
    booted = boot(config(model, model={"name": "mine", "max_model_len": 48}), executor=executor)
    assert booted.name == "mine"
    assert booted.kv.max_model_len == 48
    booted.close()


def test_a_template_file_replaces_the_models_own(
    model: Path, executor: FormulaExecutor, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "mine.jinja", "{{ bos_token }}<{{ messages[0].content }}>{{ eos_token }}"
    )
    booted = boot(config(model, model={"chat_template": str(path)}), executor=executor)
    template = booted.loaded.chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": "hi"}])
    assert text == "<|endoftext|><hi><|im_end|>"
    booted.close()
    with pytest.raises(ConfigError, match="none: cannot be read"):
        boot(config(model, model={"chat_template": str(tmp_path / "none")}), executor=executor)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"kv": KvConfig(memory_bytes=2 * BLOCK_BYTES)}, "--max-model-len 32"),
        ({"kv": KvConfig(memory_bytes=1 << 60)}, "--kv-memory .* fits"),
        ({"model": {"max_model_len": 129}}, "128"),
        ({"model": {"path": "/no/such/model.gguf"}}, "no such"),
    ],
)
def test_what_does_not_fit_says_what_would(
    model: Path, executor: FormulaExecutor, sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        boot(config(model, **sections), executor=executor)
    assert re.search(says, str(caught.value))


def test_a_device_that_refuses_is_the_operators_business(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise DeviceError("out of memory")

    monkeypatch.setattr(RecordingBackend, "compile", refuse)
    with pytest.raises(ConfigError, match=r"out of memory[\s\S]*kv.memory_bytes"):
        boot(config(model))


@pytest.mark.parametrize("kind", ["folder", "pipe without a reader"])
def test_a_log_that_cannot_be_written_closes_the_executor(
    model: Path, executor: FormulaExecutor, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "log"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(ConfigError, match="event log"):
        boot(config(model, telemetry=TelemetryConfig(event_log=str(path))), executor=executor)
    assert executor._is_closed


def test_what_a_backend_has_not_is_refused_before_a_model_is_read() -> None:
    with pytest.raises(ConfigError, match="--isa is portable, and the torch backend"):
        make_backend(DeviceConfig(backend="torch", isa="portable"))


@pytest.mark.parametrize(
    ("backend", "hint"), [("torch", r"\.\[torch\]"), ("native", "pip install")]
)
def test_a_backend_that_is_not_installed_says_how_to_get_it(
    backend: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"headrace.ops.{backend}.backend", None)
    with pytest.raises(ConfigError, match=hint):
        make_backend(DeviceConfig(backend=backend))
