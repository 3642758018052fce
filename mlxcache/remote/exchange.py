"""What the parts of one model's remote tier share: its remote, store, counts and known names."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field

from mlxcache.lru import LRU
from mlxcache.remote import grid
from mlxcache.remote.objects import Objects
from mlxcache.store.reply_rows import KEY_BYTES
from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.engine")

MOST_NAMES = 1 << 16

RECENT_S = 6 * 3600.0
"""Seconds after which an object may have expired, so that its presence is asked for again."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's KV and checkpoints.

    `bytes_per_token`: 0 for a model without layers that keep KV. `opaque`: the model has opaque
    slots, so it needs checkpoints.
    """

    bytes_per_token: int
    checkpoint_bytes: int
    opaque: bool

    @property
    def cell(self) -> int:
        return grid.cell_tokens(self.bytes_per_token)


class Counts:
    """Counters since the start. Thread-safe.

    `expired`: lookups and fetches that were ended by their
    time limit. `slower`: fetches that were not begun, or ended early, because prefill takes less
    time. `dropped`: paths and records that were removed from the full queue of uploads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups = 0
        self.fetched_objects = 0
        self.fetched_bytes = 0
        self.fetched_tokens = 0
        self.fetched_checkpoints = 0
        self.fetched_replies = 0
        self.uploaded_objects = 0
        self.uploaded_bytes = 0
        self.expired = 0
        self.slower = 0
        self.dropped = 0

    def add(self, **gains: int) -> None:
        with self._lock:
            for name, by in gains.items():
                setattr(self, name, getattr(self, name) + by)

    def figures(self) -> dict[str, int]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}


class KnownNames:
    """Names of objects that were seen or written, and of objects found damaged. Thread-safe.

    With them, the uploader need not ask the remote about each object of a conversation at every
    turn.
    """

    def __init__(self) -> None:
        self._present: LRU[str, tuple[float, int]] = LRU(MOST_NAMES)
        self._wrong: LRU[str, bool] = LRU(MOST_NAMES)

    def note_present(self, name: str, stop: int) -> None:
        """Remember that the object `name` is in the remote, with tokens up to position `stop`."""
        self._wrong.pop(name)
        self._present.put(name, (time.monotonic(), stop))

    def note_wrong(self, name: str) -> None:
        """Remember that the object `name` is damaged or missing, and must be written again."""
        self._present.pop(name)
        self._wrong.put(name, True)

    def is_present(self, name: str, stop: int) -> bool:
        known = self._present.get(name)
        return known is not None and known[1] >= stop and time.monotonic() - known[0] < RECENT_S

    def is_wrong(self, name: str) -> bool:
        return self._wrong.peek(name) is not None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One model's remote and store. `label`: that of the model, for the log."""

    objects: Objects
    store: Store
    shape: Shape
    label: str
    counts: Counts = field(default_factory=Counts)
    names: KnownNames = field(default_factory=KnownNames)

    def put(self, name: str, data: bytes) -> None:
        self.objects.put(name, data)
        self.counts.add(uploaded_objects=1, uploaded_bytes=len(data))

    def note_corrupt(self, name: str, error: Exception) -> None:
        self.objects.count_damaged()
        log.warning(
            "model %s: remote object has wrong content, and is not used: %s: %s",
            *(self.label, name, error),
        )

    def record_name(self, kind: str, owner: str | None, key: bytes) -> str:
        """Return the name of a small object of an owner; None if there is at most one API key."""
        words = key + (b"" if owner is None else owner.encode())
        digest = hashlib.blake2b(words, digest_size=KEY_BYTES, person=f"mlxcache {kind}".encode())
        return f"{grid.VERSION}/{self.store.namespace}/{kind}/{digest.hexdigest()}"
