"""Tables of results for users, and the same results as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlxcache.bench.findings import Check, middle, quantity
from mlxcache.bench.measure import RESTART, Results, Samples
from mlxcache.bench.process import OURS, Server
from mlxcache.bench.turns import PARTING, SCENARIOS

WIDTH = 120
HEADINGS = {
    "first_s": "first token",
    "wall_s": "all",
    "rate": "decode/s",
    "throughput": "tokens/s",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "fed_tokens": "fed",
}
FIGURES = ("first_s", "wall_s", "rate", "throughput", "prompt_tokens", "cached_tokens")
COMPARED = {"first_s": "× first", "throughput": "× tokens/s"}
FED_FIGURES = ("first_s", "prompt_tokens", "cached_tokens", "fed_tokens")
FED_COMPARED = {"first_s": "× first", "fed_tokens": "× fed"}
"""Columns for scenarios that measure fed tokens: figures relative to the other server."""
RATIOS = ("first_s", "fed_tokens", "wall_s", "rate", "throughput")

RESTARTS = {
    "cold_s": "cold",
    "warm_s": "warm",
    "again_s": "restarted",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "restored_tokens": "from disk",
}


def wide_console() -> Console:
    """Return a console at least as wide as the tables; a terminal keeps its own width."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def table_of(title: str, *left: str, right: Sequence[str] = ()) -> Table:
    table = Table(*left, title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def show(console: Console, results: Results, servers: Sequence[Server], what: str = "") -> None:
    names = [server.name for server in servers]
    console.print(_scenarios(results, names, f"{what}: medians" if what else "Medians"))
    memory = table_of("Resident memory", "server", right=("at rest", "peak"))
    for server in servers:
        sizes = (quantity("bytes", size) for size in (server.idle_bytes, server.peak_bytes))
        memory.add_row(server.name, *sizes)
    console.print(memory)
    if results.timings:
        parts = table_of("Where a warm turn's first token goes", "part", right=("median",))
        for name, value in overhead(results).items():
            parts.add_row(name, quantity("s", value))
        console.print(parts)
    _show_failures(console, results.failures)


def _scenarios(results: Results, names: Sequence[str], title: str) -> Table:
    parting = set(results.samples) <= set(PARTING)
    figures, compared = (FED_FIGURES, FED_COMPARED) if parting else (FIGURES, COMPARED)
    title = f"{title}; × is ours by theirs, pair by pair"
    headings = (*(HEADINGS[figure] for figure in figures), *compared.values())
    table = table_of(title, "scenario", "server", right=headings)
    for scenario, taken in results.samples.items():
        for at, name in enumerate(names):
            middle_of = taken.medians(name)
            cells = [_cell(figure, middle_of.get(figure)) for figure in figures]
            if name != OURS:
                cells += [_ratio(taken.ratio(figure, name)) for figure in compared]
            table.add_row("" if at else scenario, name, *cells)
        table.add_section()
    return table


def show_restarts(console: Console, results: Results, title: str) -> None:
    rounds = results.samples[RESTART]
    title = f"{title}: killed after the second turn; first tokens"
    headings = (*RESTARTS.values(), "sooner than cold", "× restarted")
    table = table_of(title, "server", right=headings)
    for server in rounds:
        found = rounds.medians(server)
        cells = [_cell(figure, found.get(figure)) for figure in RESTARTS]
        ratio = None if server == OURS else rounds.ratio("again_s", server)
        table.add_row(server, *cells, _ratio(found.get("sooner")), _ratio(ratio))
    console.print(table)
    _show_failures(console, results.failures)


def _show_failures(console: Console, failures: Sequence[str]) -> None:
    for failure in failures:
        console.print(failure, style="red", markup=False)


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    if not checks:
        return
    table = table_of("Bounds", "bound", right=("measured", "asked", ""))
    for check in checks:
        sign = "≥" if check.least else "≤"
        verdict = "[green]holds[/]" if check.ok else "[red]broken[/]"
        measured, bound = (quantity(check.unit, one) for one in (check.measured, check.bound))
        table.add_row(check.name, measured, f"{sign} {bound}", verdict)
    console.print(table)


def _cell(figure: str, value: float | None) -> str:
    """Format `value` by the end of the figure's name, `_s` or `_tokens`."""
    if value is None:
        return "-"
    if figure.endswith("_s"):
        return quantity("s", value)
    return f"{value:.0f}" if figure.endswith("_tokens") else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def overhead(results: Results) -> dict[str, float]:
    names = results.timings[0] if results.timings else {}
    parts = {name: middle(timing.get(name) for timing in results.timings) for name in names}
    warm = results.samples.get("warm", Samples())
    parts["seen by the client"] = warm.medians(OURS).get("first_s")
    parts["the model's own time"] = middle(pair["own_s"] for pair in results.pairs)
    parts["seen less own"] = middle(pair["server_s"] - pair["own_s"] for pair in results.pairs)
    return {name: value for name, value in parts.items() if value is not None}


def as_json(results: Results, servers: Sequence[Server]) -> dict[str, Any]:
    names = [server.name for server in servers]
    return {
        "servers": {
            server.name: {"idle_bytes": server.idle_bytes, "peak_bytes": server.peak_bytes}
            for server in servers
        },
        "scenarios": {
            scenario: {
                "what": (SCENARIOS[scenario].__doc__ or "").strip(),
                "medians": {name: taken.medians(name) for name in names},
                "ratios": {
                    name: {figure: taken.ratio(figure, name) for figure in RATIOS}
                    for name in names
                    if name != OURS
                },
                "samples": taken,
            }
            for scenario, taken in results.samples.items()
        },
        "overhead": overhead(results),
        "timings": results.timings,
        "own_time": results.pairs,
        "kv_bytes_per_token": results.kv_bytes_per_token,
        "failures": results.failures,
    }


def restarts_json(results: Results) -> dict[str, Any]:
    rounds = results.samples[RESTART]
    return {
        "medians": {server: rounds.medians(server) for server in rounds},
        "ratios": {server: rounds.ratio("again_s", server) for server in rounds if server != OURS},
        "rounds": rounds,
        "failures": results.failures,
    }
