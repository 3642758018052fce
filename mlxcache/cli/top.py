"""The command `mlxcache top`: the live state of a server, as text that fits the terminal."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlxcache.cli import show
from mlxcache.cli.options import ApiKey, CacheDir, Json, Url, find_server
from mlxcache.cli.output import visible
from mlxcache.config import format_size
from mlxcache.config.flags import option, switch
from mlxcache.errors import MlxcacheError

if TYPE_CHECKING:
    from mlxcache.cli.remote import Remote

# -- the latest state of a server --------------------------------------------------------------

PARTS = ("server", "cache", "requests", "sessions")
MAX_RECENT = 100
Update = tuple[str, Any] | MlxcacheError


@dataclass(slots=True)
class LiveState:
    """Latest state of a server, in the parts of `GET /v1/live`; None before one was received.

    Of the finished requests, `MAX_RECENT` are kept. Not thread-safe.
    """

    server: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    sessions: list[dict[str, Any]] | None = None
    requests: dict[str, dict[str, Any]] | None = None
    _prefills: dict[str, tuple[tuple[int, float], tuple[int, float]]] = field(default_factory=dict)
    """First and latest progress of each prefill, as tokens done and a monotonic time."""

    def apply(self, part: str, body: Any, now: float) -> None:
        """Replace a part by its new `body`; requests are added or replaced by id."""
        match part:
            case "sessions":
                self.sessions = body["data"]
            case "requests":
                self._apply_requests(body["data"], now)
            case "server":
                self.server = body
            case "cache":
                self.cache = body

    def _apply_requests(self, rows: list[dict[str, Any]], now: float) -> None:
        known = self.requests = self.requests or {}
        known.update({row["id"]: row for row in rows})
        for row in rows:
            progress = row["progress"] or {}
            if progress.get("phase") != "prefill":
                self._prefills.pop(row["id"], None)
                continue
            at = (progress["done_tokens"], now)
            first, _ = self._prefills.get(row["id"], (at, at))
            self._prefills[row["id"]] = first, at
        for row in self.recent()[MAX_RECENT:]:
            del known[row["id"]]

    @property
    def complete(self) -> bool:
        """True once every part was received; a server without a model sends no sessions."""
        if self.server is None:
            return False
        known = self.cache is not None and self.requests is not None
        return known and (self.sessions is not None or self.server["state"] != "ready")

    def running(self) -> list[dict[str, Any]]:
        return [row for row in self._oldest_first() if row["progress"]]

    def recent(self) -> list[dict[str, Any]]:
        return [row for row in reversed(self._oldest_first()) if not row["progress"]]

    def _oldest_first(self) -> list[dict[str, Any]]:
        return sorted((self.requests or {}).values(), key=lambda row: row["created_at"])

    def speed(self, row: Mapping[str, Any]) -> float | None:
        reported: float | None = row["progress"]["tokens_per_s"]
        prefill = self._prefills.get(row["id"])
        if reported is not None or prefill is None:
            return reported
        tokens, seconds = (b - a for a, b in zip(*prefill, strict=True))
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def as_object(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "cache": self.cache,
            "requests": [*self.running(), *self.recent()],
            "sessions": self.sessions,
        }


def watch(remote: Remote) -> queue.SimpleQueue[Update]:
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def read() -> None:
        try:
            for part, body in remote.live(PARTS):
                updates.put((part, body))
            updates.put(MlxcacheError(f"The server at {remote.url} has ended."))
        except MlxcacheError as error:
            updates.put(error)

    threading.Thread(target=read, name="mlxcache-top", daemon=True).start()
    return updates


# -- its rendering -----------------------------------------------------------------------------

BAR = 20
_ABOVE, _HEADED = 8, 3
"""Lines above the tables, and lines that each table needs besides its rows."""

MAX_ROWS = 10

_MODEL, _WIDE = 14, 100
"""Width of the column of models, and least width of the terminal for it in tables of requests."""

_ENDS = {"tool_calls": "tools", "stop_sequence": "stop", "cancelled": "cancelled"}


Row = Mapping[str, Any]
Column = tuple[str, int, Callable[[Row], RenderableType]]
"""A heading, a width (0 for what the others leave, negative if right-justified), and the cells."""


def render(state: LiveState, url: str, *, width: int, height: int | None, now: float) -> Group:
    running, recent, sessions = state.running(), state.recent(), state.sessions or []
    models: Sequence[Row] = (state.cache or {}).get("models", ())
    parts: list[RenderableType] = [_head(state, url, len(models)), *_budgets(state.cache)]
    if state.server is not None and state.server["state"] != "ready":
        return Group(*parts)
    names = _names(sessions)
    session: Column = ("session", 0, lambda row: _session_of(row, names))
    name: Column = ("name", 0, lambda row: Text(names[row["id"], None]))
    model = (_MODEL_COLUMN,) if len(models) > 1 else ()
    of_requests = model if width >= _WIDE else ()
    computed = sum(one.get("api") != show.WARMING for one in running)
    tables: tuple[tuple[str, str, Sequence[Row], Sequence[Column]], ...] = (
        (
            "Running requests",
            "No request is running.",
            running,
            (session, *of_requests, *_running(state, now)),
        ),
        (
            "Recent requests, in tokens",
            "No request has finished.",
            recent,
            (_RECENT[0], session, *of_requests, *_RECENT[1:]),
        ),
        ("Sessions", show.no_sessions_text(computed), sessions, (name, *model, *_SESSIONS)),
    )
    left = None if height is None else height - len(models)
    counts = _row_counts(left, (len(running), len(recent), len(sessions)))
    for (title, empty, rows, columns), shown in zip(tables, counts, strict=True):
        more = f" ({shown} of {len(rows)})" if shown < len(rows) else ""
        parts.append(Text(f"\n{title}{more}", "bold"))
        parts.append(_table(columns, rows[:shown], width) if rows else Text(empty, "dim"))
    return Group(*parts)


Names = Mapping[tuple[str, str | None], str]


def _names(sessions: Sequence[dict[str, Any]]) -> Names:
    """Map the id and the label of each session, alone and with its model, to its name.

    A key of several sessions has the name of the last used, which comes first in `sessions`.
    """
    several, found = show.has_several_clients(sessions), dict[tuple[str, str | None], str]()
    for one in reversed(sessions):
        client = show.client_name(one.get("client")) if several else ""
        name = f"{client}: {show.listed_name(one)}" if client else show.listed_name(one)
        for key in filter(None, (one["id"], one["label"])):
            found |= {(key, None): name, (key, one.get("model")): name}
    return found


def _row_counts(height: int | None, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many of the `wanted` rows to show; running requests have the lines first."""
    if height is None:
        running, recent, sessions = (min(n, MAX_ROWS) for n in wanted)
        return running, recent, sessions
    left = max(0, height - _ABOVE - 3 * _HEADED)
    running = min(wanted[0], left)
    left -= running
    recent = min(wanted[1], max(left - wanted[2], left // 2))
    return running, recent, min(wanted[2], left - recent)


def _head(live: LiveState, url: str, models: int) -> Text:
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
    if not cache:
        return []
    disk, text = cache["disk"], "off"
    bar: RenderableType = ""
    used, limit = disk["used_bytes"], disk["limit_bytes"]
    if limit:
        text = f"{_of(used, disk)} in {show.format_count(disk['files'], 'file')}"
        if cache["pending_bytes"]:
            text += f", {format_size(cache['pending_bytes'])} pending"
        if disk["state"] != "ok":
            text = "writes fail: see the server's log"
        style = "yellow" if used > 0.95 * limit else "cyan"
        bar = ProgressBar(limit, used, BAR, complete_style=style, finished_style=style)
    remote = [_remote(cache["remote"])] if "remote" in cache else []
    lines = (*_models(cache), *_ram(cache), _line("Disk", bar, text), *remote, _totals(cache))
    return [Text(), *lines]


def _line(name: str, bar: RenderableType, text: str, width: int = 4) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=width, no_wrap=True, overflow="ellipsis")
    grid.add_column(width=BAR)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(name, bar, text)
    return grid


def _remote(remote: Mapping[str, Any]) -> Text:
    up, down = (format_size(remote[f"{way}_bytes"]) for way in ("uploaded", "downloaded"))
    text, style = f"remote: {up} sent, {down} received", ""
    if remote["state"] != "ok":
        text, style = f"remote {remote['state']}: {remote['reason']}", "yellow"
    return Text(f"     {text}", style, no_wrap=True, overflow="ellipsis")


def _models(cache: Mapping[str, Any]) -> Iterator[RenderableType]:
    for one in cache.get("models", ()):
        there = one["state"] in ("loaded", "loading")
        weights, kv = one.get("weights_bytes", 0) if there else 0, one.get("kv_bytes", 0)
        sizes = ((weights, "weights", _WEIGHTS), (kv, "KV", _PARTS[0]))
        words = [show.model_state(one)]
        words += [f"{format_size(size)} {name}" for size, name, _ in sizes if size]
        parts = [(size, style, cell) for size, _, (_, style, cell) in sizes]
        bar = _stacked_bar(parts, cache["ram"]["limit_bytes"])
        yield _line(visible(one["label"]), bar, ", ".join(words), _MODEL)


_WITHHELD_STYLE = "yellow"
_WEIGHTS = ("weights", "magenta", "#")
_PARTS = (("cached", "cyan", "█"), ("in use", "blue", "▓"), ("reserved", "bright_black", "▒"))


def _ram(cache: Mapping[str, Any]) -> list[RenderableType]:
    ram, indent = cache["ram"], " " * 5
    withheld = ram.get("withheld_bytes", 0)
    charged, used, active = sum(ram["kinds"].values()), ram["used_bytes"], cache["active_bytes"]
    weights, named = ram["kinds"].get("weights", 0), list(_PARTS)
    sizes = [used, active, max(0, charged - weights - used - active - withheld)]
    if weights:  # several models, whose budget includes them
        sizes, named = [weights, *sizes], [_WEIGHTS, *_PARTS]
    parts = [(size, style, cell) for size, (_, style, cell) in zip(sizes, named, strict=True)]
    parts.append((withheld, _WITHHELD_STYLE, "×"))
    whole = _line("RAM", _stacked_bar(parts, ram["limit_bytes"]), _of(charged, ram))
    words = Text(indent, no_wrap=True, overflow="ellipsis")
    for (name, style, cell), size in zip(named, sizes, strict=True):
        words.append(", " if len(words) > len(indent) else "").append(f"{cell} ", style)
        words.append(f"{format_size(size)} {name}")
    lines: list[RenderableType] = [whole, words]
    level = (cache.get("pressure") or {}).get("level", "normal")
    if level != "normal" or withheld:
        over = level == "normal"
        text = "memory pressure is over" if over else f"memory pressure: {level}"
        text += f", × {format_size(withheld)} withheld" if withheld else ""
        lines.append(Text(indent + text, _WITHHELD_STYLE))
    return lines


def _stacked_bar(parts: Sequence[tuple[int, str, str]], limit: int) -> Text:
    """Show how `parts`, each a size, a style and a character, fill `limit` bytes.

    A part above 0 has at least one cell.
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


def _running(state: LiveState, now: float) -> Sequence[Column]:
    def bar(row: Row) -> RenderableType:
        progress = row["progress"]
        if progress["phase"] == "loading":
            return ProgressBar(1.0, progress["share"], BAR)
        if progress["phase"] == "prefill":
            return ProgressBar(progress["total_tokens"], progress["done_tokens"], BAR)
        return ""

    def tokens(row: Row) -> str:
        progress = row["progress"]
        if progress["phase"] == "loading":
            return f"{progress['share']:.0%}"
        if progress["phase"] == "queued":
            return f"for {show.format_duration(max(0.0, now - row['created_at']))}"
        total = f" of {progress['total_tokens']:,}" if progress["phase"] == "prefill" else ""
        return f"{progress['done_tokens']:,}{total}"

    def rate(row: Row) -> str:
        speed = state.speed(row)
        return "-" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"

    phase: Column = ("phase", 7, lambda row: row["progress"]["phase"])
    return (phase, ("", BAR, bar), ("tokens", -19, tokens), ("tok/s", -7, rate))


def _count_or_dash(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "-"


def _first_token(row: Row) -> str:
    first = row["timing"]["first_token_s"]
    return "-" if first is None else show.format_duration(first)


def _end(row: Row) -> Text:
    end = row["finish_reason"] if row["status"] == "done" else row["status"]
    return Text(_ENDS.get(end, end or "-"), "red" if row["error"] else "")


_MODEL_COLUMN: Column = ("model", _MODEL, lambda row: Text(visible(row.get("model") or "-")))
_RECENT: tuple[Column, ...] = (
    ("at", 8, lambda row: time.strftime("%H:%M:%S", time.localtime(row["created_at"]))),
    ("cached", -8, lambda row: _count_or_dash(row["cached_tokens"] - row["restored_tokens"])),
    ("disk", -7, lambda row: _count_or_dash(row["restored_tokens"])),
    ("fed", -7, lambda row: _count_or_dash(row["fed_tokens"])),
    ("reply", -6, lambda row: _count_or_dash(row["generated_tokens"])),
    ("first", -11, _first_token),
    ("end", 9, _end),
)
_SESSIONS: tuple[Column, ...] = (
    ("tokens", -10, lambda row: f"{row['tokens']:,}"),
    ("RAM", -9, lambda row: show.format_size_or_dash(row["ram_bytes"])),
    ("disk", -9, lambda row: show.format_size_or_dash(row["disk_bytes"])),
    ("tier", 5, lambda row: row["tier"] or "-"),
    ("last used", -10, lambda row: show.format_age(row["last_used_at"])),
)


def _table(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    rest = width - sum(abs(size) for _, size, _ in columns) - (len(columns) - 1)
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for heading, size, _ in columns:
        made.add_column(
            heading,
            width=max(4, abs(size or rest)),
            justify="right" if size < 0 else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        made.add_row(*(cell(row) for _, _, cell in columns))
    return made


def _session_of(row: Mapping[str, Any], names: Names) -> Text:
    session, model = row["session"], row.get("model")
    name = names.get((session, model)) or names.get((session, None))
    return Text(visible(name or row["client"] or session or "-"))


# -- the command -------------------------------------------------------------------------------

ONCE_TIMEOUT_S = 5.0
MIN_INTERVAL_S = 0.1


def top(
    *,
    once: Annotated[bool, switch("Print once, and exit.", "--once")] = False,
    as_json: Json = False,
    interval: Annotated[
        float,
        option("SECONDS", "Time between updates.", min=MIN_INTERVAL_S),
    ] = 1.0,
    url: Url = None,
    api_key: ApiKey = None,
    cache_dir: CacheDir = None,
) -> show.Result | None:
    """Show budgets, requests and sessions of a running server, live. Ctrl-C ends it.

    With --once or --json, or if the output is not a terminal, it prints them once and exits.
    """
    remote = find_server(url, api_key, cache_dir)
    out = Console(highlight=False, markup=False, emoji=False)
    if not (as_json or once) and out.is_terminal:
        _redraw(remote, out, interval)
        return None
    state, updates, end = LiveState(), watch(remote), time.monotonic() + ONCE_TIMEOUT_S
    while not state.complete and (left := end - time.monotonic()) > 0:
        _apply_next(state, updates, left)
    width = out.width if out.is_terminal else max(80, out.width)

    def print_once() -> None:
        picture = render(state, remote.url, width=width, height=None, now=time.time())
        out.print(picture, width=width)

    return show.Result(state.as_object(), print_once)


def _redraw(remote: Remote, out: Console, interval: float) -> None:
    state, updates = LiveState(), watch(remote)
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                size = out.size
                picture = render(
                    state, remote.url, width=size.width, height=size.height, now=time.time()
                )
                live.update(picture, refresh=True)
                end = time.monotonic() + (interval if state.complete else MIN_INTERVAL_S)
                while (left := end - time.monotonic()) > 0:
                    _apply_next(state, updates, left)
    except KeyboardInterrupt:
        return


def _apply_next(state: LiveState, updates: queue.SimpleQueue[Update], seconds: float) -> None:
    try:
        update = updates.get(timeout=seconds)
    except queue.Empty:
        return
    if isinstance(update, MlxcacheError):
        raise update
    state.apply(*update, time.monotonic())
