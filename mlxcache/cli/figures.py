"""Printing of the cache's figures (`GET /v1/cache`) under headings, each with its meaning."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.text import Text

from mlxcache.cli import show
from mlxcache.cli.output import console
from mlxcache.config import format_size

_RULES = "Requests canonicalised, by rule"

_GROUPS = (
    ("Memory", ("ram", "active_bytes", "reserved_bytes", "mlx", "pressure")),
    ("Memory budget, by kind", ("ram.kinds",)),
    ("Disk", ("disk", "pending_bytes", "restores")),
    ("Disk, by kind", ("disk.kinds",)),
    ("Remote", ("remote",)),
    ("Exchanged with other servers, through the remote", ("remote.exchange",)),
    ("Prefix tree", ("sessions", "tree_tokens", "segments", "checkpoints", "bytes_per_token")),
    ("Requests since the start", ("requests", "queue", "saved", "contained")),
    ("Tokens since the start", ("tokens", "guesses", "anticipated")),
    ("Evictions from RAM", ("evictions",)),
    (_RULES, ("canonicalised",)),
)
"""Headings, each with the keys of `GET /v1/cache` shown below it.

If several keys match a figure, the longest is used."""

_OTHER: tuple[str, tuple[str, ...]] = ("Other", ())

_LEGEND = {
    "ram.used_bytes": ("used", "prefixes that are kept, of --ram"),
    "ram.high_water_bytes": ("high water", "the most that was ever reserved"),
    "ram.withheld_bytes": ("withheld", "of --ram, while memory is short"),
    "ram.buffers": ("buffers", "MLX arrays that are held"),
    "ram.buffer_limit": ("buffer limit", "arrays that the device allows"),
    "active_bytes": ("in use by requests", "besides the prefixes"),
    "reserved_bytes": ("reserved", "for computing and MLX's pool"),
    "mlx.active_bytes": ("MLX active", "arrays of MLX, with the weights"),
    "mlx.pool_bytes": ("MLX pool", "freed buffers that MLX keeps"),
    "pressure.level": ("memory pressure", "normal, warning or critical"),
    "pressure.footprint_bytes": ("process", "as the system counts its memory"),
    "pressure.most_footprint_bytes": ("process, most", "since the start"),
    "pressure.expected_bytes": ("process, expected", "the most, by weights and --ram"),
    "ram.kinds.pool": ("pool", "freed buffers that MLX keeps"),
    "ram.kinds.transient": ("transient", "what a forward pass needs"),
    "ram.kinds.pending": ("pending writes", "copies on their way to disk"),
    "ram.kinds.kv": ("kv", "keys and values of tokens"),
    "ram.kinds.checkpoints": ("checkpoints", "states of recurrent layers"),
    "ram.kinds.states": ("states", "of conversations in use"),
    "ram.kinds.batch": ("batch", "copies for replies in a batch"),
    "ram.kinds.images": ("images", "image rows of a prompt"),
    "ram.kinds.import": ("import", "a prompt cache that is read"),
    "ram.kinds.withheld": ("withheld", "while memory is short"),
    "disk.used_bytes": ("used", "of --disk"),
    "disk.written_bytes": ("written", "since the start"),
    "disk.written_tokens": ("written tokens", "since the start"),
    "disk.evicted_files": ("evicted files", "since the start"),
    "disk.quarantined": ("quarantined", "damaged files, set aside"),
    "disk.files": ("files", "of KV and checkpoints"),
    "disk.state": ("state", "suspended: writing fails, see the log"),
    "disk.written_per_cached_token": ("written per token", "bytes, per token reused"),
    "disk.tokens": ("tokens", "whose KV is on disk"),
    "disk.pinned_bytes": ("pinned", "of pinned sessions"),
    "pending_bytes": ("pending writes", "not on disk yet"),
    "restores.ok": ("restored files", "read from disk and verified"),
    "restores.corrupt": ("corrupt files", "damaged, tokens computed again"),
    "disk.kinds.runs": ("runs", "keys and values of tokens"),
    "disk.kinds.checkpoints": ("checkpoints", "states of recurrent layers"),
    "disk.kinds.index": ("index", "sessions, and a row for each file"),
    "remote.url": ("URL", "of the shared storage"),
    "remote.sealed": ("sealed", "with --remote-key-file"),
    "remote.state": ("state", "ok, read-only or unavailable"),
    "remote.since": ("since", "of the state"),
    "remote.errors": ("errors", "operations that failed"),
    "remote.damaged_objects": ("damaged objects", "read and not used"),
    "remote.upload_bytes_per_s": ("upload bandwidth", "of recent transfers"),
    "remote.download_bytes_per_s": ("download bandwidth", "of recent transfers"),
    "sessions": ("sessions", "named conversations"),
    "tree_tokens": ("tokens", "held, each shared prefix once"),
    "segments": ("segments", "runs of tokens between branches"),
    "checkpoints": ("checkpoints", "states of layers that cannot be cut"),
    "bytes_per_token": ("bytes per token", "of keys and values"),
    "requests.total": ("total", "that have ended"),
    "requests.warm": ("warm", "half or more reused, from RAM"),
    "requests.restored": ("restored", "half or more reused, some from disk"),
    "requests.cold": ("cold", "under half, or under 17 tokens, reused"),
    "queue.waiting": ("waiting", "now, not computed yet"),
    "queue.limit": ("may wait", "of --queue; more are answered 503"),
    "queue.prefill": ("reading prompts", "now"),
    "queue.decode": ("writing replies", "now"),
    "saved.tokens": ("saved tokens", "reused, with a measured cost"),
    "saved.seconds": ("time saved", "what they would have taken"),
    "tokens.prompt": ("prompt", "of all requests"),
    "tokens.cached": ("cached", "of these: reused"),
    "tokens.restored": ("restored", "of those: from disk"),
    "tokens.fed": ("fed", "prompt tokens that were computed"),
    "tokens.generated": ("generated", "of all replies"),
    "tokens.drafted": ("drafted", "by a draft model or the conversation"),
    "tokens.accepted": ("accepted", "of these: drawn by the model too"),
    "guesses.drafted.draft": ("draft: drafted", "tokens proposed by a draft model"),
    "guesses.accepted.draft": ("draft: accepted", "of these"),
    "guesses.passes.draft": ("draft: passes", "that checked them"),
    "guesses.saved_s.draft": ("draft: saved", "seconds; below 0 if it cost more"),
    "guesses.drafted.history": ("history: drafted", "tokens from the conversation"),
    "guesses.accepted.history": ("history: accepted", "of these"),
    "guesses.passes.history": ("history: passes", "that checked them"),
    "guesses.saved_s.history": ("history: saved", "seconds; below 0 if it cost more"),
    "anticipated.tokens": ("anticipated", "computed ahead, while idle"),
    "anticipated.used_tokens": ("anticipated, used", "of these: needed by a turn"),
    "contained.exceptions": ("contained", "unexpected exceptions: see the log"),
    "evictions.spilled": ("spilled", "entries that stay on disk"),
    "evictions.dropped": ("dropped", "entries that were in RAM alone"),
}
"""Label and meaning of figures by dotted path in `GET /v1/cache`.

The counts of canonicalisation rules are not listed: their keys are the names of the rules."""


class Line(NamedTuple):
    """One printed figure: its label, its value as text, and an explanation, "" for none."""

    label: str
    value: str
    meaning: str = ""


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the body of `GET /v1/cache` as figures under headings, on standard output.

    Figures that belong under no other heading come last, under "Other".
    """
    groups = list(_group_lines(figures))
    lines = [line for _, found in groups for line in found]
    label = max((len(line.label) for line in lines), default=0)
    value = max((len(line.value) for line in lines), default=0)
    out = console()
    for number, (heading, found) in enumerate(groups):
        out.print(Text(heading if not number else f"\n{heading}", "bold"))
        for line in found:
            text = Text(f"  {line.label:<{label}}  {line.value:<{value}}")
            text.append(f"  {line.meaning}", "dim")
            text.rstrip()
            out.print(text)


def _group_lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[Line]]]:
    """Yield each heading with its lines, in the order in which they are printed.

    `figures` is the body of `GET /v1/cache`. Headings without lines are omitted.
    """
    flat = dict(_flatten(figures))
    places: dict[str, list[tuple[int, str]]] = {heading: [] for heading, _ in (*_GROUPS, _OTHER)}
    for path in flat:
        heading, place = _find_place(path)
        places[heading].append((place, path))
    for heading, found in places.items():
        # the sort keeps the order of the figures under one key
        paths = [path for _, path in sorted(found, key=lambda one: one[0])]
        lines = [line for path in paths for line in _line(path, flat)]
        if found and heading == _RULES:
            lines = [one for one in lines if one.value != "0"] or [Line("none", "")]
        if lines:
            yield heading, lines


def _flatten(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each figure in nested objects.

    A path such as `ram.used_bytes` joins the keys that lead to the value. `above` is put before
    each path: the keys of the objects around `figures`, each with a dot after it.
    """
    for key, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield above + key, value


def _find_place(path: str) -> tuple[str, int]:
    """Return the heading under which a figure is printed, and the index of the key that matched.

    `path` is the figure's dotted path, such as `ram.used_bytes`. Each heading has a list of keys,
    which are such paths or their beginnings, such as `ram`. If several keys match, the longest is
    used; if none does, the heading is "Other" and the index 0.
    """
    found = [
        (len(key), heading, number)
        for heading, keys in _GROUPS
        for number, key in enumerate(keys)
        if path == key or path.startswith(f"{key}.")
    ]
    _, heading, number = max(found, default=(0, _OTHER[0], 0))
    return heading, number


def _line(path: str, flat: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the line for one figure, or nothing if the line of another figure shows it too.

    `flat` maps the dotted paths of all figures to their values, and `path` is that of this figure.
    A limit is printed beside the used bytes, and the reason for the disk tier's state beside the
    state.
    """
    above, _, key = path.rpartition(".")
    reason = flat.get("disk.reason")
    if path == "disk.reason":
        if reason is not None and "disk.state" not in flat:
            yield Line("off", "", reason)
        return
    if path == "disk.state" and reason is not None:
        yield Line("state", str(flat[path]), reason)
        return
    if key == "limit_bytes" and f"{above}.used_bytes" in flat:
        return
    text = _format_value(path, flat[path])
    if key == "used_bytes" and flat.get(f"{above}.limit_bytes"):
        text += f" of {_format_value(path, flat[f'{above}.limit_bytes'])}"
    short = path if _find_place(path) == (_OTHER[0], 0) else key
    plain = short.removesuffix("_bytes").replace("_", " ").replace(".", " ")
    label, meaning = _LEGEND.get(path, (plain, ""))
    yield Line(label, text, meaning)


def _format_value(path: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if path.endswith("_bytes_per_s"):
        return f"{format_size(int(value))}/s"
    if path == "remote.since":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if path.endswith(("_bytes", "per_token", "per_cached_token")) or ".kinds." in path:
        return format_size(int(value))
    return show.format_duration(value) if path.endswith("seconds") else f"{value:,}"
