"""The default model in BF16, for measurements: its weights, dequantised and rounded.

.venv/bin/python tests/support/bf16_model.py build/bf16.gguf [FROM.gguf]
"""

import sys
from pathlib import Path

import gguf
import numpy as np

from headrace.models.hub import ensure_default_model


def convert(source: Path, target: Path) -> None:
    """Writes `source` with every matrix in BF16; vectors stay as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    written = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}
    for name, field in reader.fields.items():
        if name in written:
            continue
        sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        type_ = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    target, *source = sys.argv[1:]
    convert(Path(source[0] if source else ensure_default_model()), Path(target))
