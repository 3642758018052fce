"""Measured figures, the bounds on them, and the report of `prove`: Markdown, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

Status = Literal["done", "failed", "not run", "not applicable"]


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def by(mine: float | None, other: float | None) -> float | None:
    return mine / other if mine is not None and other else None


class NotApplicable(Exception):
    """Error raised if a scenario cannot run on this system or model. The text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """A bound on a measured figure: at most `bound`, or at least `bound` if `least` is True.

    `unit` is empty for ratios and counts. `name` is the text to print.
    """

    name: str
    measured: float
    bound: float
    unit: str = ""
    least: bool = False

    @property
    def ok(self) -> bool:
        return self.measured >= self.bound if self.least else self.measured <= self.bound

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


@dataclass(slots=True)
class Figure:
    """Samples of one quantity, in s, bytes, bytes/s, tokens, tokens/s, or no unit."""

    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.samples)


Rows = dict[str, dict[str, Figure]]


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A bound that was not checked, and why. Its fields are those of `Check`."""

    name: str
    why: str
    measured: float | None
    bound: float
    unit: str = ""
    least: bool = False


@dataclass(slots=True)
class Findings:
    """Result of a scenario on one model; figures by title, row and column.

    `unchecked` are bounds for which a figure is missing or proves nothing, `not_run` measurements
    that were left out, and `error` says why the scenario failed or was not run at all.
    """

    name: str
    model: str
    status: Status = "done"
    error: str | None = None
    seconds: float = 0.0
    tables: dict[str, Rows] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def add(self, table: str, row: str, column: str, unit: str, *values: float) -> None:
        if values:
            rows = self.tables.setdefault(table, {})
            rows.setdefault(row, {}).setdefault(column, Figure(unit)).samples.extend(values)

    def hold(
        self,
        name: str,
        measured: float | None,
        bound: float,
        *,
        unit: str = "",
        least: bool = False,
        why_not: str | None = None,
    ) -> None:
        """Add a bound; `why_not` says why the figure, or the lack of one, cannot show it."""
        if measured is not None and why_not is None:
            self.checks.append(Check(name, measured, bound, unit, least))
        else:
            self.unchecked.append(Unchecked(name, why_not or "", measured, bound, unit, least))

    def as_json(self) -> dict[str, Any]:
        """Return all fields as an object for JSON, with the median of each figure."""
        value = asdict(self)
        for rows in value["tables"].values():
            for columns in rows.values():
                for figure in columns.values():
                    figure |= {"median": median(figure["samples"]), "runs": len(figure["samples"])}
        value["checks"] = [check.as_json() for check in self.checks]
        return value

    def merge(self, other: Findings) -> None:
        self.status, self.error = other.status, other.error
        self.tables |= other.tables
        self.checks += other.checks
        self.unchecked += other.unchecked
        self.notes += other.notes
        self.not_run += other.not_run


# -- the report ------------------------------------------------------------------------------------

FORMAT = 1
CLOSING = (
    "Read this page and the .json file beside it, then send both as an issue of mlxcache on "
    "GitHub, with the title `prove:` and your chip."
)


def as_json(machine: Mapping[str, Any], run: Mapping[str, Any], all: Sequence[Findings]) -> str:
    value = {
        "format": FORMAT,
        "machine": machine,
        "run": run,
        "scenarios": [found.as_json() for found in all],
    }
    return json.dumps(value, indent=1) + "\n"


def as_markdown(machine: Mapping[str, Any], run: Mapping[str, Any], all: Sequence[Findings]) -> str:
    lines = ["# mlxcache prove", "", *_machine(machine, run), *_bounds(all), *_left_out(all)]
    for found in all:
        if found.tables or found.notes:
            lines += ["", f"## {found.name}: {found.model}", ""]
            lines += [f"{found.seconds:.0f} s. Medians; in brackets the number of runs.", ""]
            for title, rows in found.tables.items():
                lines += [*_table(title, rows), ""]
            lines += [f"- {note}" for note in found.notes]
    return "\n".join([*lines, "", CLOSING]) + "\n"


def write(file: Path, markdown: str, json_text: str) -> Path:
    """Write the report, and the JSON beside it, whose path is returned. Raises OSError."""
    file.write_text(markdown, encoding="utf-8")
    beside = file.with_suffix(".json")
    beside.write_text(json_text, encoding="utf-8")
    return beside


def _machine(machine: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for name, value in {**machine, **run}.items():
        if value is None or value == {}:
            continue
        shown = str(value)
        if isinstance(value, Mapping):
            shown = ", ".join(f"{key} {one}" for key, one in value.items())
        elif name.endswith("bytes"):
            shown = quantity("bytes", value)
        yield f"| {name.removesuffix('_bytes').replace('_', ' ')} | {_cell(shown)} |"


def _bounds(all: Sequence[Findings]) -> Iterator[str]:
    yield from ("", "## Bounds", "", "| bound | measured | required | |", "|---|---|---|---|")
    for found in all:
        bounds: list[Check | Unchecked] = [*found.checks, *found.unchecked]
        for one in bounds:
            if isinstance(one, Unchecked):
                verdict = f"not checked: {_cell(one.why)}"
            else:
                verdict = "passed" if one.ok else "**failed**"
            name, sign = _cell(f"{one.name} ({found.model})"), "≥" if one.least else "≤"
            measured = "" if one.measured is None else f"{one.measured:.3g}"
            yield f"| {name} | {measured} | {sign} {one.bound:g} | {verdict} |"


def _left_out(all: Sequence[Findings]) -> Iterator[str]:
    yield from ("", "## Scenarios", "", "| scenario | model | | |", "|---|---|---|---|")
    for found in all:
        why = (found.error or "").splitlines()
        yield (
            f"| {found.name} | {_cell(found.model)} | {found.status} | "
            f"{_cell(why[0] if why else '')} |"
        )
        for one in found.not_run:
            yield f"| {found.name} | {_cell(found.model)} | not run | {_cell(one)} |"
    for found in all:
        if found.status == "failed" and "\n" in (found.error or ""):
            yield from ("", f"The end of {found.name} ({found.model}):", "", "```text")
            yield from (found.error or "").replace("```", "'''").splitlines()
            yield "```"


def _table(title: str, rows: Rows) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    yield f"| {_cell(title)} | " + " | ".join(map(_cell, columns)) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row, figures in rows.items():
        cells = (_figure(figures.get(column)) for column in columns)
        yield f"| {_cell(row)} | " + " | ".join(cells) + " |"


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"{quantity(figure.unit, figure.median)} ({len(figure.samples)})"


def quantity(unit: str, value: float) -> str:
    """Format a value with its unit, as for `Figure`: bytes as MB or GB, seconds below 1 as ms."""
    rate = "/s" if unit == "bytes/s" else ""
    if unit in ("bytes", "bytes/s"):
        size, name = (value / 1e9, "GB") if value >= 1e9 else (value / 1e6, "MB")
        return f"{size:.3g} {name}{rate}"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
