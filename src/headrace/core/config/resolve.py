"""What is left open in a Config ("auto", 0, empty) becomes numbers, here and nowhere else.

Decides every value that depends on the machine or the model; refuses to look at either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.base.errors import ConfigError
from headrace.core.base.names import find_name_fault
from headrace.core.config.arithmetic import choose_arithmetic
from headrace.core.config.ledger import ByteLedger, KvPlan, plan_kv
from headrace.core.config.merge import config_of, values_of
from headrace.core.config.schema import Config, DeviceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What headrace may use of this machine."""

    num_cores: int  # that this process may run on, limits of its container included
    total_bytes: int
    available_bytes: int  # that this process may have, what it holds already included
    isas: tuple[str, ...] = ()  # that the native backend can use, fastest first
    kv_device: str = ""  # network interface by which others copy KV; empty = there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a loaded model takes and allows."""

    name: str
    max_model_len: int  # that the model itself allows
    weight_bytes: int
    activation_bytes: int  # most that a step of scheduler.step_tokens takes
    block_bytes: int  # of one KV block, all layers
    block_size: int = 16  # tokens
    other_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Resolution:
    """A Config in which nothing that the facts decide is open."""

    config: Config
    reasons: Mapping[str, str]  # key -> why it has the value that it was given here
    kv: KvPlan | None  # None where no model was given
    machine: MachineFacts
    model: ModelFacts | None = None


def resolve(config: Config, machine: MachineFacts, model: ModelFacts | None = None) -> Resolution:
    """Fill in what `config` leaves open. Without a model, what depends on one stays open.

    Resolving a second time changes nothing. ConfigError where the model cannot do what was asked or
    its KV does not fit.
    """
    values = values_of(config)
    reasons: dict[str, str] = {}

    def fill(key: str, value: object, reason: str) -> None:
        if values[key] in (0, "", "auto") and value != values[key]:
            values[key], reasons[key] = value, reason

    fill("device.threads", machine.num_cores, "cores that this process may use")
    fill("scheduler.chunk_tokens", config.scheduler.step_tokens, "scheduler.step_tokens")
    device = config.device
    if device.backend == "native" and machine.isas:
        fill("device.isa", machine.isas[0], "the fastest that this CPU and build have")
    if device.backend != "native" or machine.isas:
        chosen = choose_arithmetic(
            device.backend, str(values["device.isa"]), device.activations, device.attention
        )
        fill("device.activations", chosen.activations, chosen.why_activations)
        fill("device.attention", chosen.attention, chosen.why_attention)
    if config.kv.nixl and machine.kv_device:  # without a name it is not wanted
        fill("kv.nixl", machine.kv_device, "the interface of the way to the front end")
    kv = None
    if model is not None:
        fill("model.name", model.name, "the model's file")
        _check_name(str(values["model.name"]))
        fill("model.max_model_len", model.max_model_len, "the model's own limit")
        kv = _plan_kv(config_of(values), machine, model)
        fill("kv.memory_bytes", kv.memory_bytes, kv.reason)
    return Resolution(config_of(values), reasons, kv, machine, model)


def check_device(device: DeviceConfig, isas: Sequence[str]) -> None:
    """Raises ConfigError for what the backend has not. `isas` are those that the native one can use
    here, fastest first; empty = it is not built, which is told elsewhere.
    """
    if device.backend == "native":
        if device.isa != "auto" and isas and device.isa not in isas:
            raise ConfigError(
                f"--isa is {device.isa}, which this machine and build cannot use",
                hint=f"they can use {', '.join(isas)}; auto takes the fastest",
            )
        return
    for name, value, kept in (
        ("isa", device.isa, ("auto",)),
        ("activations", device.activations, ("auto", "f32")),
        ("attention", device.attention, ("auto", "f32")),
    ):
        if value not in kept:
            raise ConfigError(
                f"--{name} is {value}, and the {device.backend} backend has none of that",
                hint=f"leave it out, or choose the one that has: --backend native --{name} {value}",
            )


def _check_name(name: str) -> None:
    if fault := find_name_fault(name):
        raise ConfigError(f"the model's name {fault}", hint="`--model-name` gives it another")


def _plan_kv(config: Config, machine: MachineFacts, model: ModelFacts) -> KvPlan:
    if config.model.max_model_len > model.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {config.model.max_model_len}, the model allows"
            f" {model.max_model_len}"
        )
    return plan_kv(
        ByteLedger(
            weights=model.weight_bytes,
            activations=model.activation_bytes,
            other=model.other_bytes,
            available=machine.available_bytes,
        ),
        asked_bytes=config.kv.memory_bytes,
        block_bytes=model.block_bytes,
        block_size=model.block_size,
        max_model_len=config.model.max_model_len,
        max_running_seqs=config.scheduler.max_running_seqs,
        step_tokens=config.scheduler.step_tokens,
    )
