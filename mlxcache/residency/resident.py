"""Newcomers and residents: models with the state of their weights and the memory they take.

MLX thread only, except `Resident.figures`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.config import format_size
from mlxcache.model.weights import BaseUse, Weights
from mlxcache.scheduling.scheduler import Scheduler

log = logging.getLogger("mlxcache.engine")

STAY_LOADS = 4.0
"""Factor: a busy model keeps its memory for this many times the seconds that reading it took.

So a server whose models take turns spends at most a fifth of its time on reading weights.
"""

MIN_STAY_S = 1.0
"""Least seconds for which a busy model keeps its memory."""

PENDING = "pending"
"""The budget's kind of bytes for copies that wait to be written to disk."""

State = Literal["loaded", "loading", "unloaded"]
Cause = Literal["idle", "memory", "asked"]
"""Why a model was unloaded: idle for too long, another one needed the memory, a client asked."""


class Newcomer:
    """A model that is loaded for the first time. MLX thread only, except `served` and `waits`.

    `steps` loads the model and begins to serve it, in as many steps as it yields and one more. The
    future `served` is done then, or has the exception of the step that failed; cancel it to give
    up. `waits`: it has no memory yet.
    """

    short = False

    def __init__(self, use: BaseUse, steps: Generator[None, None, None]):
        self.name, self.use = use.name, use
        self.nbytes = self.size = 0
        self.served: Future[None] = Future()
        self.waits = True
        self.wanted_at = 0.0
        self._steps = steps
        self._folders: Sequence[Path] = ()

    def estimate(self, folders: Sequence[Path], nbytes: int, reserved: int) -> None:
        """Set what is needed of a shared budget; call before the model is queued.

        `folders`: those of its base models. `nbytes`: bytes of its weights, including shared
        arrays. `reserved`: least bytes that it needs besides.
        """
        self._folders, self.nbytes, self.size = folders, nbytes, nbytes + reserved

    @property
    def left(self) -> bool:
        return self.served.cancelled()

    def note_queued(self, now: float) -> None:
        self.wanted_at = now

    def begin(self, now: float) -> None:
        self.waits = False

    def step(self) -> bool:
        """Take the next step, and return whether it was the last one."""
        return next(self._steps, self) is self

    def give_up(self) -> None:
        self._steps.close()

    def end(self, error: BaseException | None = None) -> None:
        if not self.served.set_running_or_notify_cancel():
            return
        if error is None:
            self.served.set_result(None)
        else:
            self.served.set_exception(error)

    def claim(self) -> None:
        """Keep arrays of its base models that are in memory, even if other models are unloaded."""
        self.use.find(self._folders)
        self.use.claim()


class Resident:
    """A model that was loaded at least once, and the memory that it takes besides KV.

    `reserved`: bytes by kind that are set aside in the model's budget while its weights are in
    memory or being read: "pool" (freed buffers that MLX keeps), "transient" (forward passes),
    "pending" (copies to write to disk) and "images". `keep`: the model is never unloaded to free
    memory or for being idle. `idle_s`: seconds without requests after which it is unloaded, or None
    for no limit. MLX thread only, except `figures`.
    """

    def __init__(
        self,
        name: str,
        weights: Weights,
        scheduler: Scheduler,
        *,
        reserved: Mapping[str, int],
        keep: bool = False,
        idle_s: float | None = None,
    ):
        self.name = name
        self.weights = weights
        self.scheduler = scheduler
        self.keep, self.idle_s = keep, idle_s
        self.loads = self.unloads = 0
        self.load_s = 0.0
        self.cause: Cause | None = None
        self.draining = self.asked = self.alone = False
        self.held_at = self.used_at = 0.0
        self.wanted_at: float | None = None
        self._reserved = dict(reserved)
        self._held = set(reserved)
        self._reading: Iterator[int] | None = None
        self._read_bytes = 0
        self._began_at = 0.0

    @property
    def kv(self) -> KVCache:
        return self.scheduler.kv

    @property
    def state(self) -> State:
        if self._reading is not None:
            return "loading"
        return "loaded" if self.weights.resident else "unloaded"

    @property
    def progress(self) -> float | None:
        if self._reading is None:
            return None
        return round(self._read_bytes / max(1, self.weights.nbytes), 3)

    @property
    def admitting(self) -> bool:
        """True if waiting requests of the model may start: it is loaded, and not being drained."""
        return self.weights.resident and not self.draining

    @property
    def idle(self) -> bool:
        """True if the weights are in memory and no request needs them.

        Requests that may not start, because another model is to get the memory, do not count.
        """
        scheduler = self.scheduler
        free = scheduler.idle or (self.draining and not scheduler.active)
        return self.weights.resident and free

    @property
    def wanted(self) -> bool:
        """True if the model is unloaded, and a request waits for it or a client asked for it."""
        return self.state == "unloaded" and (self.asked or bool(self.scheduler.waiting))

    @property
    def short(self) -> bool:
        """True if the weights are in memory, and a request waits for memory of other models."""
        return self.weights.resident and self.kv.waits.current is not None

    @property
    def at_rest(self) -> bool:
        """True if no request is in progress, and none that waits may start."""
        scheduler = self.scheduler
        return not scheduler.active and not (self.admitting and scheduler.waiting)

    @property
    def settling(self) -> bool:
        """True if the model is unloaded, and part of its memory waits for writes of KV to disk."""
        idle = self.cause == "idle" and self.kv.tree.tokens > 0
        return self.state == "unloaded" and (bool(self._held) or idle)

    @property
    def use(self) -> BaseUse:
        return self.weights.use

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    @property
    def reserved(self) -> int:
        return sum(self._reserved.values())

    @property
    def reserved_now(self) -> int:
        """Bytes of `reserved` that become free at once when the model is unloaded."""
        waiting = self._reserved.get(PENDING, 0) if self.kv.writing else 0
        return self.reserved - waiting

    @property
    def size(self) -> int:
        """Bytes that the model takes while it is in memory, without KV."""
        return self.nbytes + self.reserved

    @property
    def shared_bytes(self) -> int:
        """Bytes of `size` in arrays that other loaded models use too; unloading keeps them."""
        return self.use.shared_bytes

    @property
    def stay_s(self) -> float:
        return max(MIN_STAY_S, STAY_LOADS * self.load_s)

    def figures(self) -> dict[str, Any]:
        """Return the state of the weights, as `GET /v1/models` shows it. Any thread."""
        return {
            "state": self.state,
            "size_bytes": self.size,
            "shared_bytes": self.shared_bytes,
            "loads": self.loads,
            "unloads": self.unloads,
            "load_s": round(self.load_s, 3),
            "unloaded_for": self.cause if self.state == "unloaded" else None,
            "progress": self.progress,
            "weights_bytes": self.weights.nbytes,
            "kv_bytes": self.kv.tree.kv_bytes + self.kv.tree.checkpoint_bytes,
            "bytes_per_token": self.kv.layout.bytes_per_token,
        }

    def note_time(self, now: float) -> None:
        """Update `used_at`, the last time of use, and `wanted_at`, the start of the present wait.

        Waiting for the weights and then for memory counts as one wait.
        """
        scheduler = self.scheduler
        if not scheduler.idle:
            self.used_at = now
        if self.wanted or self.short:
            self.wanted_at = now if self.wanted_at is None else self.wanted_at
        elif self.wanted_at is not None and (scheduler.active or not scheduler.waiting):
            self.wanted_at = None
        self.alone = self.alone and not scheduler.idle

    def claim(self) -> None:
        self.use.claim()

    def begin(self, now: float) -> None:
        """Prepare to read the weights again, with `read_on`; charge `reserved` to the budget."""
        unread = format_size(self.nbytes - self.use.held_bytes)
        log.info("model %s: loading the weights, %s", self.name, unread)
        for kind in self._reserved.keys() - self._held:
            self.kv.budget.charge(kind, self._reserved[kind])
        self._held = set(self._reserved)
        self._reading, self._read_bytes = self.weights.read(), 0
        self._began_at = now

    def read_on(self, now: Callable[[], float]) -> None:
        """Read one more part of the weights; after the last one, the model is loaded.

        `now()` returns seconds of a monotonic clock. Raises ModelError if a part cannot be read.
        """
        assert self._reading is not None
        if (done := next(self._reading, None)) is not None:
            self._read_bytes = done
            return
        self._reading = None
        self.asked = False
        self.loads += 1
        self.note_loaded(now())
        self.load_s = self.held_at - self._began_at

    def note_loaded(self, now: float) -> None:
        self.held_at = self.used_at = now

    def note_given(self, now: float) -> None:
        """Record that a prompt of this model got memory that other models gave up."""
        self.held_at, self.alone = now, True

    def drain(self, *, on: bool) -> None:
        self.draining = on

    def ask(self, *, load: bool = True) -> None:
        self.asked = load

    def forget_want(self) -> None:
        self.asked = False
        self.wanted_at = None

    def give_up(self) -> None:
        self._reading, self.asked = None, False
        self._release(*self._held)
        release_unused()

    def drop(self, cause: Cause) -> None:
        """Drop the weights from memory; `cause` is the reason that is shown to clients.

        Idle KV stays in memory until something else needs the space or, if `cause` is "idle", until
        `settle` releases it.
        """
        self.scheduler.idle_prefill.clear()
        self.kv.waits.end()
        self.weights.drop()
        self.draining = self.alone = False
        self.cause = cause
        self.unloads += 1
        self._release(*self._held - {PENDING})  # copies may be on their way to disk

    def _release(self, *kinds: str) -> None:
        for kind in kinds:
            self.kv.budget.release(kind, self._reserved[kind])
        self._held -= set(kinds)

    def settle(self) -> bool:
        """Release the memory that waited for writes to disk, once these have ended.

        That is what is set aside for writing and, if the model was unloaded for being idle, its KV;
        KV stays while the disk cannot be written. Returns whether anything was released.
        """
        if self.state != "unloaded" or self.kv.writing:
            return False
        released = bool(self._held)
        self._release(*self._held)
        disk = self.kv.disk
        if self.cause != "idle" or disk is None or not disk.write_behind.works:
            return released
        if not self.kv.ram.idle:
            return released
        self.kv.clear()
        mx.clear_cache()
        return True


def release_unused() -> None:
    """Free unreachable Python objects and MLX's pool of freed buffers. MLX thread only."""
    gc.collect()  # modules refer to each other in circles
    mx.clear_cache()
