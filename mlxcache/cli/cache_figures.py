"""Figures of `GET /v1/cache` as a table: under headings, with the label and meaning of each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.text import Text

from mlxcache.cli.output import console
from mlxcache.cli.show import format_duration
from mlxcache.config import format_size

_RULES = "Requests canonicalised, by rule"

_GROUPS = (
    ("In short", ("tokens.cached", "ram.used_bytes", "reserved_bytes", "disk.used_bytes")),
    ("Requests since the start", ("requests", "queue", "saved", "contained")),
    ("Tokens since the start", ("tokens", "guesses", "anticipated")),
    ("Disk", ("disk", "pending_bytes", "restores")),
    ("Disk, by kind", ("disk.kinds",)),
    ("Remote", ("remote",)),
    ("Exchanged with other servers, through the remote", ("remote.exchange",)),
    (
        "Prefix tree",
        (
            "sessions",
            "tree_tokens",
            "segments",
            "checkpoints",
            "bytes_per_token",
            "bytes_per_checkpoint",
        ),
    ),
    ("Memory", ("ram", "active_bytes", "mlx", "pressure")),
    ("Memory budget, by kind", ("ram.kinds",)),
    ("Evictions from RAM", ("evictions",)),
    (_RULES, ("canonicalised",)),
)
"""Headings with the keys of `GET /v1/cache` shown below each; the longest that matches is used."""

_LEGEND = {
    "ram.used_bytes": ("RAM", "prefixes that are kept, of --ram"),
    "ram.high_water_bytes": ("high water", "the most that was ever reserved"),
    "ram.withheld_bytes": ("withheld", "of --ram, while memory is short"),
    "ram.buffers": ("buffers", "MLX arrays that are held"),
    "ram.buffer_limit": ("buffer limit", "arrays that the device allows"),
    "active_bytes": ("in use by requests", "besides the prefixes"),
    "reserved_bytes": ("RAM, reserved", "for computing and MLX's pool"),
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
    "disk.used_bytes": ("disk", "prefixes and their index, of --disk"),
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
    "sessions": ("sessions", "conversations, with a name or without"),
    "tree_tokens": ("tokens", "held, each shared prefix once"),
    "segments": ("segments", "runs of tokens between branches"),
    "checkpoints": ("checkpoints", "states of layers that cannot be cut"),
    "bytes_per_token": ("bytes per token", "of keys and values"),
    "bytes_per_checkpoint": ("bytes per checkpoint", "at most"),
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
    "tokens.cached": ("reused", "prompt tokens since the start"),
    "tokens.restored": ("restored", "of the reused: from disk"),
    "tokens.fed": ("fed", "prompt tokens that were computed"),
    "tokens.generated": ("generated", "of all replies"),
    "tokens.drafted": ("drafted", "by a draft model, heads, or guessed"),
    "tokens.accepted": ("accepted", "of these: drawn by the model too"),
    "guesses.drafted.draft": ("draft: drafted", "tokens proposed by a draft model"),
    "guesses.accepted.draft": ("draft: accepted", "of these"),
    "guesses.passes.draft": ("draft: passes", "that checked them"),
    "guesses.saved_s.draft": ("draft: saved", "seconds; below 0 if it cost more"),
    "guesses.drafted.heads": ("heads: drafted", "tokens proposed by the model's heads"),
    "guesses.accepted.heads": ("heads: accepted", "of these"),
    "guesses.passes.heads": ("heads: passes", "that checked them"),
    "guesses.saved_s.heads": ("heads: saved", "seconds; below 0 if it cost more"),
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
"""Label and meaning of figures by dotted path; canonicalisation rules are named by their keys."""


class Line(NamedTuple):
    label: str
    value: str
    meaning: str = ""


def print_figures(figures: Mapping[str, Any]) -> None:
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
    flat, under = dict(_flatten(figures)), defaultdict[str, list[str]](list)
    for path in flat:
        under[_key_of(path)].append(path)
    for heading, keys in (*_GROUPS, ("Other", ("",))):
        lines = [line for key in keys for path in under[key] for line in _line(path, flat)]
        if lines and heading == _RULES:
            lines = [one for one in lines if one.value != "0"] or [Line("none", "")]
        if lines:
            yield heading, lines


def _flatten(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield above + key, value


def _key_of(path: str) -> str:
    """Return the longest key of `_GROUPS` that is the beginning of `path`, or "" for none."""
    keys = (key for _, keys in _GROUPS for key in keys)
    return max((key for key in keys if f"{path}.".startswith(f"{key}.")), key=len, default="")


def _line(path: str, flat: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the line for one figure, or nothing if the line of another figure shows it too."""
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
    prompt = flat.get("tokens.prompt")
    if path == "tokens.cached" and prompt:
        text += f" ({flat[path] / prompt:.0%})"
    short = key if _key_of(path) else path
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
    return format_duration(value) if path.endswith("seconds") else f"{value:,}"
