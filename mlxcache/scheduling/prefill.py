"""Prefill: choice of the next prompt, length of its chunk, its speed, and balance with decoding.

MLX thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import GenerationFailed
from mlxcache.model import device
from mlxcache.model import kv as model_kv
from mlxcache.model.lineage import Lineage, ends_finite
from mlxcache.scheduling.cost import FEWEST, NEAR, Cost, range_of
from mlxcache.scheduling.decoder import NonFiniteOutput
from mlxcache.scheduling.images import Images
from mlxcache.scheduling.task import Task

log = logging.getLogger("mlxcache.engine")

BURST_S, ARRIVAL_S = 2.0, 8.0
"""Most seconds of prefill that goes before decoding, so that its replies can form one batch.

ARRIVAL_S applies if nothing was being decoded when the prefill began, that is, if all requests
arrived together.
"""

STALL_S = 1.0
"""Longest gap between two tokens of a reply during a burst, in seconds, not counting one chunk."""

DECODE_SHARE = 1.15
"""Seconds of decoding for each second of prefill: a reply then keeps half of its speed."""

FIRST_ROUND_S = 0.05  # assumed seconds of a round of decoding before one was measured

ALONE_S = 2.0
WAITING_S = 1.0
DECODING_S = 0.4
IDLE_S = 0.25
"""Length of a chunk in seconds: alone, while other prompts wait, while replies are decoded, and
while the server is idle, when a new request waits for it."""

LEAST_MEASURED = 128
"""Tokens of the shortest chunk that is measured: shorter ones mostly show a pass's fixed cost."""


def chunk_seconds(*, waiting: bool, decoding: bool) -> float:
    if decoding:
        return DECODING_S
    return WAITING_S if waiting else ALONE_S


class PrefillDecodeBalance:
    """Divides the MLX thread's time between prefill and decoding.

    Decoding gets a little more time than prefill, except during a burst: prefill that is expected
    to end within `BURST_S` or `ARRIVAL_S` seconds goes first, so that its replies can be decoded
    together. `owed`: seconds of decoding that are due to replies, because prefill delays them.
    `round_s`: seconds of one step of every lane; a moving average.
    """

    def __init__(self, clock: Callable[[], float]):
        self.owed = 0.0
        self.round_s = FIRST_ROUND_S
        self._clock = clock
        self._bound = BURST_S
        self._round_at = clock()

    def begin(self, *, decoding: bool) -> None:
        """Begin a burst, when a prompt enters prefill while no other one is in it."""
        self._bound = BURST_S if decoding else ARRIVAL_S

    def prefill(self, chunk: Callable[[], None], *, owing: bool = True) -> None:
        """Call `chunk()`, which runs one chunk of prefill; if `owing`, replies wait for it."""
        if not owing:
            self.owed = 0.0
        began = self._clock()
        chunk()
        if owing:
            self.owed += DECODE_SHARE * (self._clock() - began)

    def note_reply(self) -> None:
        """Record that a reply begins: it may decode before the next chunk of prefill."""
        self.owed = max(self.owed, DECODE_SHARE * DECODING_S)

    def due(self, left_s: float) -> float:
        """Return the seconds of decoding that are due before a prefill of `left_s` more seconds."""
        if not left_s:
            self.owed = 0.0
        return self.owed - (self._bound if left_s <= self._bound else 0.0)

    def may_wait(self, due: float) -> bool:
        """Return whether decoding, of which `due` seconds are due, can wait for another chunk."""
        return due <= 0 and self._clock() - self._round_at < STALL_S

    def decode(self, run_round: Callable[[], None], due: float, more: Callable[[], bool]) -> None:
        """Run rounds of decoding for `due` seconds, but one at least, while `more()`."""
        began = self._clock()
        run_round()
        rounds = 1
        while self._clock() - began < due and more():
            run_round()
            rounds += 1
        self._round_at = self._clock()
        if more() or rounds > 1:  # a round without replies takes no time
            self.round_s += 0.1 * ((self._round_at - began) / rounds - self.round_s)
        self.owed = max(0.0, self.owed - (self._round_at - began))


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of the engine: tokens, and bytes of temporary memory of a pass."""

    concurrency: int
    prefill_chunk: int
    context: int
    transient: int


class PrefillSpeed:
    """Measured cost of prefill, by range of positions (`range_of`). MLX thread only.

    `Cost` has moving averages, for planning the next chunk. Here only chunks of requests count, and
    all of them alike. By range: the tokens fed in it, and the seconds that they took.
    """

    def __init__(self) -> None:
        self._measured: dict[int, tuple[int, float]] = {}
        self._unsaved: dict[int, tuple[int, float]] = {}

    def resume(self, measured: Mapping[int, tuple[int, float]]) -> None:
        for where, (tokens, seconds) in measured.items():
            _add(self._measured, where, tokens, seconds)

    def observe(self, tokens: int, seconds: float, cached: int) -> None:
        if tokens < LEAST_MEASURED or seconds <= 0:
            return
        for where, part in _by_range(cached, cached + tokens):
            for held in (self._measured, self._unsaved):
                _add(held, where, part, seconds * part / tokens)

    def take_unsaved(self) -> dict[int, tuple[int, float]]:
        """Return what `observe` added since the last call, for the totals that `resume` gets."""
        unsaved, self._unsaved = self._unsaved, {}
        return unsaved

    def seconds(self, tokens: int) -> float | None:
        """Return the seconds for computing a prompt's first `tokens` tokens; None if unmeasured."""
        priced = self._priced(tokens)
        if tokens and not priced:
            return None
        return sum(part * pace for part, pace in priced)

    def known_tokens(self, tokens: int) -> int:
        """Return how many of a prompt's first `tokens` tokens are included in `seconds`."""
        return sum(part for part, _ in self._priced(tokens))

    def _priced(self, tokens: int) -> list[tuple[int, float]]:
        """Divide a prompt's first `tokens` tokens into (tokens, seconds per token) by range."""
        found, pace = [], None
        for where, part in _by_range(0, tokens):
            if (measured := self._measured.get(where)) is not None:
                pace = measured[1] / measured[0]
            if pace is not None:
                found.append((part, pace))
        return found


def _by_range(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        where = range_of(start)
        after = min(end, NEAR << where)
        yield where, after - start
        start = after


def _add(held: dict[int, tuple[int, float]], where: int, tokens: int, seconds: float) -> None:
    before = held.get(where, (0, 0.0))
    held[where] = before[0] + tokens, before[1] + seconds


class Prefill:
    def __init__(
        self,
        model: Any,
        kv: KVCache,
        cost: Cost,
        limits: Limits,
        images: Images | None = None,
    ):
        self.model = model
        self.cost = cost
        self.speed = PrefillSpeed()
        self.limits = limits
        self._kv = kv
        self._images = images
        self._feeding: tuple[int, int] | None = None
        self._most: dict[int, int] = {}

    def choose(self, tasks: list[Task]) -> Task:
        """Return the task whose chunk is fed next: the one with the fewest remaining tokens.

        So that no task waits forever, each time a task is skipped it counts as two chunks shorter.
        A task in the middle of an image continues until the end of the image.
        """
        if self._images is not None and (holder := self._images.holder(tasks)) is not None:
            return holder
        bonus = 2 * self.limits.prefill_chunk
        chosen = min(tasks, key=lambda t: t.remaining - bonus * t.skipped)
        for task in tasks:
            task.pass_over(chosen)
        return chosen

    def left_s(self, tasks: list[Task]) -> float:
        return sum(task.remaining for task in tasks) / self.cost.rate

    def feed_chunk(self, task: Task, seconds: float) -> None:
        """Feed the next chunk of a task's prompt, of about `seconds` seconds, and commit it.

        A chunk at whose end a checkpoint is taken is always committed. Any other one is not if the
        model has opaque slots, nor on a GPU if it is the prompt's last one. Raises, before the
        commit, GenerationFailed or NonFiniteOutput if the new KV is wrong.
        """
        if task.remaining > 0:
            self._feed(task, self._size(task, seconds))
        else:
            _check_aligned(task.held.lineage)

    def _size(self, task: Task, seconds: float) -> int:
        at = task.held.length
        most = min(
            (tokens for reach, tokens in self._most.items() if reach <= range_of(at)),
            default=self.limits.prefill_chunk,
        )
        bytes_ = self.limits.transient
        size = self.cost.chunk(at, bytes_=bytes_, seconds=seconds, most=most)
        if task.scores_prompt:  # each position has logits
            while size > 1 and self.cost.peak(size, at) + size * self.cost.fixed > bytes_:
                size //= 2
        stop = task.target
        if not self._kv.layout.keeps_rows:  # else the states within a pass are there after it
            stop = next((s for s in task.stops if s > at), stop)
        return min(size, stop - at, task.remaining)

    def _feed(self, task: Task, size: int) -> None:
        lease = task.held
        lineage = lease.lineage
        scored = task.scores_prompt
        at, last = lineage.length, size == task.remaining and not scored
        end = at + size
        marks = [stop for stop in task.stops if at < stop <= end]
        self._feeding = at, size
        images = self._images.inputs(task, at, end) if self._images else {}
        began = time.perf_counter()
        self._forward(task, at, end, images)
        model_kv.eval_states(lineage.caches, wait=not last or bool(marks))
        lineage.advance(size)
        _check_aligned(lineage)
        if not (last or ends_finite(lineage)):
            raise NonFiniteOutput
        if not last:
            took = 0.0 if scored else time.perf_counter() - began
            self.cost.observe(size, took, at)
            self.speed.observe(size, took, at)
        # the last pass still runs: where a commit waits for it, the first token is drawn before
        if not (marks or self._kv.layout.opaque or (last and device.defers_errors())):
            self._kv.commit(lease, task.ids, checkpoint=False)
            self.note_confirmed()
        for mark in marks:
            self._kv.commit(lease, task.ids, checkpoint=True, upto=mark)
            self.note_confirmed()
        if not last:
            lineage.settle()
            mx.clear_cache()
            task.show_progress()

    @property
    def confirmed(self) -> bool:
        """True if the device is known to have computed every chunk fed so far."""
        return self._feeding is None

    def note_confirmed(self) -> None:
        self._feeding = None

    def note_device_error(self) -> None:
        """Feed shorter chunks from now on if the device failed while a chunk was fed.

        That applies to all prompts, from its position on. The operating system ends passes that
        block the display for too long, and a shorter pass also takes less memory.
        """
        if self._feeding is not None:
            at, size = self._feeding
            self._most[range_of(at)] = shorter = max(FEWEST, size // 4)
            log.warning(
                "model %s: device error in the chunk of a prompt at token %d: in all prompts, "
                "chunks at or after this position now have at most %d tokens",
                *(self._kv.label, at, shorter),
            )
        self._feeding = None
        if self._images is not None:
            self._images.drop_rows()

    def _forward(self, task: Task, at: int, end: int, images: Mapping[str, mx.array]) -> None:
        """Feed a chunk in one pass or several; the last one's KV is not evaluated here."""
        ids, lineage = task.fed[at:end], task.held.lineage
        caches = lineage.caches
        step = self.cost.step(len(ids))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            if start:
                model_kv.eval_states(caches)
            inputs = {name: rows[:, part] for name, rows in images.items()}
            lineage.note_feed(ids[part])
            # logits that a name kept would keep slices of the caches, which the next pass writes to
            task.score(at + start, self.model(mx.array(ids[part])[None], cache=caches, **inputs))


def _check_aligned(lineage: Lineage) -> None:
    if not lineage.aligned():
        raise GenerationFailed("The model's cache did not grow by the number of tokens fed.")
