"""Prefill: choice of the next prompt, length of its chunk, and balance with decoding.

MLX thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.engine.cost import FEWEST, Cost, PrefillSpeed, range_of
from mlxcache.engine.decoder import NonFiniteOutput
from mlxcache.engine.images import Images
from mlxcache.engine.task import Task
from mlxcache.errors import GenerationFailed
from mlxcache.model import device
from mlxcache.model import kv as model_kv
from mlxcache.model.finite import ends_finite
from mlxcache.model.lineage import Lineage
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

BURST_S, ARRIVAL_S = 2.0, 8.0
"""Prefill that ends within BURST_S seconds goes before decoding: its replies then form one batch.
ARRIVAL_S applies if nothing was decoded when the prefill began, that is, if all requests arrived
together.
"""

STALL_S = 1.0
"""Longest gap between two tokens of a reply during a burst, in seconds, plus one chunk."""

DECODE_SHARE = 1.15
"""Seconds of decoding for each second of prefill: a reply keeps half of its speed, overhead
included.
"""

FIRST_ROUND_S = 0.05
"""Assumed time of a round of decoding before one was measured."""

ALONE_S = 2.0
WAITING_S = 1.0
DECODING_S = 0.4
"""Length of a chunk in seconds: with nothing else to do, while others wait, while others decode."""


class PrefillDecodeBalance:
    """Divides the thread's time: decoding gets a little more than prefill, except during a short
    burst.

    `owed`: seconds of decoding that are owed to replies, about the burst's bound plus one chunk at
    most. `round_s`: seconds of a round of decoding, a moving average.
    """

    def __init__(self, clock: Callable[[], float]):
        self.owed = 0.0
        self.round_s = FIRST_ROUND_S
        self._clock = clock
        self._bound = BURST_S
        self._round_at = clock()

    def begin(self, *, decoding: bool) -> None:
        """Begin a prefill after a pause; `decoding`: a reply would notice a burst."""
        self._bound = BURST_S if decoding else ARRIVAL_S

    def prefill(self, chunk: Callable[[], None], *, owing: bool = True) -> None:
        """Run one chunk; with `owing` (a reply waits), add its share of the time to `owed`."""
        if not owing:
            self.owed = 0.0
        began = self._clock()
        chunk()
        if owing:
            self.owed += DECODE_SHARE * (self._clock() - began)

    def note_reply(self, chunk_s: float) -> None:
        """Record that a reply begins: it decodes before the next chunk, about `chunk_s` long."""
        self.owed = max(self.owed, DECODE_SHARE * chunk_s)

    def due(self, left_s: float) -> float:
        """Seconds of decoding that are due now; prefill has about `left_s` seconds left."""
        if not left_s:
            self.owed = 0.0
        return self.owed - (self._bound if left_s <= self._bound else 0.0)

    def may_wait(self, due: float) -> bool:
        """True if decoding can wait for another chunk."""
        return due <= 0 and self._clock() - self._round_at < STALL_S

    def decode(self, run_round: Callable[[], None], due: float, more: Callable[[], bool]) -> None:
        """Run rounds for `due` seconds, at least one, while there is `more`; reduces `owed`."""
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
    """Bounds on requests: how many at once; tokens of a chunk and of a context; bytes of a pass."""

    concurrency: int
    prefill_chunk: int
    context: int
    transient: int


class Prefill:
    """Feeds chunks of prompts and commits them. `images` None: the model takes none."""

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
        """Choose the task of the next chunk: the one with the fewest remaining tokens.

        Each time that a task is skipped, it counts as two chunks shorter. A task in the middle of
        an image continues until the image's end.
        """
        if self._images is not None and (holder := self._images.holder(tasks)) is not None:
            return holder
        bonus = 2 * self.limits.prefill_chunk
        chosen = min(tasks, key=lambda t: t.remaining - bonus * t.skipped)
        for task in tasks:
            task.pass_over(chosen)
        return chosen

    def left_s(self, tasks: list[Task]) -> float:
        """Seconds that the rest of `tasks`' prompts takes, at the speed of short prompts."""
        return sum(task.remaining for task in tasks) / self.cost.rate

    def feed_chunk(self, task: Task, seconds: float) -> None:
        """Feed one chunk that takes about `seconds`, and commit it.

        Raises GenerationFailed where the model's cache does not grow by the number of tokens fed,
        and NonFiniteOutput where the new KV is not finite; nothing of the chunk is committed then.
        """
        if task.remaining > 0:
            self._feed(task, self._size(task, seconds))
        if not task.held.lineage.aligned():
            raise GenerationFailed("The model's cache did not grow by the number of tokens fed.")

    def _size(self, task: Task, seconds: float) -> int:
        at = task.held.length
        most = min(
            (tokens for reach, tokens in self._most.items() if reach <= range_of(at)),
            default=self.limits.prefill_chunk,
        )
        size = self.cost.chunk(at, bytes_=self.limits.transient, seconds=seconds, most=most)
        stop = next((s for s in task.stops if s > at), task.target)
        return min(size, stop - at, task.remaining)

    def _feed(self, task: Task, size: int) -> None:
        lease = task.held
        lineage = lease.lineage
        at, last = lineage.length, size == task.remaining
        end = at + size
        marked = end in task.stops
        self._feeding = at, size
        images = self._images.inputs(task, at, end) if self._images else {}
        began = time.perf_counter()
        self._forward(task.fed[at:end], lineage, images)
        model_kv.eval_states(lineage.caches, wait=not last or marked)
        lineage.advance(size)
        if not (last or ends_finite(lineage)):
            raise NonFiniteOutput
        if not last:
            lineage.settle()
            mx.clear_cache()
            took = time.perf_counter() - began
            self.cost.observe(size, took, at)
            self.speed.observe(size, took, at)
        # the last pass still runs: where a commit waits for it, the first token is drawn before
        if marked or not (self._kv.layout.opaque or (last and device.defers_errors())):
            self._kv.commit(lease, task.ids, checkpoint=marked)
            self.note_confirmed()
        if not last:
            task.show_progress()

    @property
    def confirmed(self) -> bool:
        """True if the device has computed every chunk so far."""
        return self._feeding is None

    def note_confirmed(self) -> None:
        """Note that the device has computed every chunk so far."""
        self._feeding = None

    def note_device_error(self) -> None:
        """Feed shorter chunks from the position of the failed chunk on, if there was one.

        The system ends passes that hold the display up for too long, and a shorter pass takes less
        memory. Remembered while the model is loaded. Kept rows of images, which may be wrong, are
        dropped.
        """
        if self._feeding is not None:
            at, size = self._feeding
            self._most[range_of(at)] = shorter = max(FEWEST, size // 4)
            log.warning(
                "device error in the chunk at token %d: later chunks have at most %d tokens",
                at,
                shorter,
            )
        self._feeding = None
        if self._images is not None:
            self._images.drop_rows()

    def _forward(self, ids: Tokens, lineage: Lineage, images: Mapping[str, mx.array]) -> None:
        """Feed `ids`. The last pass is not evaluated: its logits are not used."""
        caches = lineage.caches
        step = self.cost.step(len(ids))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            if start:
                model_kv.eval_states(caches)
            inputs = {name: rows[:, part] for name, rows in images.items()}
            lineage.note_pass()
            self.model(mx.array(ids[part])[None], cache=caches, **inputs)
