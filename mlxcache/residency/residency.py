"""Which models have their weights in memory, and the loop of the MLX thread that steps them all.

Weights are read when a request needs them, and dropped when the model is idle for long or another
model needs the memory. There is one scheduler for each model that was loaded at least once and is
not closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from traceback import clear_frames

from mlxcache.cache.ram import RamTier
from mlxcache.cache.shared_ram import SharedRam, Wait
from mlxcache.config import format_size
from mlxcache.config.memory import trim_heap
from mlxcache.errors import (
    BadRequest,
    GroupLost,
    Inconsistent,
    MlxcacheError,
    ModelError,
    NotReady,
)
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.model.weights import Weights
from mlxcache.residency.memory import WeightsAccount, union_bytes
from mlxcache.residency.resident import Cause, Newcomer, Resident, release_unused
from mlxcache.scheduling.scheduler import Scheduler
from mlxcache.tree.budget import Budget

log = logging.getLogger("mlxcache.engine")

UNLIMITED = 1 << 62
"""Bytes for the weights of a lone model, which do not count in a budget."""


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
        self.memory = memory
        self._ram = memory or SharedRam(Budget(UNLIMITED))
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
        self.memory = self._ram = memory

    def _charge(self, kind: str, nbytes: int) -> None:
        self._ram.charge(kind, nbytes)

    def add(self, resident: Resident) -> None:
        self.account.grant(resident.use, resident.nbytes)
        resident.note_loaded(self._clock())
        self.residents.append(resident)
        self._ram.retry_waiting()  # what waits may fit no more, if this one is always kept

    def welcome(self, newcomer: Newcomer) -> None:
        """Queue a model that is to be loaded for the first time.

        When it has waited longest, `step` frees memory for its weights, charges them to the budget,
        and takes one of its steps each time. The future `newcomer.served` is done after the last
        one, or has an exception if one fails or the weights can never fit.
        """
        newcomer.note_queued(self._clock())
        self._newcomers.append(newcomer)
        self._stepped = True

    def remove(self, scheduler: Scheduler) -> None:
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
        return self._loading is not None

    @property
    def _waiting(self) -> list[Resident]:
        return [one for one in self.residents if one.wanted or one.short]

    def note_step(self) -> None:
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
        for newcomer in [one for one in self._newcomers if one.left]:
            self._give_up_first(newcomer)
        self._unload_idle(now)
        if self._loading is None:
            self._loading = self._choose(now)
        if not read or self._loading is None:
            return
        if isinstance(self._loading, Newcomer):
            self._load_on(self._loading)
        else:
            self._read_on(self._loading)

    def _unload_idle(self, now: float) -> None:
        for one in self.residents:
            if _counts_down(one) and now - one.used_at >= (one.idle_s or 0.0):
                self._unload(one, "idle")
        self.settle()

    def settle(self) -> None:
        """Release the memory that unloaded models held for writes to disk which have ended."""
        if any([one.settle() for one in self.residents]):
            trim_heap()
            self.note_step()

    def _choose(self, now: float) -> Resident | Newcomer | None:
        """Serve the model that has waited longest; return it if its weights are to be read now."""
        first = self._find_first()
        if first is not self._first:
            self._end_turn(now)
            self._first = first
        self._claim(None if first is None or first.short else first)
        if first is None:
            return None
        if isinstance(first, Resident) and first.short:
            self._let_start(first, now)
            return None
        if any(one.alone and now < self._end_of_stay(one) for one in self.residents):
            return None  # loading would take its memory between two prompts that need it
        if not self._make_room(first, now):
            return None
        self._end_turn(now)
        self._claimer = None  # the claim goes over into the loaded model
        self.account.grant(first.use, first.nbytes)
        first.begin(now)
        return first

    def _find_first(self) -> Resident | Newcomer | None:
        waiting: list[Resident | Newcomer] = [
            *(one for one in self._waiting if one.wanted or self._could_start(one)),
            *self._newcomers,
        ]
        return min(waiting, key=lambda one: one.wanted_at or 0.0, default=None)

    def _could_start(self, one: Resident) -> bool:
        """Return whether the waiting prompt of `one` would fit if other models gave up memory."""
        wait = one.kv.waits.current
        if wait is None or wait is self._hopeless:
            return False
        return self._ram.fits_alone(one.kv.ram, wait.size)

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
        if first is None or not first.short:
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

    def _make_room(self, wanted: Resident | Newcomer, now: float) -> bool:
        """Free memory for the weights that `wanted` lacks; return whether there is enough now."""
        others = [one for one in self.residents if one is not wanted]
        if not self._can_fit(wanted, [one for one in self._kept() if one in others]):
            return False
        size = wanted.size - wanted.use.held_bytes
        free = self._could_free(others)
        if free < size <= free + self._ram.withheld:
            self._ram.withhold(0)  # as for a request that would not fit otherwise
            free = self._could_free(others)
        if free >= size and self._ram.make_room(size):
            return True
        for one in others:
            if one.weights.resident and not one.keep and now >= self._end_of_stay(one):
                one.drain(on=True)
        return False

    def _can_fit(self, wanted: Resident | Newcomer, keep: list[Resident]) -> bool:
        """Return whether `wanted` fits into the budget beside the models `keep`."""
        limit = self._ram.limit
        if wanted.size + sum(one.size for one in keep) <= limit:
            return True
        kept = _size_of(keep)
        size = _size_of([*keep, wanted]) - kept
        if size <= limit - kept:
            return True
        self._claim(None)
        left = format_size(max(0, limit - kept))
        beside = " beside the models that are always kept" if kept else ""
        error = BadRequest(
            f"The model {wanted.name} needs {format_size(size)}, and --ram leaves {left} for "
            f"it{beside}: start the server with a larger --ram.",
            param="model",
        )
        if isinstance(wanted, Newcomer):
            self._give_up_first(wanted, error)
        else:
            self._refuse(wanted, error)
        return False

    def _could_free(self, others: list[Resident]) -> int:
        idle = sum(one.kv.ram.idle_bytes for one in self.residents)
        models = self._freed_by([one for one in self._unloadable() if one in others])
        return self._ram.free + idle + models

    def _freed_by(self, residents: list[Resident], *, now: bool = False) -> int:
        """Return the bytes that unloading all of `residents` would free, without their KV."""
        reserved = sum(one.reserved_now if now else one.reserved for one in residents)
        return reserved + self.account.freed_by({one.use for one in residents})

    def _load_on(self, one: Newcomer) -> None:
        try:
            over = one.step()
        except BaseException as error:
            clear_frames(error.__traceback__)  # they would keep the weights
            self._give_up_first(one, error)
            if _ends_thread(error):
                raise
            return
        self.account.settle()
        if over:
            self._newcomers.remove(one)
            self._loading = None
            one.end()

    def _give_up_first(self, one: Newcomer, error: BaseException | None = None) -> None:
        """End the first load of a model that has left or, with `error`, cannot be loaded."""
        self._newcomers.remove(one)
        if self._loading is one:
            self._loading = None
        one.give_up()
        self.account.remove(one.use)
        release_unused()
        one.end(error)

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
            self._ram.retry_waiting()  # it may be idle, and give its memory to others

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
        for one in self.residents:
            if one.kv.ram is tier:
                kept = [other for other in self._kept() if other is not one]
                return self._ram.limit - _size_of([one, *kept]) + one.reserved
        return tier.budget.limit

    def size_beside_kept(self, weights: Weights) -> int:
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


# -- the loop of the MLX thread --------------------------------------------------------------------

MOST_FAILURES = 3
"""Rounds in a row whose own code fails that end the thread."""


class Rounds:
    """Owner of the MLX thread, which divides its time evenly between the schedulers with work.

    `start`, `end` and `on_death` may be called from any thread, all other methods on the MLX thread
    only. `residency` decides which models have their weights in memory. `clock` returns seconds.
    """

    def __init__(
        self,
        residency: Residency | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.residency = residency or Residency()
        self.thread = MlxThread(self._die, _ends_thread)
        self._clock = clock
        self._used: dict[Scheduler, float] = {}
        self._listeners: list[Callable[[BaseException], None]] = []
        self._read_s = 0.0  # of reading weights, less what models have computed since
        self._started = self._stopping = False
        self._failures = 0

    # -- from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        if not self._started:
            self._started = True
            self.thread.post(self.run)
            self.thread.start()

    def end(self) -> None:
        """End the loop and the thread after all actions posted so far. Does not block.

        If a scheduler has not been removed by then, neither ends: call `end` again once it is.
        """

        def stop() -> None:
            self._stopping = not self._used

        self.thread.post(stop)
        self.thread.end()

    def on_death(self, listener: Callable[[BaseException], None]) -> None:
        """Call `listener(error)` once on the MLX thread if an error ends the loop."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def _die(self, error: BaseException) -> None:
        for listener in self._listeners:
            try:
                listener(error)
            except Exception:  # the others still write to disk
                log.exception(
                    "MLX thread died, and its shutdown failed: newest KV may not be on disk"
                )

    # -- on the MLX thread -------------------------------------------------------------------------

    def add(self, scheduler: Scheduler) -> None:
        self._used[scheduler] = 0.0

    def remove(self, scheduler: Scheduler) -> None:
        self._used.pop(scheduler, None)
        self.residency.remove(scheduler)

    def run(self) -> None:
        while not self._stopping:
            self.tick()

    def tick(self) -> None:
        """Run one round: posted actions, loading and unloading, then a step of one scheduler.

        Of the schedulers with work, the one that has used the least time is stepped; if none has
        work, all are stepped. Before that, while there is neither work nor a model to load, blocks
        until an action is posted or a model may be unloaded. After a device error, the active
        tasks of all schedulers begin again, because it is not known whose command failed; the third
        such error in a row is raised. Any other exception is logged, and the third in a row raises
        Inconsistent.
        """
        try:
            self._play()
            self._failures = 0
        except Exception as error:
            if _ends_thread(error):
                raise
            self._failures += 1
            log.error("a round of the MLX thread failed: %s", error, exc_info=error)
            if self._failures >= MOST_FAILURES:
                why = f"The MLX thread failed again and again: {error!r}"
                raise Inconsistent(why) from error

    def _play(self) -> None:
        stepped: list[Scheduler] = []
        try:
            block = not (self._working() or self.residency.busy)
            self.thread.run_posted(block=block, wait_s=self.residency.wait_s())
            self._step_residency()
            working = self._working()
            stepped = [self._next(working)] if working else list(self._used)
            sharing = len(working) > 1 or self.residency.reading
            for scheduler in stepped:
                self._step(scheduler, sharing=sharing)
            if working:
                self.residency.note_step()
            self.residency.settle()
        except RuntimeError as error:
            if not self._used or not device.is_device_error(error):
                raise
            stepped = list(self._used)
            for scheduler in stepped:
                scheduler.recover(error)
            self.residency.note_step()
        for scheduler in stepped:
            scheduler.publish()

    def _step_residency(self) -> None:
        """Unload and load models; reading weights takes at most half of the thread's time."""
        began, reading = self._clock(), self.residency.reading
        self.residency.step(read=self._read_s <= 0 or not self._working())
        self._read_s = max(0.0, self._read_s) + self._clock() - began if reading else 0.0

    def _working(self) -> list[Scheduler]:
        admits = self.residency.admits
        return [one for one in self._used if one.has_work(admitting=admits(one))]

    def _next(self, working: list[Scheduler]) -> Scheduler:
        turn = min(working, key=self._used.__getitem__)
        least = self._used[turn]
        for scheduler in self._used.keys() - set(working):
            self._used[scheduler] = max(self._used[scheduler], least)
        return turn

    def _step(self, scheduler: Scheduler, *, sharing: bool) -> None:
        began = self._clock()
        scheduler.step(sharing=sharing, admitting=self.residency.admits(scheduler))
        seconds = self._clock() - began
        self._used[scheduler] += seconds
        self._read_s -= seconds


def _ends_thread(error: BaseException) -> bool:
    return isinstance(error, GroupLost | Inconsistent) or device.is_device_error(error)
