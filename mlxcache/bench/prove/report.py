"""Report of `mlxcache prove`: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxcache.bench.prove.findings import Figure, Findings, Rows

FORMAT = 1
CLOSING = (
    "Read this page and the .json file beside it, then send both as an issue of mlxcache on "
    "GitHub, with the title `prove:` and your chip."
)


def as_json(machine: Mapping[str, Any], run: Mapping[str, Any], all: Sequence[Findings]) -> str:
    """Return the JSON text of the report, with every sample of each figure.

    `machine` is the result of `describe_machine`, `run` has the options and times of the command by
    name, and `all` the findings of each scenario and model. Times are in seconds, and sizes in
    bytes.
    """
    value = {
        "format": FORMAT,
        "machine": machine,
        "run": run,
        "scenarios": [found.as_json() for found in all],
    }
    return json.dumps(value, indent=1) + "\n"


def as_markdown(machine: Mapping[str, Any], run: Mapping[str, Any], all: Sequence[Findings]) -> str:
    """Return the report as a Markdown page, with the median of each figure.

    The parameters are those of `as_json`.
    """
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
    """Write the report to `file`, and the JSON beside it with the suffix .json.

    Returns the path of the JSON file. Both files are overwritten. Raises OSError.
    """
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
        for check in found.checks:
            sign = "≥" if check.least else "≤"
            verdict = "passed" if check.ok else "**failed**"
            name = f"{check.name} ({found.model})"
            yield f"| {_cell(name)} | {check.measured:.3g} | {sign} {check.bound:g} | {verdict} |"
        for one in found.unchecked:
            sign = "≥" if one.least else "≤"
            measured = "" if one.measured is None else f"{one.measured:.3g}"
            yield (
                f"| {_cell(one.name)} ({_cell(found.model)}) | {measured} | {sign} "
                f"{one.bound:g} | not checked: {_cell(one.why)} |"
            )


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
    """Format a value with its unit, as for `Figure`.

    Bytes become MB or GB (of a million or 10^9 bytes), and seconds below 1 become ms.
    """
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
