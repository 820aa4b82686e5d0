"""Converts a GGUF file for OpenVINO, in its environment: `python openvino_model.py FILE FOLDER`.

The engine does it itself, as long as nothing else is beside a link to the file.
"""

import sys
from pathlib import Path

import openvino_genai


def main(gguf: str, folder: str) -> None:
    link = Path(folder, Path(gguf).name)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(gguf).resolve())
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
