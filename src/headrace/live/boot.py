"""From a configuration to an engine that answers: model, backend, KV pool, executor, engine, text.

What does not fit, is not there or cannot be read is a ConfigError that says what would do.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.adapters.executors.model import ModelExecutor
from headrace.adapters.executors.port import Executor
from headrace.adapters.movers.mover import PoolMover
from headrace.adapters.movers.nixl import NixlAgent, NixlMissing, interface_of
from headrace.adapters.movers.pool import SharedPool
from headrace.adapters.movers.port import Mover
from headrace.core.base.errors import ConfigError, DeviceError, InvariantError
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.worker import Role
from headrace.core.config.ledger import ByteLedger, KvPlan
from headrace.core.config.resolve import MachineFacts, Resolution, check_device, resolve
from headrace.core.config.resolve import ModelFacts as ModelSizes
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig, SchedulerConfig
from headrace.core.config.units import format_bytes
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.workload.recording import Begin, ModelFacts, PoolFacts
from headrace.live.calibrate import calibrate
from headrace.live.engine import LiveEngine
from headrace.live.generate import TextEngine
from headrace.live.machine import machine_facts, usable_isas
from headrace.live.step_fit import StepFit
from headrace.live.traffic import Facts
from headrace.models.hub import resolve_model
from headrace.models.load import LoadedModel, ModelDescription, load_model
from headrace.models.text.template import ChatTemplate
from headrace.ops.interface import Backend, KvLayout, KvType, Model

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (what is under way: "fetch" or "load", bytes done, bytes in all); or, where workers
have to come first, (WAIT, workers that have come, workers in all).
"""
WAIT = "wait"

BLOCK_SIZE = 16  # tokens of a KV block
_HAS_SHARED = hasattr(os, "memfd_create")
_ROW_BYTES = (
    64 << 10
)  # activations of one token, logits apart: an allowance for models of any family


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """A model that answers, and what it was made of."""

    name: str  # that clients use
    config: Config  # nothing in it is open
    resolution: Resolution
    kv: KvPlan
    ledger: ByteLedger
    loaded: LoadedModel
    spec: WorkerSpec
    kv_address: str  # where other workers copy KV from; empty = nowhere
    engine: LiveEngine
    text_engine: TextEngine
    step_fit: StepFit | None = None  # where traffic is recorded

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.loaded.chat_template

    @property
    def description(self) -> ModelDescription:
        return self.loaded.description

    @property
    def identity(self) -> str:
        """Changes with everything that may change the tokens of an answer, the program apart."""
        return identity_of(self.spec)

    @property
    def cost(self) -> FittedCostModel:
        """How long steps take, as far as that is known."""
        return self.engine.cost if self.step_fit is None else self.step_fit.cost()

    def facts(self) -> Facts:
        """For a recording of its traffic."""
        begin = Begin(
            block_tokens=self.spec.block_size,
            model=model_facts(self.description),
            is_alone=True,
            slo=self.config.telemetry.slo,
        )
        return Facts(begin=begin, look=self._pool_facts)

    def _pool_facts(self) -> tuple[PoolFacts, ...]:
        alone = PoolFacts(
            role=Role.MIXED,
            num_workers=1,
            spec=self.spec,
            config=self.config.worker,
            cost=self.cost,
            kv_block_bytes=self.kv.block_bytes,
        )
        return (alone,)

    def close(self) -> None:
        """Cancel what runs and free everything. Idempotent."""
        self.engine.close()
        self.loaded.close()


def model_facts(description: ModelDescription) -> ModelFacts:
    return ModelFacts(
        name=description.name,
        architecture=description.architecture,
        num_parameters=description.num_parameters,
        weight_types=description.weight_types,
    )


def identity_of(spec: WorkerSpec) -> str:
    return f"{spec.model_digest} {spec.kv_dtype}"


@dataclass(frozen=True, slots=True)
class AsWorker:
    """What makes an engine one of several: where workers of other machines find its KV, if they
    may, and what they have to know.
    """

    kv_host: str = ""
    secret: bytes = b""


def boot(
    config: Config,
    *,
    machine: MachineFacts | None = None,
    on_progress: Progress | None = None,
    executor: Executor | None = None,
    worker: AsWorker | None = None,
) -> Booted:
    """Load the model and start its engine.

    `machine` is what may be used of this one, where that is not all of it. `executor` replaces the
    backend's own, for tests and dry runs; its spec then decides the KV pool. As a `worker` of
    several it knows from the start how long its steps take, for a second of that, and others can
    copy KV from it where the backend allows. Raises ConfigError.
    """
    # Measured before the model takes its share, so that it counts all that there is to give.
    machine = machine_facts() if machine is None else machine
    if worker is not None:
        machine = replace(machine, kv_device=interface_of(worker.kv_host))
    path = resolve_model(config.model.path, _stage(on_progress, "fetch"))
    backend = make_backend(config.device)
    loaded = load_model(
        path,
        backend,
        max_model_len=config.model.max_model_len,
        chat_template=template_path(config.model),
        on_progress=_stage(on_progress, "load"),
    )
    try:
        return _booted(config, machine, loaded, backend, executor, worker)
    except BaseException:
        loaded.close()
        raise


def _booted(
    config: Config,
    machine: MachineFacts,
    loaded: LoadedModel,
    backend: Backend[Any, Any],
    executor: Executor | None,
    worker: AsWorker | None,
) -> Booted:
    resolution, kv = plan_memory(config, machine, loaded, backend)
    config = resolution.config
    mover = None
    # Another executor keeps its KV elsewhere, if it has any.
    if executor is None and worker and config.device.backend == "native" and _HAS_SHARED:
        mover = _make_mover(config.kv, SharedPool(kv.num_blocks, kv.block_bytes), worker)
    if executor is None:
        executor = _make_executor(config, loaded, backend, kv, mover)
    # The first request may be refused, so times must be known before it comes. The budget learns
    # them from the steps that run anyway.
    calibrates = worker is not None or config.scheduler.early_reject
    engine = _start_engine(config, executor, mover, calibrates)
    step_fit = None
    if config.telemetry.record:
        step_fit = StepFit(engine.cost)
        engine.observe(step_fit.observe)
    text_engine = TextEngine(
        engine,
        loaded.tokenizer,
        max_model_len=executor.spec.max_model_len,
        vocab_size=executor.spec.vocab_size,
    )
    return Booted(
        name=config.model.name,
        config=config,
        resolution=resolution,
        kv=kv,
        ledger=kv.ledger,
        loaded=loaded,
        spec=executor.spec,
        kv_address="" if mover is None else mover.address,
        engine=engine,
        text_engine=text_engine,
        step_fit=step_fit,
    )


def _make_mover(config: KvConfig, pool: SharedPool, worker: AsWorker) -> PoolMover:
    return PoolMover(
        pool,
        host=worker.kv_host,
        secret=worker.secret,
        nixl=_make_nixl(pool, config.nixl, worker.kv_host),
        most_s=config.lease_s,  # after which the lender may have let go of the blocks
    )


def _make_nixl(pool: SharedPool, device: str, host: str) -> NixlAgent | None:
    """None where nobody asked for it, nobody else could reach it, or it does not work here."""
    if not (device and host):
        return None
    try:
        if device == "auto":
            raise NixlMissing(f"no network interface has the address {host}")
        return NixlAgent(pool, device)
    except NixlMissing as fault:
        _log.warning("KV goes between machines over TCP: %s", fault)
        return None


def make_backend(device: DeviceConfig) -> Backend[Any, Any]:
    """The backend that the configuration names; ConfigError where it is not installed, or has not
    what is asked of it.
    """
    check_device(device, usable_isas())
    if device.backend == "torch":
        try:
            from headrace.ops.torch.backend import TorchBackend
        except ImportError as error:
            raise ConfigError(
                f"the torch backend is not installed: {error}",
                hint="pip install '.[torch]' in headrace's checkout, or use the native backend",
            ) from error
        return TorchBackend()
    try:
        from headrace.ops.native.backend import NativeBackend
    except ImportError as error:
        raise ConfigError(
            f"the native backend is not built: {error}",
            hint="install headrace from a wheel, or build it here with pip install .",
        ) from error
    return NativeBackend(device.threads, device.isa, device.activations, device.attention)


def _stage(on_progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if on_progress is None else partial(on_progress, stage)


def template_path(model: ModelConfig) -> Path | None:
    """The file whose template takes the place of the model's own; None = keep that."""
    return Path(model.chat_template).expanduser() if model.chat_template else None


def plan_memory(
    config: Config, machine: MachineFacts, loaded: LoadedModel, backend: Backend[Any, Any]
) -> tuple[Resolution, KvPlan]:
    """The configuration with nothing left open, and the KV pool that fits beside the model."""
    model = loaded.model
    facts = ModelSizes(
        name=loaded.description.name,
        max_model_len=model.max_model_len,
        weight_bytes=backend.weight_bytes(),
        activation_bytes=_activation_bytes(model, config.scheduler),
        block_bytes=_block_bytes(model, KvType(config.kv.dtype)),
        block_size=BLOCK_SIZE,
    )
    resolution = resolve(config, machine, facts)
    if resolution.kv is None:
        raise InvariantError("a resolution with a model plans its KV")
    return resolution, resolution.kv


def _block_bytes(model: Model[Any, Any], kv_type: KvType) -> int:
    return KvLayout(
        model.num_layers, model.num_kv_heads, model.head_dim, 1, BLOCK_SIZE, kv_type
    ).block_bytes


def _activation_bytes(model: Model[Any, Any], scheduler: SchedulerConfig) -> int:
    # Log probabilities of a prompt need the logits of all its tokens.
    return scheduler.step_tokens * (_ROW_BYTES + model.vocab_size * 4)


def _make_executor(
    config: Config,
    loaded: LoadedModel,
    backend: Backend[Any, Any],
    kv: KvPlan,
    mover: PoolMover | None,
) -> Executor:
    try:
        return ModelExecutor(
            backend,
            loaded.model,
            num_blocks=kv.num_blocks,
            kv_type=KvType(config.kv.dtype),
            step_tokens=config.scheduler.step_tokens,
            max_model_len=kv.max_model_len,
            kv_file=None if mover is None else mover.pool.file,
        )
    except DeviceError as error:
        raise ConfigError(
            f"the device cannot take the model: {error.message}",
            hint="lower scheduler.step_tokens, or kv.memory_bytes"
            f" (it is {format_bytes(kv.memory_bytes)})",
        ) from error


def _start_engine(
    config: Config, executor: Executor, mover: Mover | None, calibrates: bool
) -> LiveEngine:
    try:
        cost = FittedCostModel.prior()
        if calibrates:
            cost = calibrate(executor, step_tokens=config.scheduler.step_tokens)
        log = config.telemetry.event_log
        return LiveEngine(
            config.worker,
            executor,
            event_log=Path(log).expanduser() if log else None,
            cost=cost,
            mover=mover,
        )
    except OSError as error:
        executor.close()
        raise ConfigError(
            f"cannot write the event log: {error.strerror}", path=config.telemetry.event_log
        ) from error
    except BaseException:
        executor.close()
        raise
