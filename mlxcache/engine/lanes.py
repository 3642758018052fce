"""Lanes: a lineage stepped in place, or rows of similar length stepped as a batch.

A batch holds padded copies of its rows' KV; the rows' own lineages stay as they are, and every few
steps the new positions are appended to them, so that what was computed can be committed whenever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.engine.decoder import Decoder, Drawn
from mlxcache.engine.memory import Memory
from mlxcache.engine.room import STEP
from mlxcache.engine.task import Task
from mlxcache.model import kv

PADDING = 1.25
"""A batch's padded bytes may be at most this times the sum of its rows'."""

SYNC = 128
"""Steps after which a batch's new positions go into its rows' lineages, at most."""


@dataclass(slots=True)
class Lane:
    """`tasks` are the decoder's rows, in order; `ahead` counts steps not in the lineages yet."""

    decoder: Decoder
    tasks: list[Task]
    batched: bool = False
    ahead: int = 0
    bytes: int = 0
    capacity: int = 0

    def length(self) -> int:
        """Positions of the longest row."""
        return max(t.held.lineage.length for t in self.tasks) + self.ahead


def solo(model: Any, task: Task) -> Lane:
    """A lane that appends to the task's own lineage, fed with the prompt's last token."""
    assert task.row is not None
    lineage = task.held.lineage
    decoder = Decoder(model, [task.row], lineage.caches)
    decoder.start([int(task.ids[-1])])
    lineage.length += 1
    return Lane(decoder, [task])


class Lanes:
    """Every lane, and the rules by which rows share one."""

    def __init__(self, model: Any, memory: Memory):
        self.model = model
        self.memory = memory
        self.all: list[Lane] = []
        layout = memory.layout
        self.sync_after = min(SYNC, layout.window // 2 if layout.window else SYNC)
        self.can_batch = layout.batchable and layout.cacheable and self.sync_after > 0

    def __len__(self) -> int:
        return sum(len(lane.tasks) for lane in self.all)

    def find(self, task: Task) -> Lane | None:
        """The lane that steps `task`."""
        return next((lane for lane in self.all if task in lane.tasks), None)

    def enter(self, task: Task) -> None:
        """Start decoding a prefilled task, in a batch if one suits it."""
        lane = solo(self.model, task)
        for other in self.all if self.can_batch else []:
            if self._suits(other, lane) and self._merge(other, lane):
                return
        self.all.append(lane)

    def _suits(self, lane: Lane, new: Lane) -> bool:
        lengths = [t.held.lineage.length + ln.ahead for ln in (lane, new) for t in ln.tasks]
        return max(lengths) * len(lengths) <= PADDING * sum(lengths)

    def _merge(self, lane: Lane, new: Lane) -> bool:
        """Let `new` join `lane`; False, and nothing has changed, where the budget forbids it."""
        rows = len(lane.tasks) + len(new.tasks)
        capacity = (max(lane.length(), new.length()) // STEP + 2) * STEP
        size = rows * capacity * self.memory.layout.bytes_per_token
        if self.memory.budget.free < 2 * size or not self.memory.budget.reserve("batch", size):
            return False
        first = self._as_batch(lane)
        second = self._as_batch(new)
        first.absorb(second)
        kv.eval_states(first.caches)
        self.memory.budget.release("batch", lane.bytes)
        lane.decoder, lane.batched = first, True
        lane.tasks += new.tasks
        lane.bytes, lane.capacity = size, capacity
        return True

    def _as_batch(self, lane: Lane) -> Decoder:
        if lane.batched:
            self.sync(lane)
            return lane.decoder
        twin = Decoder(self.model, list(lane.decoder.rows), kv.merge([lane.decoder.caches]))
        twin.pending, twin.logprobs = lane.decoder.pending, lane.decoder.logprobs
        return twin

    def step(self, lane: Lane) -> list[Drawn]:
        """One token for every row. The caller must have called `make_ready`."""
        drawn = lane.decoder.step()
        if lane.batched:
            lane.ahead += 1
        else:
            lane.tasks[0].held.lineage.length += 1
        return drawn

    def make_ready(self, lane: Lane) -> list[Task]:
        """See that one more step has room; returns the tasks that cannot have it."""
        if not lane.batched:
            lease = lane.tasks[0].held
            return [] if self.memory.extend(lease, lease.lineage.length + 1) else [lane.tasks[0]]
        starved: list[Task] = []
        if lane.ahead >= self.sync_after:
            starved = self.sync(lane)
        if lane.length() + 1 > lane.capacity:
            more = len(lane.tasks) * STEP * self.memory.layout.bytes_per_token
            if not self.memory.room.make_room(more) or not self.memory.budget.reserve(
                "batch", more
            ):
                return [lane.tasks[0]]
            lane.bytes += more
            lane.capacity += STEP
        return starved

    def sync(self, lane: Lane) -> list[Task]:
        """Append a batch's new positions to its rows' lineages; returns tasks with no room."""
        starved: list[Task] = []
        if not lane.ahead:
            return starved
        for i, task in enumerate(lane.tasks):
            lease = task.held
            if not self.memory.extend(lease, lease.lineage.length + lane.ahead):
                starved.append(task)
                continue
            linear, opaque = kv.row_tail(self.memory.layout, lane.decoder.caches, i, lane.ahead)
            lease.lineage.append(linear, lane.ahead)
            lease.lineage.restore(tuple(slot.state for slot in opaque))
        lane.ahead = 0
        return starved

    def leave(self, lane: Lane, gone: list[Task]) -> None:
        """Take tasks out of a lane; their lineages then hold all that was computed."""
        if lane.batched:
            self.sync(lane)
        keep = [i for i, task in enumerate(lane.tasks) if task not in gone]
        if not keep:
            self.all.remove(lane)
            self._free(lane)
            return
        decoder = lane.decoder
        decoder.keep(keep)
        lane.tasks = [lane.tasks[i] for i in keep]
        if len(keep) > 1:
            for cache in decoder.caches:
                cache.filter(keep)
            kv.eval_states(decoder.caches)
            return
        decoder.caches = lane.tasks[0].held.lineage.caches
        lane.batched = False
        self._free(lane)

    def discard(self, lane: Lane) -> None:
        """Forget a lane whose step failed; its rows' lineages keep what was synced before."""
        self.all.remove(lane)
        self._free(lane)

    def _free(self, lane: Lane) -> None:
        self.memory.budget.release("batch", lane.bytes)
        lane.bytes = lane.capacity = 0
        mx.clear_cache()
