"""Tables of results for users, and the same results as JSON for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlxcache.bench.checks import Check
from mlxcache.bench.measure import Results, middle
from mlxcache.bench.process import OURS, Server
from mlxcache.bench.scenarios import PARTING, SCENARIOS

WIDTH = 120
FIGURES = {
    "first_s": "first token",
    "wall_s": "all",
    "rate": "decode/s",
    "throughput": "tokens/s",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
}
COMPARED = {"first_s": "× first", "throughput": "× tokens/s"}
FED_FIGURES = {
    "first_s": "first token",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "fed_tokens": "fed",
}
FED_COMPARED = {"first_s": "× first", "fed_tokens": "× fed"}
"""Columns for scenarios that measure fed tokens: figures relative to the other server."""
RATIOS = ("first_s", "fed_tokens", "wall_s", "rate", "throughput")


def show(console: Console, results: Results, servers: Sequence[Server], what: str = "") -> None:
    """Print tables of medians, of memory and of the parts of a warm turn, then the failures.

    `servers` are those that were measured. `what` names the model, if several are measured.
    """
    names = [server.name for server in servers]
    console.print(_scenarios(results, names, f"{what}: medians" if what else "Medians"))
    console.print(_memory(servers))
    if results.timings:
        console.print(_timings(results))
    for failure in results.failures:
        console.print(failure, style="red", markup=False)


def wide_console() -> Console:
    """Return a console on standard output that is at least wide enough for the tables.

    A terminal keeps its own width.
    """
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def table_of(title: str, *left: str) -> Table:
    """Return an empty table with the text columns `left`; the caller adds columns of figures."""
    return Table(*left, title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)


def _scenarios(results: Results, names: Sequence[str], title: str) -> Table:
    table = table_of(f"{title}; × is ours by theirs, pair by pair", "scenario", "server")
    parting = set(results.samples) <= set(PARTING)
    figures, compared = (FED_FIGURES, FED_COMPARED) if parting else (FIGURES, COMPARED)
    for heading in (*figures.values(), *compared.values()):
        table.add_column(heading, justify="right")
    for scenario in results.samples:
        for at, name in enumerate(names):
            middle_of = results.medians(scenario, name)
            cells = [cell(figure, middle_of.get(figure)) for figure in figures]
            if name != OURS:
                cells += [ratio(results.ratio(scenario, figure, name)) for figure in compared]
            table.add_row("" if at else scenario, name, *cells)
        table.add_section()
    return table


def cell(figure: str, value: float | None) -> str:
    """Format `value` by the end of the figure's name, `_s` or `_tokens`; None becomes a dash."""
    if value is None:
        return "-"
    if figure.endswith("_s"):
        return milliseconds(value)
    return f"{value:.0f}" if figure.endswith("_tokens") else f"{value:.1f}"


def ratio(value: float | None) -> str:
    """Format a ratio with two decimals; None becomes a dash."""
    return "-" if value is None else f"{value:.2f}"


def milliseconds(seconds: float) -> str:
    """Format a time given in seconds: in ms below 10 s, in s above."""
    return f"{seconds * 1000:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def megabytes(size: float) -> str:
    """Format a size given in bytes, in MB of a million bytes."""
    return f"{size / 1e6:.0f} MB"


def _memory(servers: Sequence[Server]) -> Table:
    table = table_of("Resident memory", "server")
    table.add_column("at rest", justify="right")
    table.add_column("peak", justify="right")
    for server in servers:
        table.add_row(server.name, megabytes(server.idle_bytes), megabytes(server.peak_bytes))
    return table


def _timings(results: Results) -> Table:
    table = table_of("Where a warm turn's first token goes", "part")
    table.add_column("median", justify="right")
    for name, value in overhead(results).items():
        table.add_row(name, milliseconds(value))
    return table


def overhead(results: Results) -> dict[str, float]:
    """Return the median seconds of each part of a warm turn, by name.

    The parts are those that mlxcache reports, followed by the time to the first token as seen by
    the client, the time that mlx-lm takes without a server for the same tokens, and the difference
    of these two. Parts that were not measured are left out.
    """
    names = results.timings[0] if results.timings else {}
    parts = {name: middle(timing.get(name) for timing in results.timings) for name in names}
    parts["seen by the client"] = results.medians("warm", OURS).get("first_s")
    parts["the model's own time"] = middle(pair.own_s for pair in results.pairs)
    over = middle(pair.server_s - pair.own_s for pair in results.pairs)
    parts["seen less own"] = over
    return {name: value for name, value in parts.items() if value is not None}


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print each bound and whether it holds; nothing if there is none."""
    if not checks:
        return
    table = table_of("Bounds", "bound")
    for title in ("measured", "asked", ""):
        table.add_column(title, justify="right")
    for check in checks:
        sign = "≥" if check.least else "≤"
        verdict = "[green]holds[/]" if check.ok else "[red]broken[/]"
        measured, bound = (_value(value, check.unit) for value in (check.measured, check.bound))
        table.add_row(check.name, measured, f"{sign} {bound}", verdict)
    console.print(table)


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return milliseconds(value)
    if unit == "bytes":
        return megabytes(value)
    return f"{value:.3g}"


def as_json(results: Results, servers: Sequence[Server]) -> dict[str, Any]:
    """Return all results as an object for JSON, and the memory figures of `servers`.

    `scenarios` has the medians, ratios and samples of each scenario by the server's name, and
    `servers` the `idle_bytes` and `peak_bytes` of each. The other keys are `overhead` (the result
    of that function), and `timings`, `own_time` (`Results.pairs`), `kv_bytes_per_token` and
    `failures` of `results`. Times are in seconds, sizes in bytes.
    """
    names = [server.name for server in servers]
    return {
        "servers": {
            server.name: {"idle_bytes": server.idle_bytes, "peak_bytes": server.peak_bytes}
            for server in servers
        },
        "scenarios": {
            scenario: {
                "what": (SCENARIOS[scenario].__doc__ or "").strip(),
                "medians": {name: results.medians(scenario, name) for name in names},
                "ratios": _ratios(results, scenario, names),
                "samples": {
                    name: [asdict(sample) for sample in taken] for name, taken in by.items()
                },
            }
            for scenario, by in results.samples.items()
        },
        "overhead": overhead(results),
        "timings": results.timings,
        "own_time": [asdict(pair) for pair in results.pairs],
        "kv_bytes_per_token": results.kv_bytes_per_token,
        "failures": results.failures,
    }


def _ratios(results: Results, scenario: str, names: Sequence[str]) -> Mapping[str, Any]:
    return {
        name: {figure: results.ratio(scenario, figure, name) for figure in RATIOS}
        for name in names
        if name != OURS
    }


def checks_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return each bound as an object with the fields of `Check`, and `ok`: True if it holds."""
    return [asdict(check) | {"ok": check.ok} for check in checks]


def machine() -> dict[str, Any]:
    """Return a description of this machine and of the installed versions.

    Its keys are `platform`, `processor`, `cores`, `python`, `versions` (by package) and
    `preloaded`, the value of LD_PRELOAD.
    """
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "preloaded": os.environ.get("LD_PRELOAD", ""),
    }
