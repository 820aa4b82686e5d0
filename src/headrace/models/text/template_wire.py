"""What a chat template's worker and its owner say to each other.

A frame is a kind (one byte), a length (four bytes, big-endian) and that many bytes. The owner sends
one `Start` and then the names of one rendering after another, as JSON; each is answered by one
frame. Text is UTF-8 that lets lone surrogates pass.
"""

from dataclasses import dataclass
from enum import IntEnum

HEADER_BYTES = 5
MAX_ERROR_BYTES = 4096


class Kind(IntEnum):
    START = 1  # to the worker: Limits and the source, as JSON
    RENDER = 2  # to the worker: the names that the template sees, as JSON
    READY = 3  # the source is compiled
    TEXT = 4
    REFUSED = 5  # the template refuses the messages, and says why
    FAILED = 6  # the template cannot be compiled or fails, and why
    NO_MEMORY = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one template may cost."""

    start_s: float = 10.0  # for the worker to come up, and to compile the source
    render_s: float = 2.0
    memory_bytes: int = 512 << 20  # address space of the worker, Python's own included
    # A text in proportion to what was sent costs no more to tokenise than a client can ask for.
    output_chars: int = 1 << 18
    output_chars_per_byte: int = 4

    def max_output_chars(self, num_payload_bytes: int) -> int:
        return self.output_chars + self.output_chars_per_byte * num_payload_bytes


def frame(kind: Kind, payload: bytes) -> bytes:
    return bytes((kind,)) + len(payload).to_bytes(4, "big") + payload


def parsed_header(data: bytes | bytearray) -> tuple[Kind, int]:
    """ValueError for a kind that there is not."""
    return Kind(data[0]), int.from_bytes(data[1:HEADER_BYTES], "big")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes | bytearray) -> str:
    """UnicodeDecodeError, a ValueError, for what `to_bytes` does not make."""
    return data.decode("utf-8", "surrogatepass")
