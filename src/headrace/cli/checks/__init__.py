"""What `headrace doctor` looks at: one function for each finding.

Decides what counts as wrong; refuses to change anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # it works, but not as well as it could
    FAIL = "fail"  # `serve` cannot work


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. Units of `data` are in its keys."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    data: Mapping[str, object] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "hint": self.hint or None,
            **self.data,
        }
