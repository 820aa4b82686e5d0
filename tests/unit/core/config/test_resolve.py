"""What is left open becomes numbers once, with reasons."""

from dataclasses import replace

import msgspec
import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.config.merge import from_settings, values_of
from headrace.core.config.resolve import MachineFacts, ModelFacts, check_device, resolve
from headrace.core.config.schema import Config

MACHINE = MachineFacts(
    num_cores=6, total_bytes=16 << 30, available_bytes=8 << 30, isas=("avx2", "portable")
)
MODEL = ModelFacts(
    name="tiny",
    max_model_len=2048,
    weight_bytes=100 << 20,
    activation_bytes=30 << 20,
    block_bytes=1 << 18,
)


def test_everything_open_gets_a_value_and_a_reason() -> None:
    config, reasons, kv = (lambda r: (r.config, r.reasons, r.kv))(resolve(Config(), MACHINE, MODEL))
    assert config.device.threads == 6
    assert config.device.isa == "avx2"
    assert config.device.activations == "int8"
    assert config.device.attention == "f32"
    assert config.scheduler.chunk_tokens == config.scheduler.step_tokens
    assert config.model.name == "tiny"
    assert config.model.max_model_len == 2048
    assert kv is not None
    assert config.kv.memory_bytes == kv.memory_bytes == kv.ledger.kv
    before, after = values_of(Config()), values_of(config)
    assert reasons.keys() == {key for key in after if before[key] != after[key]}


def test_what_was_asked_stays() -> None:
    asked = from_settings(
        {
            "threads": 2,
            "isa": "portable",
            "activations": "f32",
            "attention": "bf16",
            "chunk_tokens": 64,
            "name": "mine",
            "max_model_len": 1024,
            "memory_bytes": "64MiB",
        }
    )
    resolution = resolve(asked, MACHINE, MODEL)
    assert resolution.config == asked
    assert resolution.reasons == {}
    assert resolution.kv is not None
    assert resolution.kv.num_full_seqs == 4


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        ("auto", ("int12", "bf16")),
        ("int8", ("int8", "bf16")),
        ("bf16", ("bf16", "bf16")),
        ("f32", ("f32", "f32")),
    ],
)
def test_tiles_round_as_is_fastest_with_them_where_that_is_allowed(
    asked: str, resolved: tuple[str, str]
) -> None:
    machine = replace(MACHINE, isas=("amx", "avx512", "avx2", "portable"))
    device = resolve(from_settings({"activations": asked}), machine, MODEL).config.device
    assert (device.activations, device.attention) == resolved


@pytest.mark.parametrize(
    ("asked", "told", "hint"),
    [
        (
            {"isa": "neon"},
            "--isa is neon, which this machine and build cannot use",
            "they can use avx2, portable; auto takes the fastest",
        ),
        (
            {"backend": "torch", "isa": "amx"},
            "--isa is amx, and the torch backend has none of that",
            "leave it out, or choose the one that has: --backend native --isa amx",
        ),
        ({"backend": "torch", "activations": "int8"}, "--activations is int8, and the torch", ""),
        ({"backend": "torch", "attention": "bf16"}, "--attention is bf16, and the torch", ""),
    ],
)
def test_what_the_backend_has_not_is_refused(asked: dict[str, str], told: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_device(from_settings(asked).device, MACHINE.isas)
    assert refused.value.message.startswith(told)
    assert hint in refused.value.hint


def test_what_a_backend_has_is_taken() -> None:
    for asked in ({"isa": "avx2"}, {"backend": "torch", "activations": "f32", "attention": "f32"}):
        check_device(from_settings(asked).device, MACHINE.isas)
    check_device(from_settings({"isa": "neon"}).device, ())  # it is not built


@pytest.mark.parametrize("model", [None, MODEL])
def test_resolving_again_changes_nothing(model: ModelFacts | None) -> None:
    once = resolve(Config(), MACHINE, model)
    again = resolve(once.config, MACHINE, model)
    assert again.config == once.config
    assert again.reasons == {}


def test_without_a_model_what_depends_on_it_stays_open() -> None:
    resolution = resolve(Config(), MACHINE)
    assert resolution.kv is None
    assert resolution.config.model == Config().model
    assert resolution.config.kv == Config().kv
    assert resolution.config.device.threads == 6


def test_the_torch_backend_has_no_instruction_set_and_rounds_nothing() -> None:
    resolution = resolve(from_settings({"backend": "torch"}), MACHINE)
    assert resolution.config.device.isa == "auto"
    assert resolution.config.device.activations == resolution.config.device.attention == "f32"


def test_the_interface_of_the_way_to_the_front_end_is_for_those_who_want_it() -> None:
    machine = replace(MACHINE, kv_device="eth1")
    for asked, device in (("", ""), ("auto", "eth1"), ("mlx5_0:1", "mlx5_0:1")):
        assert resolve(from_settings({"nixl": asked}), machine).config.kv.nixl == device
    assert resolve(from_settings({"nixl": "auto"}), MACHINE).config.kv.nixl == "auto"


def test_a_machine_without_the_extension_leaves_it_open() -> None:
    machine = MachineFacts(num_cores=1, total_bytes=1, available_bytes=1)
    assert resolve(Config(), machine).config.device.isa == "auto"


def test_a_length_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(from_settings({"max_model_len": 4096}), MACHINE, MODEL)
    assert caught.value.message == "model.max_model_len is 4096, the model allows 2048"


@pytest.mark.parametrize(
    ("name", "fault"),
    [("\0", r"has the control character '\x00'"), ("name\udce9", "is not valid UTF-8")],
)
def test_a_model_whose_file_gives_no_name_needs_one(name: str, fault: str) -> None:
    model = replace(MODEL, name=name)
    with pytest.raises(ConfigError) as caught:
        resolve(Config(), MACHINE, model)
    assert caught.value.message == f"the model's name {fault}"
    assert "--model-name" in str(caught.value.hint)
    named = resolve(from_settings({"name": "good"}), MACHINE, model)
    assert named.config.model.name == "good"


def test_facts_are_plain_data() -> None:
    assert msgspec.to_builtins(MODEL)["block_size"] == 16
