"""Result of one scenario on one model: samples, bounds, and measurements that were not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from mlxcache.bench.checks import Check

Status = Literal["done", "failed", "not run", "not applicable"]


@dataclass(slots=True)
class Figure:
    """Samples of one quantity.

    `unit` is s, bytes, bytes/s, tokens, tokens/s, or empty for ratios and counts.
    """

    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the samples. Raises StatisticsError if there are none."""
        return median(self.samples)


Rows = dict[str, dict[str, Figure]]
"""Figures by row, then by column."""


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A bound that was not checked, and why.

    `measured`, which is None if there is no figure, should be at most `bound`, or at least `bound`
    if `least` is True. Both are in `unit`, which is empty for ratios and counts. `name` is the text
    to print.
    """

    name: str
    why: str
    measured: float | None
    bound: float
    unit: str = ""
    least: bool = False


@dataclass(slots=True)
class Findings:
    """Result of the scenario `name` on one model, which is called `model` in the report.

    `tables` holds figures by title, row and column. `checks` are bounds on them, and `unchecked`
    bounds for which a figure is missing or proves nothing, with the reason. `notes` are sentences
    about the figures, and `not_run` lists measurements that were left out, with reasons. `status`
    is done, failed, not run, or not applicable to the model or system. `error` says why the
    scenario failed or was not run at all. `seconds` is the time that it took.
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
        """Add samples, in `unit`, to the figure at a row and column of a table.

        Without samples, do nothing.
        """
        if values:
            rows = self.tables.setdefault(table, {})
            rows.setdefault(row, {}).setdefault(column, Figure(unit)).samples.extend(values)

    def figure(self, table: str, row: str, column: str) -> Figure | None:
        """Return the figure at a row and column of a table; None if it was not measured."""
        return self.tables.get(table, {}).get(row, {}).get(column)

    def hold(self, checks: Iterable[Check], *, why_not: str | None = None) -> None:
        """Append bounds to `checks`, or to `unchecked` if there is a reason `why_not`.

        `why_not` is a text that says why the figures, although measured, cannot show that the
        bounds hold.
        """
        for check in checks:
            if why_not is None:
                self.checks.append(check)
            else:
                self.unchecked.append(Unchecked(why=why_not, **asdict(check)))

    def as_json(self) -> dict[str, Any]:
        """Return all fields as an object for JSON.

        Each figure also has its `median` and its number of samples as `runs`, and each of
        `checks` has `ok`, which is True if the bound holds.
        """
        value = asdict(self)
        for rows in value["tables"].values():
            for columns in rows.values():
                for figure in columns.values():
                    figure |= {"median": median(figure["samples"]), "runs": len(figure["samples"])}
        value["checks"] = [asdict(check) | {"ok": check.ok} for check in self.checks]
        return value

    def merge(self, value: Mapping[str, Any]) -> None:
        """Add the figures, bounds, notes and omissions in `value`, a result of `as_json`.

        The status, error and time of `value` are not used.
        """
        for table, rows in value["tables"].items():
            for row, columns in rows.items():
                for column, figure in columns.items():
                    self.add(table, row, column, figure["unit"], *figure["samples"])
        fields = Check.__dataclass_fields__
        self.checks += [Check(**{name: one[name] for name in fields}) for one in value["checks"]]
        self.unchecked += [Unchecked(**one) for one in value["unchecked"]]
        self.notes += value["notes"]
        self.not_run += value["not_run"]
