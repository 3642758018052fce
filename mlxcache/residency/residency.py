"""Residency: which models have their weights in memory.

Weights are read when a request needs them, and dropped when the model is idle for long or another
model needs the memory. MLX thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from mlxcache.cache.ram import RamTier
from mlxcache.cache.shared_ram import SharedRam, Wait
from mlxcache.config import format_size
from mlxcache.config.memory import trim_heap
from mlxcache.errors import BadRequest, MlxcacheError, ModelError, NotReady
from mlxcache.model import device
from mlxcache.model.weights import Weights
from mlxcache.residency.memory import WeightsAccount, union_bytes
from mlxcache.residency.resident import Cause, Newcomer, Resident
from mlxcache.scheduling.scheduler import Scheduler

log = logging.getLogger("mlxcache.engine")


class Residency:
    """Decides which models are loaded. MLX thread only.

    The model that has waited longest for memory has the *turn*: others give up memory for it. A
    busy model need not give up its memory during its *stay*, which lasts `Resident.stay_s` seconds.

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
        self._first: Resident | Newcomer | None = None
        self._gives = False
        self._at_rest: set[Resident] = set()
        self._hopeless: Wait | None = None
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

        When it has waited longest, `step` frees memory for its weights and charges them to the
        budget. The future `newcomer.room` is done then; it has an exception if they can never fit.
        """
        newcomer.note_queued(self._clock())
        self._newcomers.append(newcomer)
        self._stepped = True

    def read_first(self, newcomer: Newcomer, weights: Weights) -> None:
        """Queue the weights of a newcomer; each `step` reads a part of them."""
        newcomer.begin(weights)
        self._opened.append(newcomer)

    def note_left(self) -> None:
        """Remove from the queue the newcomers for which no request waits any more."""
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
        if self.reading or any(one.wanted_at is None for one in self._waiting):
            return True
        settling = any(one.settling for one in self.residents)
        return self._stepped and (settling or bool(self._newcomers or self._waiting))

    @property
    def reading(self) -> bool:
        """True while weights of a model are being read."""
        return self._loading is not None or bool(self._opened)

    @property
    def _waiting(self) -> list[Resident]:
        return [one for one in self.residents if one.wanted or one.short]

    def note_step(self) -> None:
        """Record that a scheduler made a step: `step` must check again which models are idle."""
        self._stepped = True

    def wait_s(self) -> float | None:
        """Return the seconds after which `step` must be called even if nothing happens before."""
        now = self._clock()
        waits = [
            max(0.0, one.used_at + (one.idle_s or 0.0) - now)
            for one in self.residents
            if _counts_down(one)
        ]
        if self._newcomers or any(one.wanted_at is not None for one in self.residents):
            stays = [self._end_of_stay(one) for one in self.residents if one.weights.resident]
            waits += [end - now for end in stays if end > now]
        return min(waits, default=None)

    # -- one step ----------------------------------------------------------------------------------

    def step(self, *, read: bool = True) -> None:
        """Unload models that have been idle for too long, and load those that requests wait for.

        With `read`, reads at most one part of a model's weights, so that requests for other models
        are computed in between. Raises device errors (see `device.is_device_error`).
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
        """Release the memory that unloaded models still hold until writes to disk have ended.

        This is the memory set aside for the writes and, for models that were unloaded because they
        were idle, their KV. Models whose writes have not ended keep theirs.
        """
        if any([one.settle() for one in self.residents]):
            trim_heap()
            self.note_step()

    def _choose(self, now: float) -> Resident | None:
        """Serve the model that has waited longest; return it if its weights are to be read now."""
        first = self._find_first()
        if first is not self._first:
            self._end_turn(now)
            self._first = first
        short = isinstance(first, Resident) and first.short
        self._claim(None if short else first)
        if first is None:
            return None
        if isinstance(first, Resident) and first.short:
            self._let_start(first, now)
            return None
        if any(one.alone and now < self._end_of_stay(one) for one in self.residents):
            return None  # loading would take its memory between two prompts that need it
        if self.memory is not None and not self._make_room(first, self.memory, now):
            return None
        self._end_turn(now)
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

    def _find_first(self) -> Resident | Newcomer | None:
        """Return the model that has waited longest for its weights or for memory."""
        waiting: list[Resident | Newcomer] = [
            *(one for one in self._waiting if one.wanted or self._could_start(one)),
            *self._newcomers,
        ]
        return min(waiting, key=lambda one: one.wanted_at or 0.0, default=None)

    def _could_start(self, one: Resident) -> bool:
        """Return whether the waiting prompt of `one` would fit if other models gave up memory."""
        wait = one.kv.waits.current
        if wait is None or wait is self._hopeless or self.memory is None:
            return False
        return self.memory.fits_alone(one.kv.ram, wait.size)

    def _end_turn(self, now: float) -> None:
        """Let all models start requests again: the one they gave up memory for waits no more."""
        for one in self.residents:
            one.drain(on=False)
        first = self._first
        if isinstance(first, Resident) and self._gives and first.scheduler.active:
            first.note_given(now)
        self._first, self._gives = None, False
        self._at_rest.clear()

    def _end_of_stay(self, one: Resident) -> float:
        """Return the time after which the busy model `one` starts no new requests if others wait.

        It is `stay_s` seconds after the model was loaded or got more memory, in seconds of a
        monotonic clock. If a prompt of another model waits for memory, the `stay_s` seconds begin
        with that wait at the earliest, because the requests that run now may leave enough memory
        when they end. They are 0 then if `one` runs no request because its own prompt waits for
        memory too, except after other models gave up memory for `one`.
        """
        first = self._first
        if not isinstance(first, Resident) or not first.short:
            return one.held_at + one.stay_s
        if one.short and not one.alone and not one.scheduler.active:
            return one.held_at  # it cannot use its memory
        return max(one.held_at, first.wanted_at or 0.0) + one.stay_s

    def _let_start(self, one: Resident, now: float) -> None:
        """Have other models give up memory for a prompt of `one` that waits for it."""
        self._gives = True
        others = [other for other in self.residents if other is not one]
        for other in others:
            if other.weights.resident and now >= self._end_of_stay(other):
                other.drain(on=True)
        at_rest, before = {other for other in others if other.at_rest}, set(self._at_rest)
        self._at_rest = at_rest
        if at_rest - before:
            one.kv.waits.retry()
            return
        wait = one.kv.waits.current
        busy = any(other.kv.writing or not other.at_rest for other in others)
        if not busy and wait is not None and wait.room is not None:
            self._hopeless = wait  # all is tried: others have their turns until memory is free
            self._stepped = True

    def _claim(self, wanted: Resident | Newcomer | None) -> None:
        """Let `wanted`, and no other waiting model, hold arrays of base models in memory."""
        former, bases = self._claimer, self.account.bases
        if wanted is former and self._claimed_version == bases.version:
            return
        if former is not None and former is not wanted:
            self.account.remove(former.use)
        if wanted is not None:
            wanted.claim()
        self._claimer, self._claimed_version = wanted, bases.version

    def _make_room(self, wanted: Resident | Newcomer, memory: SharedRam, now: float) -> bool:
        """Free memory for the weights that `wanted` lacks; return whether there is enough now."""
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
            if one.weights.resident and not one.keep and now >= self._end_of_stay(one):
                one.drain(on=True)
        return False

    def _can_fit(
        self, wanted: Resident | Newcomer, keep: list[Resident], memory: SharedRam
    ) -> bool:
        """Return whether `wanted` fits into the budget of `memory` beside the models `keep`."""
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
        """Return the bytes free without all idle KV and the idle models in `others`."""
        idle = sum(one.kv.ram.idle_bytes for one in self.residents)
        models = self._freed_by([one for one in self._unloadable() if one in others])
        return memory.free + idle + models

    def _freed_by(self, residents: list[Resident], *, now: bool = False) -> int:
        """Return the bytes that unloading all of `residents` would free, without their KV."""
        reserved = sum(one.reserved_now if now else one.reserved for one in residents)
        return reserved + self.account.freed_by({one.use for one in residents})

    def _read_first(self, one: Newcomer) -> None:
        """Read one more part of the weights of a newcomer."""
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
            self._refuse(one, NotReady(failure, retry_after=5.0))
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
        """Unload idle models that free `size` bytes; unload none if all of them free less.

        The bytes come in addition to those that are free now. Models used least recently are
        unloaded first; a model is spared if the others free enough. Returns whether models were
        unloaded.
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
        """Return the most bytes that a model's budget can have beside models never unloaded."""
        assert self.memory is not None
        for one in self.residents:
            if one.kv.ram is tier:
                kept = [other for other in self._kept() if other is not one]
                return self.memory.limit - _size_of([one, *kept]) + one.reserved
        return tier.budget.limit

    def size_beside_kept(self, weights: Weights) -> int:
        """Return the bytes that `weights` and all models that are never unloaded take together."""
        kept = self._kept()
        besides = sum(one.reserved for one in kept)
        own = (weights.use, weights.nbytes)
        return besides + union_bytes([own, *((one.use, one.nbytes) for one in kept)])

    def _kept(self) -> list[Resident]:
        return [one for one in self.residents if one.keep and one.state != "unloaded"]

    def unload(self, scheduler: Scheduler) -> bool:
        """Unload the model of `scheduler` if it is idle; return whether it is unloaded now."""
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


def _size_of(models: Sequence[Resident | Newcomer]) -> int:
    besides = sum(one.size - one.nbytes for one in models)
    return besides + union_bytes([(one.use, one.nbytes) for one in models])


def _counts_down(one: Resident) -> bool:
    return one.idle and one.idle_s is not None and not one.keep
