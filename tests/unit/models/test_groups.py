"""AWQ and GPTQ folders: the same bits as the plain model that they stand for, or one clear line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.types import BlockId
from headrace.models.groups import Grouping, grouped_view
from headrace.models.load import LoadedModel, load_model
from headrace.ops.interface import StepBatch, WeightType
from headrace.ops.native.backend import NativeBackend
from support.greedy import compile_model
from support.groups import Stored, grouped_tensors, random_matrix, write_model, write_pair
from support.model_files import RecordingBackend
from support.ops_rig import values_of

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
V2 = {"checkpoint_format": "gptq_v2"}
SYM8 = {"bits": 8, "sym": True}
BF16 = {"torch_dtype": "bfloat16"}

KINDS = [
    AWQ,
    AWQ | {"group_size": 64},
    AWQ | {"group_size": 32, "version": "GEMM"},
    GPTQ,
    GPTQ | {"group_size": -1, "sym": True},
    GPTQ | {"group_size": 1 << 31, "sym": True},
    GPTQ | V2 | {"group_size": 32},
    GPTQ | SYM8,
    GPTQ | SYM8 | V2 | {"group_size": 32},
    AWQ | BF16,
    GPTQ | SYM8 | BF16,
]
ORDERED = [
    GPTQ | {"desc_act": True},
    GPTQ | V2 | BF16 | {"desc_act": True, "group_size": 32},
    GPTQ | SYM8 | {"desc_act": True, "group_size": 64},
]
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1}


def label(kind: dict[str, Any]) -> str:
    return f"{kind['quant_method']}-{kind['bits']}-{kind['group_size']}-{len(kind)}"


def backend_named(name: str) -> Any:
    if name == "torch":
        from headrace.ops.torch.backend import TorchBackend

        return TorchBackend()
    return NativeBackend(threads=2, activations="f32")


def logits(backend: Any, loaded: LoadedModel) -> list[list[float]]:
    program = compile_model(backend, loaded.model, num_blocks=2, max_tokens=20)
    tokens = [7 * i % 250 for i in range(20)]
    program.run(StepBatch(tokens, [0, 20], [0], [[BlockId(0), BlockId(1)]], list(range(20))))
    return program.logits()


@pytest.mark.parametrize("backend_name", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_logits_are_those_of_the_plain_model(
    tmp_path: Path, kind: dict[str, Any], backend_name: str
) -> None:
    grouped, plain = (
        logits(backend, load_model(path, backend))
        for path in write_pair(tmp_path, kind, SIZES)
        for backend in [backend_named(backend_name)]
    )
    assert grouped == plain
    assert np.std(grouped) > 0.1


@pytest.mark.parametrize("activations", ["f32", "int8"])
@pytest.mark.parametrize("kind", ORDERED, ids=label)
def test_inputs_in_the_order_of_their_activations(
    tmp_path: Path, kind: dict[str, Any], activations: str
) -> None:
    """Sums run in the order of the groups, so they are near those of the plain model."""
    ordered, plain = (
        logits(backend, load_model(path, backend))
        for path in write_pair(tmp_path, kind, SIZES | {"hidden_size": 256})
        for backend in [NativeBackend(threads=2, activations=activations)]
    )
    assert np.std(plain) > 0.1
    error = np.abs(np.subtract(ordered, plain)).max()
    assert error < (1e-4 if activations == "f32" else 0.05) * np.abs(plain).max()


@pytest.mark.parametrize("kind", ORDERED, ids=label)
def test_both_backends_agree_on_inputs_in_another_order(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    path = write_pair(tmp_path, kind, SIZES | {"hidden_size": 256})[0]
    native, torch = (
        logits(backend, load_model(path, backend))
        for backend in (backend_named("native"), backend_named("torch"))
    )
    assert np.abs(np.subtract(native, torch)).max() < 1e-4 * np.abs(torch).max()


@pytest.mark.parametrize("kind", KINDS + ORDERED, ids=label)
def test_blocks_mean_what_the_tensors_say(kind: dict[str, Any]) -> None:
    """Of sizes at which tiles, groups and blocks end before they are full."""
    rows, cols = 200, 160
    q, zeros, scales, values = random_matrix(np.random.default_rng(1), rows, cols, kind)
    tensors = grouped_tensors("w", q, zeros, scales, kind)
    grouping = Grouping(
        kind["quant_method"],
        kind["bits"],
        max(kind["group_size"], 0),
        int(kind["quant_method"] == "gptq" and "checkpoint_format" not in kind),
    )
    data = {name.removeprefix("w."): memoryview(raw) for name, (_, _, raw) in tensors.items()}
    is_bf16 = tensors["w.scales"][0] == "BF16"
    view = grouped_view(Path("w"), grouping, "w", (rows, cols), data, bf16_scales=is_bf16)
    assert bool(view.order) == kind.get("desc_act", False)
    assert (values_of(view) == values[:, list(view.order) or slice(None)]).all()


@pytest.mark.parametrize(
    ("bits", "exact"),
    [
        (0x0000, True),
        (0x3C00, True),  # 2^-7
        (0x477F, True),  # 65280
        (0x4780, False),  # 65536
        (0x7F80, False),  # infinity
        (0x37FF, True),  # just below 2^-15: a subnormal half
        (0x3701, True),
        (0x3680, True),  # 2^-18: the bits that are set decide
        (0x3681, False),
        (0x3380, True),  # 2^-24, the least one
        (0x3300, False),
        (0x0001, False),
    ],
)
def test_scales_in_bfloat16_are_those_or_refused(bits: int, exact: bool) -> None:
    rows, cols, grouping = 8, 32, Grouping("awq", 4, 32, 0)
    data = {
        "qweight": memoryview(b"\x11" * (rows * cols // 2)),  # 1 everywhere
        "qzeros": memoryview(bytes(rows // 2)),
        "scales": memoryview(np.full(rows, bits, np.uint16).tobytes()),
    }
    if not exact:
        with pytest.raises(ConfigError, match="w: scale 0 has no float16 of the same value"):
            grouped_view(Path("w"), grouping, "w", (rows, cols), data, bf16_scales=True)
        return
    view = grouped_view(Path("w"), grouping, "w", (rows, cols), data, bf16_scales=True)
    assert (values_of(view) == np.uint32(bits << 16).view(np.float32)).all()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scales_without_a_value_are_refused_by_name(tmp_path: Path, scale: float) -> None:
    path = write_pair(tmp_path, GPTQ, SIZES)[0]
    config, tensors = json.loads((path / "config.json").read_text()), stored(path)
    name = "model.layers.0.self_attn.o_proj.scales"
    kind, shape, data = tensors[name]
    scales = np.frombuffer(data, np.float16).copy()
    scales[5] = scale
    tensors[name] = kind, shape, scales.tobytes()
    write_model(path, config, tensors)
    assert "self_attn.o_proj.weight: scales hold an infinity" in fault(path)


def test_the_type_is_the_smallest_that_is_exact(tmp_path: Path) -> None:
    expected = {
        128: {WeightType.Q4_G128},
        64: {WeightType.Q4_G32},
        -1: {WeightType.Q4_G128},
    }
    for size, types in expected.items():
        backend = RecordingBackend()
        load_model(write_pair(tmp_path / str(size), GPTQ | {"group_size": size}, SIZES)[0], backend)
        assert {type_ for type_, *_ in backend.loaded.values()} == types | {"f32"}


def test_what_is_said_of_the_model(tmp_path: Path) -> None:
    grouped, plain = (
        load_model(path, RecordingBackend()) for path in write_pair(tmp_path, AWQ, SIZES)
    )
    assert grouped.description.num_parameters == plain.description.num_parameters
    assert grouped.description.weight_types == "f32 + awq 4-bit"
    assert grouped.model.digest != plain.model.digest


def test_the_same_tensors_read_otherwise_are_another_model(tmp_path: Path) -> None:
    path = write_pair(tmp_path, GPTQ, SIZES)[0]
    digests = set()
    for layout in ("gptq", "gptq_v2"):
        change(path, checkpoint_format=layout)
        digests.add(load_model(path, RecordingBackend()).model.digest)
    assert len(digests) == 2


def test_some_layers_may_be_plain(tmp_path: Path) -> None:
    """`modules_to_not_convert` and the like: what is there as a weight is read as one."""
    grouped, plain = write_pair(tmp_path, AWQ, SIZES)
    tensors, floats = stored(grouped), stored(plain)
    name = "model.layers.0.mlp.down_proj"
    mixed = {key: value for key, value in tensors.items() if not key.startswith(name)}
    mixed[f"{name}.weight"] = floats[f"{name}.weight"]
    write_model(grouped, json.loads((grouped / "config.json").read_text()), mixed)
    backend = backend_named("native")
    assert logits(backend, load_model(grouped, backend)) == logits(
        backend, load_model(plain, backend)
    )


def test_biases_of_zeros_are_none(tmp_path: Path) -> None:
    path = write_pair(tmp_path, GPTQ, SIZES)[0]
    config, tensors = json.loads((path / "config.json").read_text()), stored(path)
    name = "model.layers.0.mlp.down_proj.bias"
    load_model(
        write_model(path, config, tensors | {name: ("F16", [128], bytes(256))}), RecordingBackend()
    )
    write_model(path, config, tensors | {name: ("F16", [128], b"\1" + bytes(255))})
    assert f"{name} is not part" in fault(path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (GPTQ, {"quant_method": None}, "quantised by ''"),
        (GPTQ, {"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
        (AWQ, {"version": "gemv"}, "packed for 'gemv'"),
        (AWQ, {"bits": 8}, "awq weights of 8 bits"),
        (GPTQ, {"bits": 3}, "gptq weights of 3 bits"),
        (GPTQ, {"bits": None}, "bits is missing"),
        (GPTQ, {"checkpoint_format": "marlin"}, "packed for 'marlin'"),
        (GPTQ, {"is_marlin_format": True}, "packed for 'marlin'"),
        (GPTQ, {"group_size": 16}, "groups of 16 inputs"),
        (GPTQ, {"group_size": 0}, "groups of 0 inputs"),
        (GPTQ, {"pack_dtype": "int16"}, "other words"),
        (GPTQ, {"dynamic": {"+:.*down.*": {"bits": 8}}}, "in different ways"),
        (GPTQ, {"group_size": 64}, "q_proj.qzeros has shape [1, 16]; [2, 16] is needed"),
        (GPTQ, {"bits": 8}, "q_proj.qweight has shape [16, 128]; [32, 128] is needed"),
        (AWQ, {"quant_method": "gptq"}, "q_proj.qweight has shape [128, 16]; [16, 128]"),
    ],
)
def test_refuses_what_it_does_not_read(
    tmp_path: Path, kind: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = write_pair(tmp_path, kind, SIZES)[0]
    change(path, **changes)
    assert message in fault(path)


@pytest.mark.parametrize("group", [-1, 1, 2, 1 << 30])
def test_refuses_groups_of_other_sizes(tmp_path: Path, group: int) -> None:
    path = write_pair(tmp_path, GPTQ | {"group_size": 64, "desc_act": True}, SIZES)[0]
    tensors = stored(path)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    kind, shape, data = tensors[name]
    groups = np.frombuffer(data, np.int32).copy()
    groups[np.flatnonzero(groups == 0)[0]] = group
    tensors[name] = kind, shape, groups.tobytes()
    write_model(path, json.loads((path / "config.json").read_text()), tensors)
    assert "k_proj.weight: g_idx does not divide 128 inputs into groups of 64" in fault(path)


def test_refuses_an_order_that_is_not_there(tmp_path: Path) -> None:
    path = write_pair(tmp_path, GPTQ | {"group_size": 64, "desc_act": True}, SIZES)[0]
    tensors = stored(path)
    del tensors["model.layers.0.mlp.up_proj.g_idx"]
    write_model(path, json.loads((path / "config.json").read_text()), tensors)
    assert "up_proj.weight: desc_act is set, and g_idx" in fault(path)


def test_refuses_asymmetric_weights_of_8_bits(tmp_path: Path) -> None:
    path = write_pair(tmp_path, GPTQ | {"bits": 8}, SIZES)[0]
    assert "8-bit weights are not symmetric" in fault(path)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_refuses_a_matrix_with_a_part_missing_or_of_another_type(tmp_path: Path, part: str) -> None:
    path = write_pair(tmp_path, AWQ, SIZES)[0]
    config, tensors = json.loads((path / "config.json").read_text()), stored(path)
    name = f"model.layers.0.self_attn.o_proj.{part}"
    _, shape, data = tensors.pop(name)
    write_model(path, config, tensors)
    assert f"{name} is missing" in fault(path)
    tensors[name] = ("I16" if part == "scales" else "F32"), shape, data
    write_model(path, config, tensors)
    assert f"{name} has type" in fault(path)


def change(path: Path, **quantization: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= quantization
    (path / "config.json").write_text(json.dumps(config))


def stored(path: Path) -> Stored:
    """The tensors of a folder, as `write_model` takes them."""
    from headrace.models.safetensors import SafetensorsFolder

    names = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i32": "I32"}
    return {
        name: (names[tensor.type], tensor.shape, bytes(tensor.data))
        for name, tensor in SafetensorsFolder(path).tensors.items()
    }


def fault(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_model(path, RecordingBackend())
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message
    return raised.value.message
