"""The figures of `GET /v1/cache` by the names that Prometheus knows them by.

Conventions: https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "mlxcache_"

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a family's values stand among the figures: `path` leads to a number, or to a table of
    numbers by label. `labels` are the values of those labels that all of it has in common."""

    path: tuple[str, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that is one of the figures. `name` is without the prefix and, of a counter, without
    `_total`; `labels` are the names of its labels."""

    kind: Kind
    name: str
    help: str
    places: tuple[Place, ...]
    labels: tuple[str, ...] = ()

    def samples(self, figures: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """The values of its labels with each number; none for what the figures lack."""
        for place in self.places:
            value: Any = figures
            for key in place.path:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, Mapping):
                for label, number in value.items():
                    yield (*place.labels, label), float(number)
            elif value is not None:
                yield place.labels, float(value)


LEVELS = ("normal", "warning", "critical")


def _gauge(name: str, help: str, path: str, *labels: str) -> Family:
    return Family("gauge", name, help, (_place(path),), labels)


def _counter(name: str, help: str, path: str, *labels: str) -> Family:
    return Family("counter", name, help, (_place(path),), labels)


def _place(path: str, *labels: str) -> Place:
    return Place(tuple(path.split(".")), labels)


_REQUESTS = (
    _counter("admitted_requests", "Requests that were computed.", "admitted", "reuse"),
    _gauge("queued_requests", "Requests that wait for their turn.", "queue.waiting"),
    _gauge("queue_limit", "Requests that may wait; more are refused.", "queue.limit"),
    _gauge("running_requests", "Requests that are computed now.", "running", "phase"),
    _counter("prompt_tokens", "Prompt tokens of computed requests.", "tokens.prompt"),
    _counter("cached_tokens", "Prompt tokens that were not fed.", "tokens.cached"),
    _counter("restored_tokens", "Cached tokens that came from disk.", "tokens.restored"),
    _counter("fed_tokens", "Prompt tokens that the model was fed.", "tokens.fed"),
    _counter("generated_tokens", "Tokens of replies.", "tokens.generated"),
    _counter("drafted_tokens", "Tokens that the draft model drafted.", "tokens.drafted"),
    _counter("accepted_tokens", "Drafted tokens that the model drew.", "tokens.accepted"),
    _counter("saved_tokens", "Cached tokens of which saved_seconds tells.", "saved.tokens"),
    _counter("saved_seconds", "What computing them would have taken.", "saved.seconds"),
    _counter("anticipated_tokens", "Tokens computed for turns to come.", "anticipated.tokens"),
    _counter("anticipated_used_tokens", "Of them, used.", "anticipated.used_tokens"),
    _counter(
        "canonicalised_requests", "Requests in which a rule changed text.", "canonicalised", "rule"
    ),
)

_MEMORY = (
    _gauge("sessions", "Sessions in the table.", "sessions"),
    _gauge("tree_tokens", "Tokens in the prefix tree.", "tree_tokens"),
    _gauge("tree_segments", "Segments of the prefix tree.", "segments"),
    _gauge("tree_checkpoints", "Checkpoints in the prefix tree.", "checkpoints"),
    Family(
        "gauge",
        "cache_bytes",
        "Bytes in use, by what they are for.",
        (_place("ram.kinds", "ram"), _place("disk.kinds", "disk")),
        ("tier", "kind"),
    ),
    Family(
        "gauge",
        "cache_limit_bytes",
        "The memory budget, and the cap of the disk tier.",
        (_place("ram.limit_bytes", "ram"), _place("disk.limit_bytes", "disk")),
        ("tier",),
    ),
    _gauge("ram_high_water_bytes", "Most of the budget ever in use.", "ram.high_water_bytes"),
    _gauge("ram_buffers", "Arrays that the cache holds.", "ram.buffers"),
    _gauge("mlx_active_bytes", "Bytes of MLX arrays, weights included.", "mlx.active_bytes"),
    _gauge("mlx_pool_bytes", "Bytes in MLX's pool of freed buffers.", "mlx.pool_bytes"),
    _gauge("footprint_bytes", "The process, by the system's count.", "pressure.footprint_bytes"),
    _gauge("memory_pressure", "1 at the level that memory is at.", "levels", "level"),
    _counter("ram_evictions", "Evictions from RAM.", "evictions", "outcome"),
)

_DISK = (
    _gauge("pending_bytes", "Bytes on their way to disk.", "pending_bytes"),
    _counter("disk_written_bytes", "Bytes written to disk.", "disk.written_bytes"),
    _counter("disk_written_tokens", "Tokens written to disk.", "disk.written_tokens"),
    _counter("disk_evicted_files", "Files evicted from disk.", "disk.evicted_files"),
    _gauge("disk_files", "Files in the disk tier.", "disk.files"),
    _gauge("disk_quarantined_files", "Files set aside as damaged.", "disk.quarantined"),
    _gauge("disk_suspended", "1 while writing to disk fails.", "disk.suspended"),
    _counter("restores", "Checks of files that were to be used.", "restores", "outcome"),
)

_SERVER = (
    _gauge("ready", "1 while requests are served.", "ready"),
    _gauge("mlx_thread_silent_seconds", "How long the step in hand has gone on.", "silent_s"),
)

FAMILIES = (*_REQUESTS, *_MEMORY, *_DISK, *_SERVER)


def arranged(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures with what `FAMILIES` looks for: words as numbers, tables without their sums."""
    disk, queue = figures.get("disk", {}), figures.get("queue", {})
    level = figures.get("pressure", {}).get("level")
    made: dict[str, Any] = {
        "admitted": {k: n for k, n in figures.get("requests", {}).items() if k != "total"},
        "running": {phase: n for phase, n in queue.items() if phase in ("prefill", "decode")},
        "levels": {one: one == level for one in LEVELS if level is not None},
    }
    if "state" in disk:
        made["disk"] = {**disk, "suspended": disk["state"] != "ok"}
    return {**figures, **made}
