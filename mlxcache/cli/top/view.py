"""Rendering of a server's state as text that fits the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlxcache.cli import show
from mlxcache.cli.output import visible
from mlxcache.cli.top.state import LiveState
from mlxcache.config import format_size
from mlxcache.types import WARMING

BAR = 20
_ABOVE, _HEADED = 8, 3
"""Lines above the tables, and lines that each table needs besides its rows."""

MAX_ROWS = 10
"""Maximum rows of each table if the height is unlimited."""

_MODEL, _WIDE = 14, 100
"""Width of the column of models, and least width of the terminal for it in tables of requests."""

_ENDS = {"tool_calls": "tools", "stop_sequence": "stop", "cancelled": "cancelled"}


def render(state: LiveState, url: str, *, width: int, height: int | None, now: float) -> Group:
    """Render the state at most `width` columns wide and about `height` lines high.

    If `height` is None, each table has at most `MAX_ROWS` rows. `now` is in seconds since 1970.
    """
    running, recent, sessions = state.running(), state.recent(), state.sessions or []
    models: Sequence[Mapping[str, Any]] = (state.cache or {}).get("models", ())
    left = None if height is None else height - len(models)
    rows = _row_counts(left, (len(running), len(recent), len(sessions)))
    names = _names(sessions)
    parts: list[RenderableType] = [_head(state, url, len(models)), *_budgets(state.cache)]
    several = len(models) > 1
    if state.server is None or state.server["state"] == "ready":
        tables = (
            _running(state, running[: rows[0]], names, width, now, several=several),
            _recent(recent[: rows[1]], names, width, several=several),
            _sessions(sessions[: rows[2]], running, names, width, several=several),
        )
        for (title, empty, table), shown, all_ in zip(
            tables, rows, (running, recent, sessions), strict=True
        ):
            more = f" ({shown} of {len(all_)})" if shown < len(all_) else ""
            parts += [Text(f"\n{title}{more}", "bold"), table if all_ else Text(empty, "dim")]
    return Group(*parts)


Names = Mapping[tuple[str, str | None], str]
"""Display names of sessions by id or label, and by model or None."""


def _names(sessions: Sequence[dict[str, Any]]) -> Names:
    """Return a map from the keys of each session to the name that is shown for it.

    The keys of a session are (id, model), (id, None), (label, model) and (label, None), where
    `model` is the label of its model. `sessions` are as in `GET /v1/sessions`, the last used first.
    A key of several sessions has the name of the last used. If `sessions` are of several clients,
    each name begins with the name of the session's client.
    """
    several = show.has_several_clients(sessions)
    return {
        (key, model): _name(one, several=several)
        for one in reversed(sessions)
        for key in (one["id"], one["label"])
        for model in (None, one.get("model"))
        if key
    }


def _name(session: dict[str, Any], *, several: bool) -> str:
    client = show.client_name(session.get("client")) if several else ""
    name = show.session_name(session)
    return f"{client}: {name}" if client else name


def _row_counts(height: int | None, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many rows to show in the tables of running requests, recent requests and sessions.

    `wanted`: the number of rows that each table has, in the same order. `height`: lines for the
    whole output, less those that list models. Running requests come first; the other two tables
    share the lines that are left. If `height` is None, each table has at most `MAX_ROWS` rows.
    """
    if height is None:
        running, recent, sessions = (min(n, MAX_ROWS) for n in wanted)
        return running, recent, sessions
    left = max(0, height - _ABOVE - 3 * _HEADED)
    running = min(wanted[0], left)
    left -= max(running, 0)
    recent = min(wanted[1], max(left - wanted[2], left // 2))
    return running, recent, min(wanted[2], left - recent)


def _head(live: LiveState, url: str, models: int) -> Text:
    """Return the first line: the version, the state, the address and the model of the server.

    `models`: number of models, which is shown in place of a name; 0 if there is only one.
    """
    server = live.server
    if server is None:
        return Text.assemble(("mlxcache", "bold"), f"  {url}", no_wrap=True, overflow="ellipsis")
    state = server["state"]
    style = "green" if state == "ready" else "yellow"
    if state == "ready" and server["stalled_s"] >= 10:
        state, style = f"one step has run for {server['stalled_s']} s", "red"
    model = server["model"]["id"] if server["model"] else "no model yet"
    model = f"{models} models" if models else model
    return Text.assemble(
        (f"mlxcache {server['version']}", "bold"),
        *("  ", (state, style), f"  {url}  {model}"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _budgets(cache: Mapping[str, Any] | None) -> list[RenderableType]:
    """Return lines for the models, RAM, disk and the remote, and for the requests since the start.

    `cache` is the body of `GET /v1/cache`; if it is None or empty, so is the list.
    """
    if not cache:
        return []
    disk = cache["disk"]
    grid = _tier_grid()
    if disk["limit_bytes"]:
        text = f"{_of(disk['used_bytes'], disk)} in {show.format_count(disk['files'], 'file')}"
        if cache["pending_bytes"]:
            text += f", {format_size(cache['pending_bytes'])} pending"
        if disk["state"] != "ok":
            text = "writes fail: see the server's log"
        grid.add_row("Disk", _bar(disk["used_bytes"], disk), text)
    else:
        grid.add_row("Disk", "", "off")
    remote = [_remote(cache["remote"])] if "remote" in cache else []
    return [Text(), *_models(cache), *_ram(cache), grid, *remote, _totals(cache)]


def _remote(remote: Mapping[str, Any]) -> Text:
    """Return a line with the bytes sent to and received from the remote, or why it is not used.

    `remote` is the object of that name in the body of `GET /v1/cache`.
    """
    up, down = (format_size(remote[f"{way}_bytes"]) for way in ("uploaded", "downloaded"))
    text, style = f"remote: {up} sent, {down} received", ""
    if remote["state"] != "ok":
        text, style = f"remote {remote['state']}: {remote['reason']}", "yellow"
    return Text(f"     {text}", style, no_wrap=True, overflow="ellipsis")


def _models(cache: Mapping[str, Any]) -> list[RenderableType]:
    """Return a line for each model if there are several: its bar, its state and its sizes.

    `cache` is the body of `GET /v1/cache`. The bar shows the model's weights and KV as parts of the
    budget of all models.
    """
    models = cache.get("models", ())
    if not models:
        return []
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_MODEL, no_wrap=True, overflow="ellipsis")
    grid.add_column(width=BAR)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for one in models:
        there = one["state"] in ("loaded", "loading")
        weights, kv = one.get("weights_bytes", 0) if there else 0, one.get("kv_bytes", 0)
        sizes = ((weights, "weights", _WEIGHTS), (kv, "KV", _PARTS[0]))
        words = [show.model_state(one)]
        words += [f"{format_size(size)} {name}" for size, name, _ in sizes if size]
        parts = [(size, style, cell) for size, _, (_, style, cell) in sizes]
        bar = _stacked_bar(parts, cache["ram"]["limit_bytes"])
        grid.add_row(visible(one["label"]), bar, Text(", ".join(words)))
    return [grid]


def _tier_grid() -> Table:
    """Return an empty grid with columns for a tier's name, its bar and its text."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=4)
    grid.add_column(width=BAR)
    return grid


_WITHHELD_STYLE = "yellow"
_WEIGHTS = ("weights", "magenta", "#")
_PARTS = (("cached", "cyan", "█"), ("in use", "blue", "▓"), ("reserved", "bright_black", "▒"))


def _ram(cache: Mapping[str, Any]) -> list[RenderableType]:
    """Return a bar of the memory in use with its sum and the budget, and a line with its parts.

    `cache` is the body of `GET /v1/cache`. A further line reports memory pressure, if there is any.
    """
    ram, grid, indent = cache["ram"], _tier_grid(), " " * 5
    withheld = ram.get("withheld_bytes", 0)
    charged, used, active = sum(ram["kinds"].values()), ram["used_bytes"], cache["active_bytes"]
    weights, named = ram["kinds"].get("weights", 0), list(_PARTS)
    sizes = [used, active, max(0, charged - weights - used - active - withheld)]
    if weights:  # several models, whose budget includes them
        sizes, named = [weights, *sizes], [_WEIGHTS, *_PARTS]
    parts = [(size, style, cell) for size, (_, style, cell) in zip(sizes, named, strict=True)]
    parts.append((withheld, _WITHHELD_STYLE, "×"))
    grid.add_row("RAM", _stacked_bar(parts, ram["limit_bytes"]), _of(charged, ram))
    words = Text(indent, no_wrap=True, overflow="ellipsis")
    for (name, style, cell), size in zip(named, sizes, strict=True):
        words.append(", " if len(words) > len(indent) else "").append(f"{cell} ", style)
        words.append(f"{format_size(size)} {name}")
    lines: list[RenderableType] = [grid, words]
    level = (cache.get("pressure") or {}).get("level", "normal")
    if level != "normal" or withheld:
        over = level == "normal"
        text = "memory pressure is over" if over else f"memory pressure: {level}"
        text += f", × {format_size(withheld)} withheld" if withheld else ""
        lines.append(Text(indent + text, _WITHHELD_STYLE))
    return lines


def _stacked_bar(parts: Sequence[tuple[int, str, str]], limit: int) -> Text:
    """Return a bar of `BAR` cells that shows how `parts` fill `limit` bytes.

    A part is a size in bytes, a style and the character of its cells. A part above 0 has at least
    one cell. If the parts exceed `limit`, they fill the bar.
    """
    whole = max(limit, sum(size for size, _, _ in parts), 1)
    bar, filled = Text(no_wrap=True), 0
    for size, style, cell in parts:
        filled += size
        end = min(BAR, max(round(BAR * filled / whole), len(bar) + (size > 0)))
        bar.append(cell * (end - len(bar)), style)
    return bar.append("·" * (BAR - len(bar)), "dim")


def _of(used: int, tier: Mapping[str, Any]) -> str:
    return f"{format_size(used)} of {format_size(tier['limit_bytes'])}"


def _bar(used: int, tier: Mapping[str, Any]) -> ProgressBar:
    full = used > 0.95 * tier["limit_bytes"]
    style = "yellow" if full else "cyan"
    return ProgressBar(tier["limit_bytes"], used, BAR, complete_style=style, finished_style=style)


def _totals(cache: Mapping[str, Any]) -> Text:
    requests, tokens, saved = cache["requests"], cache["tokens"], cache["saved"]
    text = f"{show.format_count(requests['total'], 'request')}: " + ", ".join(
        f"{requests[kind]:,} {kind}" for kind in ("cold", "warm", "restored")
    )
    if whole := tokens["cached"] + tokens["fed"]:
        text += f"; {tokens['cached'] / whole:.0%} reused"
    if saved["tokens"]:
        text += f", {show.format_saved(tokens['cached'], saved)} saved"
    if tokens.get("drafted"):
        text += f"; {tokens['accepted']:,} of {tokens['drafted']:,} guessed tokens accepted"
    return Text(text, no_wrap=True, overflow="ellipsis")


Named = tuple[str, str, RenderableType]
"""Title of a table, text to show if it is empty, and the table."""


def _running(
    state: LiveState,
    rows: Sequence[Mapping[str, Any]],
    names: Names,
    width: int,
    now: float,
    *,
    several: bool,
) -> Named:
    columns = (("phase", 7), ("", BAR), ("tokens", -19), ("tok/s", -7))
    shown = several and width >= _WIDE
    table = _table(("session", *_model_column(shown), *columns), width)
    for row in rows:
        progress = row["progress"]
        done, total, phase = progress["done_tokens"], progress["total_tokens"], progress["phase"]
        bar: RenderableType = ProgressBar(total, done, BAR) if phase == "prefill" else ""
        text = f"{done:,} of {total:,}" if phase == "prefill" else f"{done:,}"
        if phase == "loading":
            bar, text = ProgressBar(1.0, progress["share"], BAR), f"{progress['share']:.0%}"
        if phase == "queued":
            text = f"for {show.format_duration(max(0.0, now - row['created_at']))}"
        speed = state.speed(row)
        rate = "-" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
        table.add_row(_session_of(row, names), *_model_of(row, shown), phase, bar, text, rate)
    return "Running requests", "No request is running.", table


def _model_column(shown: bool) -> tuple[tuple[str, int], ...]:
    return (("model", _MODEL),) if shown else ()


def _model_of(row: Mapping[str, Any], shown: bool) -> tuple[Text, ...]:
    return (Text(visible(row.get("model") or "-")),) if shown else ()


def _recent(rows: Sequence[Mapping[str, Any]], names: Names, width: int, *, several: bool) -> Named:
    columns = (("cached", -8), ("disk", -7), ("fed", -7), ("reply", -6), ("first", -11), ("end", 9))
    shown = several and width >= _WIDE
    table = _table((("at", 8), "session", *_model_column(shown), *columns), width)
    for row in rows:
        first = row["timing"]["first_token_s"]
        end = row["finish_reason"] if row["status"] == "done" else row["status"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(row["created_at"])),
            _session_of(row, names),
            *_model_of(row, shown),
            _count(row["cached_tokens"] - row["restored_tokens"]),
            _count(row["restored_tokens"]),
            _count(row["fed_tokens"]),
            _count(row["generated_tokens"]),
            "-" if first is None else show.format_duration(first),
            Text(_ENDS.get(end, end or "-"), "red" if row["error"] else ""),
        )
    return "Recent requests, in tokens", "No request has finished.", table


def _sessions(
    rows: Sequence[dict[str, Any]],
    running: Sequence[Mapping[str, Any]],
    names: Names,
    width: int,
    *,
    several: bool,
) -> Named:
    columns = (("tokens", -10), ("RAM", -9), ("disk", -9), ("tier", 5), ("last used", -10))
    table = _table(("name", *_model_column(several), *columns), width)
    for row in rows:
        table.add_row(
            Text(names[row["id"], None]),
            *_model_of(row, several),
            f"{row['tokens']:,}",
            show.format_size_or_dash(row["ram_bytes"]),
            show.format_size_or_dash(row["disk_bytes"]),
            row["tier"] or "-",
            show.format_age(row["last_used_at"]),
        )
    computed = sum(one.get("api") != WARMING for one in running)
    return "Sessions", show.no_sessions_text(computed), table


def _table(columns: Sequence[str | tuple[str, int]], width: int) -> Table:
    """Return an empty table that is `width` columns wide.

    A column is given as (name, width), or as a name only, which then has the width that the others
    leave. A negative width, such as -8, means a right-justified column of 8.
    """
    fixed = [abs(one[1]) for one in columns if isinstance(one, tuple)]
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for one in columns:
        name, size = (one, width - sum(fixed) - len(fixed)) if isinstance(one, str) else one
        made.add_column(
            name,
            width=max(4, abs(size)),
            justify="right" if size < 0 else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    return made


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "-"


def _session_of(row: Mapping[str, Any], names: Names) -> Text:
    """Return the name of a request's session, or else its client, its session's label, or a dash.

    Of these, the first that is known is returned. `row` describes the request as in
    `GET /v1/requests`. `names` is the result of `_names`; a new session is not in it yet.
    """
    session, model = row["session"], row.get("model")
    name = names.get((session, model)) or names.get((session, None))
    return Text(visible(name or row["client"] or session or "-"))
