"""Figures of one scenario on one model: tables of samples, bounds, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from mlxcache.bench.checks import Check

Status = Literal["done", "failed", "not run", "not applicable"]


@dataclass(slots=True)
class Figure:
    """Samples of one quantity. `unit`: s, bytes, bytes/s, tokens, tokens/s, or empty for ratios."""

    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the samples, of which there is at least one."""
        return median(self.samples)


Rows = dict[str, dict[str, Figure]]
"""Figures by row, then by column."""


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A bound as in `Check`, and why it was not checked; `measured` None: there is no figure."""

    name: str
    why: str
    measured: float | None
    bound: float
    unit: str = ""
    least: bool = False


@dataclass(slots=True)
class Findings:
    """Result of one scenario on one model.

    `tables`: by title. `notes`: sentences about the figures. `not_run`: measurements left out, each
    with the reason. `unchecked`: bounds that these figures cannot show, each with the reason.
    `error`: why the scenario failed or was not run at all.
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
        """Add samples to a figure; without samples, do nothing."""
        if values:
            rows = self.tables.setdefault(table, {})
            rows.setdefault(row, {}).setdefault(column, Figure(unit)).samples.extend(values)

    def figure(self, table: str, row: str, column: str) -> Figure | None:
        """The figure at a place; None if nothing was measured there."""
        return self.tables.get(table, {}).get(row, {}).get(column)

    def hold(self, checks: Iterable[Check], *, why_not: str | None = None) -> None:
        """Add bounds to check; with `why_not`, as bounds that these figures cannot show."""
        for check in checks:
            if why_not is None:
                self.checks.append(check)
            else:
                self.unchecked.append(Unchecked(why=why_not, **asdict(check)))

    def as_json(self) -> dict[str, Any]:
        """All of it, each figure with its median and number of runs."""
        value = asdict(self)
        for rows in value["tables"].values():
            for columns in rows.values():
                for figure in columns.values():
                    figure |= {"median": median(figure["samples"]), "runs": len(figure["samples"])}
        value["checks"] = [asdict(check) | {"ok": check.ok} for check in self.checks]
        return value

    def merge(self, value: Mapping[str, Any]) -> None:
        """Add findings in the form of `as_json`, as another process printed them."""
        for table, rows in value["tables"].items():
            for row, columns in rows.items():
                for column, figure in columns.items():
                    self.add(table, row, column, figure["unit"], *figure["samples"])
        fields = Check.__dataclass_fields__
        self.checks += [Check(**{name: one[name] for name in fields}) for one in value["checks"]]
        self.unchecked += [Unchecked(**one) for one in value["unchecked"]]
        self.notes += value["notes"]
        self.not_run += value["not_run"]
