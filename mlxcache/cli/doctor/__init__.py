"""`mlxcache doctor`: checks of the machine, the settings and a model, each with a remedy.

The checks neither need nor start a server. They write only a test file in the cache folder and,
with --remote, a test object, and remove them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
_ORDER: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check of the thing `name`; `remedy` is one line, `figures` are for --json."""

    name: str
    status: Status
    value: str
    remedy: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_object(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "status": self.status, "value": self.value}
        if self.remedy is not None:
            found["remedy"] = self.remedy
        return found | ({"figures": dict(self.figures)} if self.figures else {})


def judge(
    name: str,
    value: str,
    *problems: tuple[bool, Status, str],
    figures: Mapping[str, Any] | None = None,
) -> Finding:
    """Return the finding of the first of `problems` that applies, with its remedy, else `ok`."""
    for applies, status, remedy in problems:
        if applies:
            return Finding(name, status, value, remedy, figures or {})
    return Finding(name, "ok", value, figures=figures or {})


def worst(findings: Iterable[Finding]) -> Status:
    return max((one.status for one in findings), key=_ORDER.index, default="ok")
