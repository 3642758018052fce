"""Result of one check of `mlxcache doctor`: a status, and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
_ORDER: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    `name` is the thing checked, such as "disk speed", `status` is `ok`, `warn` or `fail`, `value`
    is the result as text, and `remedy` one line of advice, or None. `figures` holds details of the
    result by name for `doctor --json`, such as `free_bytes`.
    """

    name: str
    status: Status
    value: str
    remedy: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_object(self) -> dict[str, Any]:
        """Return the finding for `doctor --json`, as a dict of its fields by name.

        `remedy` is left out if it is None, and `figures` if it is empty.
        """
        found: dict[str, Any] = {"name": self.name, "status": self.status, "value": self.value}
        if self.remedy is not None:
            found["remedy"] = self.remedy
        return found | ({"figures": dict(self.figures)} if self.figures else {})


def worst(findings: Iterable[Finding]) -> Status:
    """Return `fail` if one of `findings` has that status, else `warn` if one has it, else `ok`."""
    return max((one.status for one in findings), key=_ORDER.index, default="ok")
