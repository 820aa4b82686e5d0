"""Front ends that ask for the same engine in other words share it; others hear what differs."""

from dataclasses import replace

import pytest

from headrace.cluster.agreement import SHARED_SECTIONS, differences
from headrace.core.config.merge import from_settings, values_of
from headrace.core.config.resolve import MachineFacts, ModelFacts, resolve
from headrace.core.config.schema import Config
from headrace.core.config.settings import SETTINGS

MACHINE = MachineFacts(
    num_cores=6,
    total_bytes=16 << 30,
    available_bytes=8 << 30,
    isas=("amx", "avx512", "avx2", "portable"),
    kv_device="eth1",
)
MODEL = ModelFacts(
    name="tiny",
    max_model_len=2048,
    weight_bytes=100 << 20,
    activation_bytes=30 << 20,
    block_bytes=1 << 18,
)
AUTO = {"nixl": "auto"}  # of what else is open by default
# Those that stay open here: a file is what its name says, and this `auto` is a way of its own.
STAY = {"model.path", "model.chat_template", "scheduler.overlap"}


def found(asked: Config, served: Config, machine: MachineFacts = MACHINE) -> list[str]:
    return differences(asked, served, resolve(served, machine, MODEL))


def open_keys() -> list[str]:
    values = values_of(from_settings(AUTO))
    return [
        key
        for key, setting in SETTINGS.items()
        if setting.section in SHARED_SECTIONS
        and values[key] in ("auto", "", 0)
        and values[key] is not False
        and key not in STAY
    ]


@pytest.mark.parametrize("key", open_keys())
def test_what_is_open_is_the_value_that_it_stands_for(key: str) -> None:
    asks_nothing = from_settings(AUTO)
    value = values_of(resolve(asks_nothing, MACHINE, MODEL).config)[key]
    _, name = key.split(".")
    explicit = from_settings({**AUTO, name: value})
    assert values_of(explicit)[key] != values_of(asks_nothing)[key]
    assert found(explicit, asks_nothing) == []
    assert found(asks_nothing, explicit) == []


def test_the_torch_backend_rounds_nothing_whether_it_is_told_so_or_not() -> None:
    torch = from_settings({"backend": "torch"})
    exact = from_settings({"backend": "torch", "activations": "f32", "attention": "f32"})
    assert found(exact, torch) == found(torch, exact) == []


def test_every_setting_that_differs_is_told_with_both_values() -> None:
    asked = from_settings({"activations": "int8", "max_running_seqs": 8, "port": 1234})
    assert found(asked, Config()) == [
        "device.activations = 'int12' (from 'auto'), not 'int8'",
        "scheduler.max_running_seqs = 256, not 8",
    ]
    assert found(Config(), asked) == [
        "device.activations = 'int8', not 'int12' (from 'auto')",
        "scheduler.max_running_seqs = 8, not 256",
    ]


def test_what_auto_stands_for_is_the_workers_machines_matter() -> None:
    machine = replace(MACHINE, isas=("avx2", "portable"))
    asked = from_settings({"activations": "int12"})
    assert found(asked, Config()) == []
    assert found(asked, Config(), machine) == [
        "device.activations = 'int8' (from 'auto'), not 'int12'"
    ]


def test_what_the_engine_could_not_serve_is_told_as_it_was_said() -> None:
    asked = from_settings({"max_model_len": 4096})
    assert found(asked, Config()) == ["model.max_model_len = 0, not 4096"]
