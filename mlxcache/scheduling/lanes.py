"""Lanes: a lineage stepped in place, or rows of similar length stepped as a batch.

A batch holds padded copies of its rows' KV. Every few steps its new positions are appended to the
rows' own lineages. The lineages can therefore be committed at any time, and each row can leave the
batch. MLX thread only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.ram import Evict
from mlxcache.engine.cost import DecodingCost
from mlxcache.engine.decoder import Decoder, Drawn
from mlxcache.engine.drafting import DraftingDecoder
from mlxcache.engine.task import Task
from mlxcache.model import device, rows
from mlxcache.model.kv import eval_states
from mlxcache.model.pair import Pair

log = logging.getLogger("mlxcache.engine")

PADDING = 1.25
"""Largest ratio of a batch's padded bytes to the sum of its rows' bytes."""

SYNC = 128
"""Most steps before a batch's new positions are copied to its rows' lineages."""

CATCH_UP = 16
"""Tokens per pass for a row that left a batch and whose lineage lacks the newest positions."""

EVICTION_SHARE = 8
"""Divisor: a batch may evict other KV only if it takes at most 1/EVICTION_SHARE of the budget."""

DRAFTS = 3
"""Default number of tokens that a draft model proposes at once."""


@dataclass(slots=True)
class Lane:
    """A decoder and its tasks, one task per row, in the order of the rows.

    If `batched`, the rows share a batch: `bytes` are reserved for it in the budget, and its buffers
    have room for `capacity` positions.
    """

    decoder: Decoder
    tasks: list[Task]
    batched: bool = False
    bytes: int = 0
    capacity: int = 0

    @property
    def steady(self) -> bool:
        """True if a failed step of the lane can be repeated.

        That is so while its decoder still has the pending tokens that the step was to feed.
        """
        return self.decoder.pending is not None

    def length(self) -> int:
        """Return the number of KV positions of the longest row."""
        return max(t.held.length + t.behind for t in self.tasks)


def solo(model: Any, task: Task, *, waits: bool = False) -> Lane:
    """Start a lane of one task over the task's own lineage, and feed the prompt's last token.

    `waits`: each step is built only after the one before has ended; see `Decoder`.
    """
    assert task.output is not None
    lineage, row = task.held.lineage, task.output.row
    lineage.note_pass()
    decoder = (
        DraftingDecoder(model, row, lineage.caches)
        if isinstance(model, Pair)
        else Decoder(model, [row], lineage.caches, waits=waits, lockstep=lineage.layout.lockstep)
    )
    decoder.start([int(task.fed[-1])])
    lineage.advance(1)
    return Lane(decoder, [task])


class Lanes:
    """All lanes, and the rules for joining them into batches and splitting them.

    `cost`: costs of decoding on this device. `drafts`: tokens that a draft model proposes at once.
    """

    def __init__(
        self, model: Any, kv: KVCache, cost: DecodingCost | None = None, drafts: int = DRAFTS
    ):
        self.model = model
        self.kv = kv
        self.all: list[Lane] = []
        self.layout = kv.layout
        self._lockstep = self.layout.lockstep
        self._cost = cost or DecodingCost()
        self._changed = False
        self._drafts = drafts
        window = self.layout.window
        self.sync_after = min(SYNC, window // 2 if window else SYNC)
        self.can_batch = self.layout.batchable and self.layout.cacheable and self.sync_after > 0
        self.can_batch = self.can_batch and not isinstance(model, Pair)

    def __len__(self) -> int:
        return sum(len(lane.tasks) for lane in self.all)

    def find(self, task: Task) -> Lane | None:
        """Return the lane of `task`, or None."""
        return next((lane for lane in self.all if task in lane.tasks), None)

    # -- joining -----------------------------------------------------------------------------

    def enter(self, task: Task) -> None:
        """Start decoding a prefilled task in a lane of its own."""
        self.all.append(solo(self.model, task, waits=self._cost.waits))
        self._changed = True

    def gather(self) -> None:
        """Join lanes of single rows of similar length into batches.

        All rows join in one operation, because each join copies the KV of the batch.
        """
        if not (self.can_batch and self._changed):
            return
        self._changed = False
        for lane in sorted(self.all, key=lambda ln: not ln.batched):
            new = self._company(lane) if lane in self.all else []
            while new and not self._merge(lane, new):
                new = new[: len(new) // 2]

    def _company(self, lane: Lane) -> list[Lane]:
        """Return the lanes of single rows that can share a batch with `lane`.

        The lane nearest in length comes first.
        """
        if not lane.batched and lane.tasks[0].behind:
            return []
        lone = [ln for ln in self.all if not (ln is lane or ln.batched or ln.tasks[0].behind)]
        lengths = [t.held.length + t.behind for t in lane.tasks]
        found: list[Lane] = []
        for other in sorted(lone, key=lambda ln: abs(ln.length() - lane.length())):
            if self._worthwhile(lengths, other.length()):
                found.append(other)
                lengths = [*lengths, other.length()]
        return found

    def _worthwhile(self, lengths: list[int], new: int) -> bool:
        """Return whether a row of `new` positions should join rows of the given `lengths`.

        That is so if the padding is small, or if one joint step reads fewer bytes than two separate
        steps: padding adds bytes, but the weights are read only once.
        """
        longer = [*lengths, new]
        if max(longer) * len(longer) <= PADDING * sum(longer):
            return True
        row = self.layout.row_bytes
        more = len(longer) * row(max(longer)) - len(lengths) * row(max(lengths))
        return more <= PADDING * row(new) + self._cost.shared_bytes and self._cost.shared_bytes > 0

    def _merge(self, lane: Lane, new: list[Lane]) -> bool:
        """Join the lanes `new` to `lane`; return False if there is no memory or MLX fails.

        After False, nothing has changed. Raises if the device failed.
        """
        count = len(lane.tasks) + len(new)
        capacity = max(lane.capacity, *(ln.length() for ln in (lane, *new)))
        capacity += 0 if lane.batched else rows.STEP
        size = count * self.layout.row_bytes(capacity)
        # two padded copies of each of a layer's arrays are made on the way
        passing = 4 * count * capacity * self.layout.widest
        evict: Evict = "idle" if size <= self.kv.budget.limit // EVICTION_SHARE else "no"
        if not self.kv.ram.reserve("batch", size, passing, evict=evict):
            return False
        try:
            self._sync(lane)
            others = [ln.decoder.caches for ln in new]
            caches = rows.join(lane.decoder.caches, others, batched=lane.batched)
            self._lockstep.join(caches, lane.decoder.caches, others, lane.batched)
            decoder = lane.decoder
            for other in new:
                decoder = decoder.joined(other.decoder, caches)
            device.confirm()  # before the rows' own pending tokens are dropped
        except Exception as error:
            self.kv.budget.release("batch", size)
            if device.is_device_error(error):
                raise
            self._lockstep.check(error)
            log.exception("joining requests into a batch failed, decoding them separately")
            return False
        self.kv.budget.release("batch", lane.bytes)
        lane.decoder = decoder
        for other in new:
            lane.tasks += other.tasks
            self.all.remove(other)
        lane.batched, lane.bytes, lane.capacity = True, size, capacity
        return True

    # -- stepping ----------------------------------------------------------------------------

    def step(self, lane: Lane) -> list[list[Drawn]]:
        """Draw one token or more for every row. Call `make_ready` before."""
        if not lane.batched:
            lane.tasks[0].held.lineage.note_pass(lane.decoder.writes)
        drawn = lane.decoder.step()
        if not lane.batched:
            lane.tasks[0].held.lineage.advance(1)
        return drawn

    def make_ready(self, lane: Lane) -> bool:
        """Reserve memory for one more step; return False if a lane of one row gets none.

        A batch that gets no memory is removed and split into lanes of one row; the result is then
        True.
        """
        if lane.batched:
            if not self._has_room(lane):
                self.split(lane)
            return True
        (task,) = lane.tasks
        if isinstance(lane.decoder, DraftingDecoder):
            return self._settle(task, lane.decoder)
        lineage = task.held.lineage
        if not self.kv.extend(task.held, lineage.length + task.behind + 1):
            return False
        while task.behind:
            at = lineage.length
            piece = task.fed_ids()[at : at + CATCH_UP]
            lineage.note_pass()
            self._lockstep.feed(lineage, piece.tolist())
            self.model(mx.array(piece)[None], cache=lineage.caches)
            eval_states(lineage.caches)
            lineage.advance(len(piece))
        return True

    def _settle(self, task: Task, decoder: DraftingDecoder) -> bool:
        """Count the accepted drafts of the last pass, and reserve memory for the next pass.

        Proposes no more tokens than the reply may still have, and none if memory is short. Returns
        False if there is no memory even for one token.
        """
        lease, lineage = task.held, task.held.lineage
        lineage.truncate(lineage.length + decoder.settle())
        task.note_drafts()
        left = task.limit - len(task.out) - decoder.ready
        drafts, least = max(0, min(self._drafts, left - 1)), lineage.length + 1
        if not (self.kv.extend(lease, least + drafts) or self.kv.extend(lease, least)):
            return False
        decoder.propose(min(drafts, lineage.capacity - least))
        return True

    def _has_room(self, lane: Lane) -> bool:
        """Reserve memory for a batch's next step, in the batch and in its rows' own lineages.

        Returns False if memory is short.
        """
        for task in lane.tasks:
            length = task.held.length + task.behind
            if not self.kv.extend(task.held, length + 1):
                return False
        if max(task.behind for task in lane.tasks) >= self.sync_after:
            self._sync(lane)
        if lane.length() < lane.capacity:
            return True
        count, capacity = len(lane.tasks), lane.length() + rows.STEP
        size = count * self.layout.row_bytes(capacity)
        passing = 2 * count * lane.capacity * self.layout.widest
        if not self.kv.ram.reserve("batch", max(0, size - lane.bytes), passing):
            return False
        lane.bytes, lane.capacity = max(size, lane.bytes), capacity
        return True

    def _sync(self, lane: Lane) -> None:
        """Append the KV that a batch has computed to its rows' own lineages.

        A lineage without room for it is left as it is.
        """
        for i, task in enumerate(lane.tasks if lane.batched else []):
            lineage, count = task.held.lineage, task.behind
            if count and lineage.length + count <= max(lineage.capacity, not self.layout.specs):
                linear, opaque = rows.row_tail(self.layout, lane.decoder.caches, i, count)
                self._lockstep.append_row(lane.decoder.caches, i, lineage, count)
                lineage.append(linear, count)
                lineage.set_state(tuple(slot.state for slot in opaque))

    def sync(self, task: Task) -> None:
        """Append the KV that a task's batch has computed to the task's own lineage.

        Does nothing if the task is not in a batch, or if the lineage has no room.
        """
        lane = self.find(task)
        if lane is not None:
            self._sync(lane)

    # -- leaving -----------------------------------------------------------------------------

    def leave(self, lane: Lane, gone: list[Task]) -> None:
        """Remove the tasks `gone` from a lane.

        First, the KV that a batch has computed is appended to the lineages of its rows. If fewer
        than two rows remain in a batch, or it cannot be made smaller, it is split.
        """
        self._changed = True
        keep = [i for i, task in enumerate(lane.tasks) if task not in gone]
        try:
            self._sync(lane)
            if len(keep) > 1 and self._narrow(lane, keep):
                return
        except Exception as error:
            if device.is_device_error(error):
                raise
            self._lockstep.check(error)
            log.exception("removing requests from a batch failed, decoding the rest separately")
        if isinstance(lane.decoder, DraftingDecoder):
            for task in lane.tasks:  # drafted tokens that were fed and not drawn
                task.held.lineage.truncate(task.length)
        if lane.batched:
            self.split(lane)
        self.all = [ln for ln in self.all if ln.batched or ln.tasks[0] not in gone]
        mx.clear_cache()

    def _narrow(self, lane: Lane, keep: list[int]) -> bool:
        """Keep only the rows with indices `keep` of a batch.

        Returns False, with nothing changed, if there is no memory for the copies.
        """
        if not self.kv.ram.has_passing(2 * len(keep) * lane.capacity * self.layout.widest):
            return False
        longest = lane.length()
        rows.keep_rows(lane.decoder.caches, keep)
        self._lockstep.keep_rows(lane.decoder.caches, keep)
        lane.decoder.keep(keep)
        lane.tasks = [lane.tasks[i] for i in keep]
        size = len(keep) * self.layout.row_bytes(lane.capacity)
        self.kv.budget.release("batch", lane.bytes - size)
        lane.bytes, lane.capacity = size, lane.capacity - (longest - lane.length())
        return True

    def drop_all(self) -> None:
        """Drop every lane and its batch after a device error.

        Their pending tokens may be wrong.
        """
        for lane in self.all:
            self.kv.budget.release("batch", lane.bytes)
            if lane.batched:
                self._lockstep.drop_batch(lane.decoder.caches)
        self.all = []
        self._changed = False

    def split(self, lane: Lane) -> None:
        """Split a batch into lanes of one row; each continues from the end of its own lineage."""
        lanes: list[Lane] = []
        for i, task in enumerate(lane.tasks):
            own = lane.decoder.alone(i, task.held.lineage.caches)
            self._lockstep.take_row(lane.decoder.caches, i, task.held.lineage)
            (row,) = own.rows
            if row.processors:
                row.set_context(mx.array(task.fed_ids()))
            lanes.append(Lane(own, [task]))
        self._lockstep.drop_batch(lane.decoder.caches)
        self.all.remove(lane)
        self.all += lanes
        self.kv.budget.release("batch", lane.bytes)
        mx.clear_cache()
