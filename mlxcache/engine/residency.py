"""Residency: which models have their weights in memory.

Weights are read when a request needs them, and dropped when the model is idle for long or another
model needs the memory. MLX thread only.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.ram import RamTier
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.config import format_size
from mlxcache.config.memory import trim_heap
from mlxcache.engine.scheduler import Scheduler
from mlxcache.engine.weights_account import WeightsAccount, union_bytes
from mlxcache.errors import BadRequest, MlxcacheError, ModelError
from mlxcache.model import device
from mlxcache.model.base_weights import BaseUse
from mlxcache.model.resident_weights import Weights

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
    """A model that is loaded for the first time. MLX thread only, except `room` and `read`.

    `use`: the arrays that it shares with other models. `folders`: the folders of its base models.
    `nbytes`: estimated bytes of its weights, including shared arrays. `reserved`: estimated bytes
    that are set aside for it in addition. The future `room` is done once the bytes of the weights
    are charged to the budget, and `read` once they are read; either has an exception if that is not
    possible. `on_read(share)` is called with the share of the weights that is read, from 0 to 1.
    """

    def __init__(
        self,
        use: BaseUse,
        folders: Sequence[Path] = (),
        nbytes: int = 0,
        reserved: int = 0,
        on_read: Callable[[float], None] = lambda share: None,
    ):
        self.name, self.use, self.nbytes = use.name, use, nbytes
        self._folders, self._on_read = folders, on_read
        self.size = nbytes + reserved
        self.room: Future[None] = Future()
        self.read: Future[None] = Future()
        self.wanted_at = 0.0
        self._reading: Iterator[int] = iter(())
        self._whole = 1

    @property
    def left(self) -> bool:
        """True if nobody waits for the model any more: `room` or `read` was cancelled."""
        return self.room.cancelled() or self.read.cancelled()

    def begin(self, weights: Weights) -> None:
        """Prepare to read `weights` in parts; `read_on` reads each part."""
        self._reading, self._whole = weights.read(), max(1, weights.nbytes)

    def read_on(self) -> bool:
        """Read one more part of the weights; return whether all are read.

        Raises ModelError if that fails.
        """
        done = next(self._reading, None)
        if done is not None:
            self._on_read(done / self._whole)
        return done is None

    def end(self, error: Exception | None = None) -> None:
        """Complete the future `read`, with `error` if the weights cannot be read."""
        self._reading = iter(())
        if not self.read.set_running_or_notify_cancel():
            return
        if error is None:
            self.read.set_result(None)
        else:
            self.read.set_exception(error)

    def claim(self) -> None:
        """Hold the arrays of its base models that other models have in memory."""
        self.use.find(self._folders)
        self.use.claim()


class Resident:
    """A model that was loaded at least once, and the memory that it takes besides KV.

    `reserved`: bytes by kind that are set aside in the model's budget while it is loaded. `keep`:
    it is never unloaded. `idle_s`: seconds without requests after which it is unloaded, or None.
    MLX thread only.
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
        self.draining = self.asked = False
        self.loaded_at = self.used_at = 0.0
        self.wanted_at: float | None = None
        self._reserved = dict(reserved)
        self._held = set(reserved)
        self._reading: Iterator[int] | None = None
        self._read_bytes = 0
        self._began_at = 0.0

    @property
    def kv(self) -> KVCache:
        """The model's cache."""
        return self.scheduler.kv

    @property
    def state(self) -> State:
        """`loaded`, `loading` or `unloaded`."""
        if self._reading is not None:
            return "loading"
        return "loaded" if self.weights.resident else "unloaded"

    @property
    def progress(self) -> float | None:
        """Share of the weights that is read, from 0 to 1, while the state is `loading`."""
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
        """True if the weights are not in memory, and a request or a client waits for them."""
        return self.state == "unloaded" and (self.asked or bool(self.scheduler.waiting))

    @property
    def settling(self) -> bool:
        """True if the model is unloaded, and part of its memory waits for writes of KV to disk.

        That memory is what is set aside for writing and, if the model was idle, its KV.
        """
        idle = self.cause == "idle" and self.kv.tree.tokens > 0
        return self.state == "unloaded" and (bool(self._held) or idle)

    @property
    def use(self) -> BaseUse:
        """The model's use of arrays of base models, which other models may use too."""
        return self.weights.use

    @property
    def nbytes(self) -> int:
        """Bytes of the model's weights, including arrays that other models use too."""
        return self.weights.nbytes

    @property
    def reserved(self) -> int:
        """Bytes that are set aside for the model while it is loaded."""
        return sum(self._reserved.values())

    @property
    def reserved_now(self) -> int:
        """Bytes of `reserved` that become free at once when the model is unloaded.

        The others are needed until copies of KV are written to disk.
        """
        waiting = self._reserved.get(PENDING, 0) if self.kv.writing else 0
        return self.reserved - waiting

    @property
    def size(self) -> int:
        """Bytes that the model takes while it is loaded, without KV: weights and `reserved`."""
        return self.nbytes + self.reserved

    @property
    def shared_bytes(self) -> int:
        """Bytes of `size` in arrays that other loaded models use too, which unloading keeps."""
        return self.use.shared_bytes

    @property
    def stay_s(self) -> float:
        """Seconds after loading for which a busy model keeps its memory while other models wait."""
        return max(MIN_STAY_S, STAY_LOADS * self.load_s)

    def note_time(self, now: float) -> None:
        """Update `used_at`, the last time of use, and `wanted_at`, since when requests wait for it.

        `now`: seconds of a monotonic clock.
        """
        if not self.scheduler.idle:
            self.used_at = now
        if not self.wanted:
            self.wanted_at = None
        elif self.wanted_at is None:
            self.wanted_at = now

    def claim(self) -> None:
        """Hold those of its arrays of base models that other models have in memory."""
        self.use.claim()

    def begin(self, now: float) -> None:
        """Prepare to read the weights again, and charge `reserved` to the budget.

        The bytes of the weights are charged already. `now`: seconds of a monotonic clock.
        """
        for kind in self._reserved.keys() - self._held:
            self.kv.budget.charge(kind, self._reserved[kind])
        self._held = set(self._reserved)
        self._reading, self._read_bytes = self.weights.read(), 0
        self._began_at = now

    def read_on(self, now: Callable[[], float]) -> None:
        """Read one more part of the weights, and note when the last one is read.

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
        self.load_s = self.loaded_at - self._began_at

    def note_loaded(self, now: float) -> None:
        """Note that the weights are in memory since `now`, in seconds of a monotonic clock."""
        self.loaded_at = self.used_at = now

    def drain(self, *, on: bool) -> None:
        """Start no more waiting requests of the model if `on`; otherwise let them start again."""
        self.draining = on

    def ask(self, *, load: bool = True) -> None:
        """Have the model loaded without a request; with `load=False`, take that back."""
        self.asked = load

    def forget_want(self) -> None:
        """Note that neither a request nor a client waits for the model any more."""
        self.asked = False
        self.wanted_at = None

    def give_up(self) -> None:
        """Release what `begin` has charged, because the weights could not be read."""
        self._reading, self.asked = None, False
        self._release(*self._held)
        release_unused()

    def drop(self, cause: Cause) -> None:
        """Drop the weights for the reason `cause`.

        Idle KV stays in memory until something else needs the space.
        """
        self.scheduler.idle_prefill.clear()
        self.kv.stop_waiting()
        self.weights.drop()
        self.draining = False
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
        KV stays while the disk cannot be written. Returns True if anything was released.
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


class Residency:
    """Decides which models are loaded. MLX thread only.

    `memory`: the RAM of all models under one budget. If it is None, models have no common budget
    and are unloaded only for being idle. `clock()` returns seconds.
    """

    def __init__(
        self, memory: SharedRam | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self.residents: list[Resident] = []
        self._newcomers: list[Newcomer] = []
        self._opened: list[Newcomer] = []
        self.memory = memory
        self.account = WeightsAccount(self._charge)
        self._clock = clock
        self._loading: Resident | Newcomer | None = None
        self._claimer: Resident | Newcomer | None = None
        self._claimed_version = 0
        self._stepped = False

    def share(self, memory: SharedRam) -> None:
        """Let all models share `memory`. Call before the first model is added."""
        self.memory = memory

    def add(self, resident: Resident) -> None:
        """Add a model whose weights are in memory, and charge their bytes to the shared budget."""
        self.account.grant(resident.use, resident.nbytes)
        resident.note_loaded(self._clock())
        self.residents.append(resident)
        if self.memory is not None:
            self.memory.retry_waiting()  # what waits may fit no more, if this one is always kept

    def welcome(self, newcomer: Newcomer) -> None:
        """Queue a model that is to be loaded for the first time.

        `step` makes room for it in the order of waiting, and then completes `newcomer.room`.
        """
        newcomer.wanted_at = self._clock()
        self._newcomers.append(newcomer)
        self._stepped = True

    def read_first(self, newcomer: Newcomer, weights: Weights) -> None:
        """Queue the weights of a newcomer; each `step` reads a part of them."""
        newcomer.begin(weights)
        self._opened.append(newcomer)

    def note_left(self) -> None:
        """Drop the newcomers for which nobody waits any more."""
        self._newcomers = [one for one in self._newcomers if not one.left]
        self._stepped = True

    def _charge(self, kind: str, nbytes: int) -> None:
        if self.memory is not None:
            self.memory.charge(kind, nbytes)

    def remove(self, scheduler: Scheduler) -> None:
        """Remove the model of `scheduler`, which is about to be closed."""
        self.residents = [one for one in self.residents if one.scheduler is not scheduler]

    def admits(self, scheduler: Scheduler) -> bool:
        """Return whether waiting requests of `scheduler` may start now."""
        return all(one.admitting for one in self.residents if one.scheduler is scheduler)

    @property
    def busy(self) -> bool:
        """True if `step` should be called again without waiting."""
        if self.reading or any(one.wanted_at is None for one in self._wanted):
            return True
        settling = any(one.settling for one in self.residents)
        return self._stepped and (settling or bool(self._newcomers or self._wanted))

    @property
    def reading(self) -> bool:
        """True while weights of a model are being read."""
        return self._loading is not None or bool(self._opened)

    @property
    def _wanted(self) -> list[Resident]:
        return [one for one in self.residents if one.wanted]

    def note_step(self) -> None:
        """Note that a scheduler made a step, after which its model may be idle."""
        self._stepped = True

    def wait_s(self) -> float | None:
        """Return the seconds after which `step` may unload a model; None if none will by itself."""
        now = self._clock()
        waits = [
            max(0.0, one.used_at + (one.idle_s or 0.0) - now)
            for one in self.residents
            if _counts_down(one)
        ]
        if self._newcomers or any(one.wanted_at is not None for one in self.residents):
            stays = [one.loaded_at + one.stay_s for one in self.residents if one.weights.resident]
            waits += [end - now for end in stays if end > now]
        return min(waits, default=None)

    # -- one step ----------------------------------------------------------------------------------

    def step(self, *, read: bool = True) -> None:
        """Unload models that have been idle for too long, and load those that requests wait for.

        With `read`, reads at most one part of a model's weights, so that requests for other models
        are computed in between. Raises device errors.
        """
        now = self._clock()
        self._stepped = False
        for one in self.residents:
            one.note_time(now)
        self._unload_idle(now)
        if self._loading is None:
            self._loading = self._opened.pop(0) if self._opened else self._choose(now)
        if not read or self._loading is None:
            return
        if isinstance(self._loading, Newcomer):
            self._read_first(self._loading)
        else:
            self._read_on(self._loading)

    def _unload_idle(self, now: float) -> None:
        for one in self.residents:
            if _counts_down(one) and now - one.used_at >= (one.idle_s or 0.0):
                self._unload(one, "idle")
        self.settle()

    def settle(self) -> None:
        """Release KV of models that were idle, once it is on disk. Call after writes have ended."""
        if any([one.settle() for one in self.residents]):
            trim_heap()
            self.note_step()

    def _choose(self, now: float) -> Resident | None:
        """Return the model that has been waited for longest if there is memory for it, else None.

        A newcomer only has its `room` completed; None is returned then. If busy models hold the
        memory, those that have been loaded for `stay_s` seconds start no new requests until the
        memory was passed on.
        """
        wanted: list[Resident | Newcomer] = [
            *(one for one in self.residents if one.wanted_at is not None),
            *self._newcomers,
        ]
        first = min(wanted, key=lambda one: one.wanted_at or 0.0, default=None)
        self._claim(first)
        if first is None:
            self._reopen()
            return None
        if self.memory is not None and not self._make_room(first, self.memory, now):
            return None
        self._reopen()
        self._claimer = None  # the claim goes over into the loaded model
        if isinstance(first, Newcomer):
            self._newcomers.remove(first)
            if first.room.set_running_or_notify_cancel():
                self.account.grant(first.use, first.nbytes)
                first.room.set_result(None)
            else:
                self.account.remove(first.use)
            return None
        unread = first.nbytes - first.use.held_bytes
        log.info("model %s: loading the weights, %s", first.name, format_size(unread))
        self.account.grant(first.use, first.nbytes)
        first.begin(now)
        return first

    def _claim(self, wanted: Resident | Newcomer | None) -> None:
        """Let `wanted`, and no other waiting model, hold arrays of base models in memory.

        Otherwise unloading one adapter to load another would drop their common base, which would
        have to be read again.
        """
        former, bases = self._claimer, self.account.bases
        if wanted is former and self._claimed_version == bases.version:
            return
        if former is not None and former is not wanted:
            self.account.remove(former.use)
        if wanted is not None:
            wanted.claim()
        self._claimer, self._claimed_version = wanted, bases.version

    def _reopen(self) -> None:
        for one in self.residents:
            one.drain(on=False)

    def _make_room(self, wanted: Resident | Newcomer, memory: SharedRam, now: float) -> bool:
        """Free memory for what `wanted` does not hold yet; return whether there is enough now.

        `now`: seconds of a monotonic clock.
        """
        others = [one for one in self.residents if one is not wanted]
        if not self._can_fit(wanted, [one for one in self._kept() if one in others], memory):
            return False
        size = wanted.size - wanted.use.held_bytes
        free = self._could_free(others, memory)
        if free < size <= free + memory.withheld:
            memory.withhold(0)  # as for a request that would not fit otherwise
            free = self._could_free(others, memory)
        if free >= size and memory.make_room(size):
            return True
        for one in others:
            if one.weights.resident and not one.keep and now - one.loaded_at >= one.stay_s:
                one.drain(on=True)
        return False

    def _can_fit(
        self, wanted: Resident | Newcomer, keep: list[Resident], memory: SharedRam
    ) -> bool:
        """Return whether `wanted` fits into the budget beside the models `keep`.

        If not, the requests that wait for it get an error.
        """
        if wanted.size + sum(one.size for one in keep) <= memory.limit:
            return True
        kept = _size_of(keep)
        size = _size_of([*keep, wanted]) - kept
        if size <= memory.limit - kept:
            return True
        self._claim(None)
        left = format_size(max(0, memory.limit - kept))
        beside = " beside the models that are always kept" if kept else ""
        error = BadRequest(
            f"The model {wanted.name} needs {format_size(size)}, and --ram leaves {left} for "
            f"it{beside}: start the server with a larger --ram.",
            param="model",
        )
        if isinstance(wanted, Newcomer):
            self._newcomers.remove(wanted)
            if wanted.room.set_running_or_notify_cancel():
                wanted.room.set_exception(error)
        else:
            self._refuse(wanted, error)
        return False

    def _could_free(self, others: list[Resident], memory: SharedRam) -> int:
        """Return the bytes free after evicting all idle KV and unloading idle `others`."""
        idle = sum(one.kv.ram.idle_bytes for one in self.residents)
        models = self._freed_by([one for one in self._unloadable() if one in others])
        return memory.free + idle + models

    def _freed_by(self, residents: list[Resident], *, now: bool = False) -> int:
        """Return the bytes that unloading all of `residents` would free, without their KV.

        With `now`, bytes that are free only after writes to disk do not count.
        """
        reserved = sum(one.reserved_now if now else one.reserved for one in residents)
        return reserved + self.account.freed_by({one.use for one in residents})

    def _read_first(self, one: Newcomer) -> None:
        """Read one more part of the weights of a newcomer.

        After an error, the engine of the newcomer releases what was read.
        """
        try:
            over = one.left or one.read_on()
        except Exception as error:
            self._loading = None
            one.end(error)
            if device.is_device_error(error):  # it concerns the other models too
                raise
            return
        self.account.settle()
        if over:
            self._loading = None
            one.end()

    def _read_on(self, one: Resident) -> None:
        failure: str | None = None
        try:
            one.read_on(self._clock)
        except ModelError as error:
            failure = str(error)
        except BaseException:  # of the device: requests still wait, so it is tried again
            self._give_up(one)
            raise
        if failure is not None:  # the error itself would keep the weights that were read
            self._give_up(one)
            log.error("model %s: cannot be loaded: %s", one.name, failure)
            self._refuse(one, ModelError(failure))
            return
        self.account.settle()
        if one.state == "loaded":
            self._loading = None
            log.info("model %s: loaded in %.1f s", one.name, one.load_s)
            if self.memory is not None:
                self.memory.retry_waiting()  # it may be idle, and give its memory to others

    def _give_up(self, one: Resident) -> None:
        self._loading = None
        one.give_up()
        self.account.remove(one.use)

    def _refuse(self, one: Resident, error: MlxcacheError) -> None:
        one.forget_want()
        for task in list(one.scheduler.waiting):
            one.scheduler.cancel(task, error)

    # -- unloading ---------------------------------------------------------------------------------

    def free_idle(self, size: int) -> bool:
        """Unload idle models until `size` more bytes are free; unload none if that cannot suffice.

        Models used least recently are unloaded first; a model is spared if the others free enough.
        Returns whether the bytes are free.
        """
        chosen: list[Resident] = []
        for one in sorted(self._unloadable(), key=lambda one: one.used_at):
            chosen.append(one)
            if self._freed_by(chosen, now=True) >= size:
                break
        else:
            return False
        for one in reversed(chosen[:-1]):
            rest = [other for other in chosen if other is not one]
            if self._freed_by(rest, now=True) >= size:
                chosen = rest
        for one in chosen:
            self._unload(one, "memory", size)
        return True

    def _unloadable(self) -> list[Resident]:
        return [one for one in self.residents if one.idle and not one.keep]

    def ceiling(self, tier: RamTier) -> int:
        """Return the most bytes that a model's budget can have beside models always kept.

        `tier`: the RAM tier of the model. Always kept are models with `keep = "always"`.
        """
        assert self.memory is not None
        for one in self.residents:
            if one.kv.ram is tier:
                kept = [other for other in self._kept() if other is not one]
                return self.memory.limit - _size_of([one, *kept]) + one.reserved
        return tier.budget.limit

    def size_beside_kept(self, weights: Weights) -> int:
        """Return the bytes that `weights` and all models that are never unloaded take together.

        `weights`: those of a model that is being loaded. Arrays that several models use count once.
        """
        kept = self._kept()
        besides = sum(one.reserved for one in kept)
        own = (weights.use, weights.nbytes)
        return besides + union_bytes([own, *((one.use, one.nbytes) for one in kept)])

    def _kept(self) -> list[Resident]:
        """Return the models in memory that are never unloaded (setting `keep = "always"`)."""
        return [one for one in self.residents if one.keep and one.state != "unloaded"]

    def unload(self, scheduler: Scheduler) -> bool:
        """Unload the model of `scheduler` if it is idle; return whether it is unloaded now.

        A request to load it that `ask` has made is taken back.
        """
        for one in self.residents:
            if one.scheduler is scheduler:
                one.ask(load=False)
                if one.idle:
                    self._unload(one, "asked")
        return all(one.state == "unloaded" for one in self.residents if one.scheduler is scheduler)

    def ask(self, scheduler: Scheduler) -> None:
        """Have the model of `scheduler` loaded although no request waits for it."""
        for one in self.residents:
            if one.scheduler is scheduler and one.state == "unloaded":
                one.ask()

    def _unload(self, one: Resident, cause: Cause, size: int = 0) -> None:
        words = {"memory": f"another model needs {format_size(size)}", "asked": "on request"}
        log.info(
            "model %s: weights of %s unloaded: %s",
            *(one.name, format_size(one.nbytes - one.shared_bytes)),
            words.get(cause, f"idle for {one.idle_s or 0:g} s"),
        )
        one.drop(cause)
        self.account.remove(one.use)
        one.settle()
        trim_heap()


def release_unused() -> None:
    """Free unreachable Python objects and MLX's pool of freed buffers. MLX thread only."""
    gc.collect()  # modules refer to each other in circles
    mx.clear_cache()


def _size_of(models: Sequence[Resident | Newcomer]) -> int:
    """Return the bytes that several models take while all are loaded, without KV."""
    besides = sum(one.size - one.nbytes for one in models)
    return besides + union_bytes([(one.use, one.nbytes) for one in models])


def _counts_down(one: Resident) -> bool:
    """Return whether a model is idle, and is to be unloaded after `idle_s` seconds of that."""
    return one.idle and one.idle_s is not None and not one.keep
