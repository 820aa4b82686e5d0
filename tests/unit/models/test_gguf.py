"""The GGUF reader: what it reads, and how it refuses."""

import struct
from array import array
from pathlib import Path

import pytest

from headrace.core.base.errors import ConfigError
from headrace.models.gguf import GgufFile
from support.model_files import F32, Q2_K, Q4_1, Q6_K, Q8_0, gguf_bytes, gguf_string, write, zeros

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.number": 7,
    "a.ratio": 0.5,
    "a.texts": ["x", "", "naïve ▁"],
    "a.ints": [3, -1],
    "a.floats": [0.25, -2.0],
}


def read(tmp_path: Path, data: bytes) -> GgufFile:
    return GgufFile(write(tmp_path / "model.gguf", data))


def fault(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, data)
    assert str(tmp_path / "model.gguf") in raised.value.message
    assert "\n" not in raised.value.message
    return raised.value.message


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(tmp_path: Path, version: int) -> None:
    values = struct.pack("<6f", *range(6))
    tensors = {"m": (F32, [2, 3], values), "v": (F32, [1], b"\0\0\0\x40")}
    file = read(tmp_path, gguf_bytes(METADATA, tensors, version=version))
    assert file.metadata == METADATA | {
        "a.ints": array("i", [3, -1]),
        "a.floats": array("f", [0.25, -2.0]),
    }
    matrix, vector = file.tensors["m"], file.tensors["v"]
    assert (matrix.shape, matrix.type, bytes(matrix.data)) == ((2, 3), "f32", values)
    assert (vector.shape, bytes(vector.data)) == ((1,), b"\0\0\0\x40")
    assert file.file_bytes == (tmp_path / "model.gguf").stat().st_size


def test_quantised_tensors_have_the_bytes_of_their_blocks(tmp_path: Path) -> None:
    tensors = {"q4": (Q4_1, [3, 64], bytes(3 * 2 * 20)), "q8": (Q8_0, [2, 32], bytes(2 * 34))}
    tensors |= {"q6": (Q6_K, [3, 512], bytes(3 * 2 * 210))}
    file = read(tmp_path, gguf_bytes({}, tensors))
    sizes = {name: t.data.nbytes for name, t in file.tensors.items()}
    assert sizes == {"q4": 120, "q8": 68, "q6": 1260}


def test_alignment_is_the_files_own(tmp_path: Path) -> None:
    tensors = {"a": (F32, [1], b"aaaa"), "b": (F32, [1], b"bbbb")}
    file = read(tmp_path, gguf_bytes({"general.alignment": 256}, tensors, alignment=256))
    assert bytes(file.tensors["a"].data) == b"aaaa"
    assert bytes(file.tensors["b"].data) == b"bbbb"


def test_a_type_known_by_name_only_is_named(tmp_path: Path) -> None:
    file = read(tmp_path, gguf_bytes({}, {"t": (Q2_K, [1, 256], bytes(84))}))
    assert file.tensors["t"].type == "q2_k"


def test_nested_arrays_are_passed_over(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 1, 2)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    data += gguf_string("nested") + struct.pack("<IIQ", 9, 9, 2) + inner * 2
    data += gguf_string("after") + struct.pack("<II", 4, 9)
    assert read(tmp_path, data).metadata == {"after": 9}


def test_refuses_what_is_not_gguf(tmp_path: Path) -> None:
    assert "not a GGUF file: it starts with b'PK" in fault(tmp_path, b"PK\3\4" + bytes(100))
    assert "b''" in fault(tmp_path, b"GG")
    assert "the file is empty" in fault(tmp_path, b"")


def test_refuses_other_versions(tmp_path: Path) -> None:
    assert "version 1" in fault(tmp_path, gguf_bytes({}, {}, version=1))
    assert "version 4" in fault(tmp_path, gguf_bytes({}, {}, version=4))
    assert "big-endian" in fault(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_every_shortening_is_refused_in_one_line(tmp_path: Path) -> None:
    data = gguf_bytes(METADATA, {"m": (F32, [2, 3], zeros([2, 3]))})
    for length in range(len(data)):
        fault(tmp_path, data[:length])


def test_says_which_tensor_a_truncated_file_lacks(tmp_path: Path) -> None:
    data = gguf_bytes({}, {"a": (F32, [8], bytes(32)), "b": (F32, [8], bytes(32))})
    assert "truncated: tensor b ends 5 B after its end" in fault(tmp_path, data[:-5])


def header(body: bytes, num_tensors: int = 0, num_values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"", num_values=1 << 60), "truncated"),
        (header(b"", num_tensors=1 << 60), "truncated"),
        (header(struct.pack("<Q", 1 << 63), num_values=1), "truncated"),
        (header(struct.pack("<Q", 70_000) + bytes(80_000), num_values=1), "70000 bytes"),
        (header(gguf_string("k") + struct.pack("<II", 99, 0), num_values=1), "unknown type 99"),
        (header(gguf_string("k") + struct.pack("<IIQ", 9, 8, 1 << 62), num_values=1), "truncated"),
        (header(gguf_string("k") + struct.pack("<IIQ", 9, 4, 1 << 62), num_values=1), "truncated"),
        (header(gguf_string("k") + struct.pack("<IIQ", 9, 77, 1), num_values=1), "unknown type 77"),
        (header(gguf_string(b"\xff") + bytes(12), num_values=1), "not valid UTF-8"),
        (
            header(
                gguf_string("k") + struct.pack("<IIQ", 9, 8, 1) + gguf_string(b"\xc3"), num_values=1
            ),
            "not valid UTF-8",
        ),
        (
            header((gguf_string("k") + struct.pack("<II", 4, 0)) * 2, num_values=2),
            "'k' appears twice",
        ),
        (
            header(
                gguf_string("general.alignment") + struct.pack("<II", 4, 0), num_values=1
            ),
            "general.alignment is 0",
        ),
    ],
)  # fmt: skip
def test_refuses_damaged_headers(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in fault(tmp_path, data)


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    value = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 5000
    assert "nested" in fault(tmp_path, header(gguf_string("k") + value, num_values=1))


def entry(name: str, dims: list[int], type_: int, start: int) -> bytes:
    head = gguf_string(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, type_, start)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("t", [1 << 40, 1 << 40], F32, 0)], "truncated: tensor t"),
        ([entry("t", [4], F32, (1 << 64) - 8)], "truncated: tensor t"),
        ([entry("t", [31], Q8_0, 0)], "type q8_0 cannot have shape [31]"),
        ([entry("t", [576], Q6_K, 0)], "shape [576]: its rows are blocks of 256 values"),
        ([entry("t", [4, 0], F32, 0)], "cannot have shape [0, 4]"),
        ([entry("t", [1] * 5, F32, 0)], "5 dimensions"),
        ([entry("t", [4], F32, 0), entry("u", [4], F32, 8)], "tensors t and u overlap"),
        ([entry("t", [4], F32, 0), entry("t", [4], F32, 32)], "tensor t appears twice"),
    ],
)
def test_refuses_damaged_tensor_tables(tmp_path: Path, entries: list[bytes], message: str) -> None:
    data = header(b"".join(entries), num_tensors=len(entries))
    assert message in fault(tmp_path, data + bytes(256))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        GgufFile(tmp_path)
