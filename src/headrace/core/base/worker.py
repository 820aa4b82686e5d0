"""What a worker is for. Its spec is in `plan`, since an executor states it."""

from enum import StrEnum


class Role(StrEnum):
    MIXED = "mixed"  # computes prompts and decodes
    PREFILL = "prefill"  # computes prompts, and hands their KV on
    DECODE = "decode"  # decodes; computes a prompt only where nobody else does
