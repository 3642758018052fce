"""Feeding prompts in chunks: whose turn it is, how long a chunk may be. MLX thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_cache import Memory
from mlxcache.engine.cost import Cost, Speed
from mlxcache.engine.decoder import NoNumbers
from mlxcache.engine.images import Images
from mlxcache.engine.task import Task
from mlxcache.errors import GenerationFailed
from mlxcache.model import kv
from mlxcache.model.finite import ends_finite
from mlxcache.model.kv import Caches
from mlxcache.types import Tokens

BURST_S, ARRIVAL_S = 2.0, 8.0
"""Prefill that is over within so many seconds goes first: what it lets in decodes as one batch.

The second holds where nothing was decoding when it began, so that all arrived together.
"""

STALL_S = 1.0
"""Seconds that a reply waits for its next token at most, plus one chunk, while a burst goes on."""


SHARE = 1.15
"""Seconds of decoding for each of prefill: a reply keeps half of its speed, all else included."""

FIRST_ROUND_S = 0.05
"""What a round of decoding is taken to take before one was measured."""


class Pace:
    """Decoding gets a little more time than prefill. A short burst of prefill may run up a debt.

    `owed` is that debt in seconds, about the burst's bound plus one chunk at most; `round_s` what a
    round of decoding takes, a moving average. What is still due where decoding stopped to see what
    has arrived is due before the next chunk, unless that is of a request that has just come.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.owed = 0.0
        self.round_s = FIRST_ROUND_S
        self.bound = BURST_S
        self._round_at = clock()

    def begin(self, *, decoding: bool) -> None:
        """Prefill begins after a pause; `decoding`: somebody would notice a burst."""
        self.bound = BURST_S if decoding else ARRIVAL_S

    def prefill(self, chunk: Callable[[], None], *, owing: bool = True) -> None:
        """Run one chunk, and owe decoding its share for it, if somebody waits meanwhile."""
        if not owing:
            self.owed = 0.0
        began = self._clock()
        chunk()
        if owing:
            self.owed += SHARE * (self._clock() - began)

    def entered(self, chunk_s: float) -> None:
        """A reply begins: it decodes first, and the next chunk, of `chunk_s` or so, comes then."""
        self.owed = max(self.owed, SHARE * chunk_s)

    def due(self, left_s: float) -> float:
        """Seconds of decoding that are due now, where prefill has about `left_s` to go."""
        if not left_s:
            self.owed = 0.0
        return self.owed - (self.bound if left_s <= self.bound else 0.0)

    def holds(self, due: float) -> bool:
        """Whether decoding can wait for another chunk."""
        return due <= 0 and self._clock() - self._round_at < STALL_S

    def decode(self, round_: Callable[[], None], due: float, more: Callable[[], bool]) -> None:
        """Run rounds for `due` seconds, at least one, while there is `more`; pay them off."""
        began = self._clock()
        round_()
        rounds = 1
        while self._clock() - began < due and more():
            round_()
            rounds += 1
        self._round_at = self._clock()
        if more() or rounds > 1:  # with nobody to decode for, a round takes no time
            self.round_s += 0.1 * ((self._round_at - began) / rounds - self.round_s)
        self.owed = max(0.0, self.owed - (self._round_at - began))


ALONE_S = 2.0
WAITING_S = 1.0
DECODING_S = 0.4
"""How long a chunk may take: alone, while others wait, while others decode. In seconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler holds requests to: see `config.Settings`."""

    concurrency: int
    prefill_chunk: int
    context: int
    transient: int


class Prefill:
    """Feeds chunks of prompts, and commits what they leave."""

    def __init__(self, model: Any, memory: Memory, cost: Cost, limits: Limits):
        self.model = model
        self.memory = memory
        self.cost = cost
        self.speed = Speed()
        self.limits = limits
        self.images: Images | None = None

    def next(self, tasks: list[Task]) -> Task:
        """The shortest first; a task that was passed over gains two chunks each time.

        One that is in the middle of an image goes on until it is past it.
        """
        if self.images is not None and (holder := self.images.holder(tasks)) is not None:
            return holder
        bonus = 2 * self.limits.prefill_chunk
        chosen = min(tasks, key=lambda t: t.remaining - bonus * t.skipped)
        for task in tasks:
            task.skipped = 0 if task is chosen else task.skipped + 1
        return chosen

    def left_s(self, tasks: list[Task]) -> float:
        """Seconds that what is left of `tasks`' prompts takes at the speed of short ones."""
        return sum(task.remaining for task in tasks) / self.cost.rate

    def chunk(self, task: Task, seconds: float) -> None:
        """Feed one chunk that takes about `seconds`.

        Raises GenerationFailed where the model's cache does not grow by what it was fed, NoNumbers
        where that is no numbers; nothing of the chunk is committed then.
        """
        if task.remaining > 0:
            self._feed(task, self._size(task, seconds))
        if not task.held.lineage.aligned():
            raise GenerationFailed("The model's cache does not hold what it was fed.")

    def _size(self, task: Task, seconds: float) -> int:
        at = task.held.lineage.length
        size = self.cost.chunk(
            at, bytes_=self.limits.transient, seconds=seconds, most=self.limits.prefill_chunk
        )
        stop = next((s for s in task.stops if s > at), task.target)
        return min(size, stop - at, task.remaining)

    def _feed(self, task: Task, size: int) -> None:
        lease = task.held
        lineage = lease.lineage
        at, last = lineage.length, size == task.remaining
        marked = at + size in task.stops
        end = at + size
        images = self.images.inputs(task, at, end) if self.images else {}
        began = time.perf_counter()
        self._forward(task.fed[at:end], lineage.caches, images)
        kv.eval_states(lineage.caches, wait=not last or marked)
        lineage.length = end
        if not (last or ends_finite(lineage)):
            raise NoNumbers
        if not last:
            lineage.settle()
            mx.clear_cache()
            took = time.perf_counter() - began
            self.cost.observe(size, took, at)
            self.speed.observe(size, took, at)
        if marked or not self.memory.layout.opaque:
            self.memory.commit(lease, task.ids, checkpoint=marked)
        if not last:
            task.progress()

    def _forward(self, ids: Tokens, caches: Caches, images: Mapping[str, mx.array]) -> None:
        """Feed `ids`. The last pass is not evaluated: nobody needs its logits."""
        step = self.cost.step(len(ids))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            if start:
                kv.eval_states(caches)
            seen = {name: rows[:, part] for name, rows in images.items()}
            self.model(mx.array(ids[part])[None], cache=caches, **seen)
