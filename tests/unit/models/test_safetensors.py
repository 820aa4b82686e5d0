"""The reader of safetensors folders: what it reads, and how it refuses."""

import json
import struct
from pathlib import Path

import pytest

from headrace.core.base.errors import ConfigError
from headrace.models.safetensors import SafetensorsFolder, read_shard
from support.model_files import llama_config, shard_bytes, write


def shard(header: object, body: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def shard_fault(data: bytes) -> str:
    with pytest.raises(ConfigError) as raised:
        read_shard(Path("m.safetensors"), memoryview(data))
    assert raised.value.message.startswith("m.safetensors: ")
    assert "\n" not in raised.value.message
    return raised.value.message


def folder_fault(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        SafetensorsFolder(folder)
    assert str(folder) in raised.value.message
    return raised.value


def test_reads_a_shard() -> None:
    data = shard_bytes({"a": ("F32", [2, 1], b"12345678"), "b": ("BF16", [3], b"abcdef")})
    tensors = read_shard(Path("m"), memoryview(data))
    assert {n: (t.type, t.shape, bytes(t.data)) for n, t in tensors.items()} == {
        "a": ("f32", (2, 1), b"12345678"),
        "b": ("bf16", (3,), b"abcdef"),
    }


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensor = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    save_file({"t": tensor}, tmp_path / "m.safetensors", metadata={"k": "v"})
    data = (tmp_path / "m.safetensors").read_bytes()
    found = read_shard(tmp_path, memoryview(data))["t"]
    assert (found.type, found.shape) == ("f16", (2, 3))
    assert bytes(found.data) == tensor.numpy().tobytes()


def one(dtype: str, shape: list[int], offsets: list[int]) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1\2\3", "only 3 bytes"),
        (struct.pack("<Q", 1 << 40) + bytes(64), "would take 1.00 TiB"),
        (shard(b"{]"), "not the JSON"),
        (shard(b"[" * 100_000), "not the JSON"),
        (shard([1, 2]), "not the JSON"),
        (shard({"t": {"dtype": "F32"}}), "not the JSON"),
        (shard(one("F32", [4], [0, 16]), bytes(8)), "truncated: tensor t ends 8 B"),
        (shard(one("F32", [4], [-16, 0]), bytes(16)), "[-16, 0)"),
        (shard(one("F32", [4], [16, 0]), bytes(16)), "[16, 0)"),
        (shard(one("F32", [-4], [0, 16]), bytes(16)), "has shape [-4]"),
        (shard(one("F32", [3], [0, 16]), bytes(16)), "has 16 bytes"),
        (shard(one("F32", [1 << 62, 1 << 62], [0, 16]), bytes(16)), "has 16 bytes"),
        (
            shard(one("F32", [4], [0, 16]) | {"u": one("F32", [4], [8, 24])["t"]}, bytes(24)),
            "tensors t and u overlap",
        ),
    ],
)
def test_refuses_damaged_shards(data: bytes, message: str) -> None:
    assert message in shard_fault(data)


def test_a_type_known_by_name_only_is_named() -> None:
    data = shard(one("F8_E4M3", [4], [0, 4]), bytes(4))
    assert read_shard(Path("m"), memoryview(data))["t"].type == "f8_e4m3"


def test_reads_indexed_shards(tmp_path: Path) -> None:
    write(tmp_path / "config.json", llama_config())
    write(tmp_path / "one.safetensors", shard_bytes({"a": ("F32", [1], b"aaaa")}))
    write(tmp_path / "two.safetensors", shard_bytes({"b": ("F32", [1], b"bbbb")}))
    index: dict[str, object] = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write(tmp_path / "model.safetensors.index.json", index)
    folder = SafetensorsFolder(tmp_path)
    assert {n: bytes(t.data) for n, t in folder.tensors.items()} == {"a": b"aaaa", "b": b"bbbb"}
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("one", "two")]
    assert folder.file_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../one.safetensors"}, "is not the name of a shard"),
        ({"a": "/etc/one.safetensors"}, "is not the name of a shard"),
        ({"a": "sub/one.safetensors"}, "is not the name of a shard"),
        ({"a": "one.bin"}, "is not the name of a shard"),
        ({"a": ""}, "is not the name of a shard"),
        ({"a": "missing.safetensors"}, "shard missing.safetensors is missing"),
        ({"z": "one.safetensors"}, "tensor z is not in one.safetensors"),
        ({"a": "one.safetensors", "b": "copy.safetensors"}, "tensor a appears in two shards"),
        ({"a": 3}, "not the JSON"),
    ],
)
def test_refuses_bad_indices(tmp_path: Path, weight_map: object, message: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    write(inside / "config.json", llama_config())
    for place in (tmp_path, inside):
        write(place / "one.safetensors", shard_bytes({"a": ("F32", [1], b"aaaa")}))
    write(inside / "copy.safetensors", shard_bytes({"a": ("F32", [1], b"aaaa")}))
    write(inside / "model.safetensors.index.json", {"weight_map": weight_map})
    assert message in folder_fault(inside).message


def test_says_what_an_incomplete_folder_holds(tmp_path: Path) -> None:
    assert "no config.json" in folder_fault(tmp_path).message
    write(tmp_path / "config.json", llama_config())
    assert "neither model.safetensors nor" in folder_fault(tmp_path).message
    write(tmp_path / "pytorch_model.bin", b"\x80\x02")
    assert "can run code" in folder_fault(tmp_path).hint
    write(tmp_path / "small.gguf", b"GGUF")
    assert str(tmp_path / "small.gguf") in folder_fault(tmp_path).hint
    write(tmp_path / "large.gguf", b"GGUF")
    assert folder_fault(tmp_path).hint.endswith("there are large.gguf, small.gguf")
    for number in range(20):
        write(tmp_path / f"{number}.gguf", b"GGUF")
    assert folder_fault(tmp_path).hint.endswith(" and 12 more")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\ufeff{}"])
def test_refuses_a_config_that_is_not_an_object(tmp_path: Path, text: str) -> None:
    write(tmp_path / "config.json", text)
    assert "config.json: not the JSON" in folder_fault(tmp_path).message
