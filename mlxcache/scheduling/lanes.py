"""Lanes: a lineage stepped in place, or rows of similar length stepped as a batch.

A batch holds padded copies of its rows' KV. Every few steps its new positions are appended to the
rows' own lineages. The lineages can therefore be committed at any time, and each row can leave the
batch. MLX thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.cache.checkpoints import SPACING
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.ram import Evict
from mlxcache.model import device, rows
from mlxcache.model.kv import eval_states
from mlxcache.model.pair import Pair
from mlxcache.model.recurrence import recorder_of
from mlxcache.scheduling.decoder import Decode, Decoder, Drawn
from mlxcache.scheduling.proposer import Pass, Proposals
from mlxcache.scheduling.speculation import Speculation
from mlxcache.scheduling.task import Task
from mlxcache.scheduling.verifier import Verifier
from mlxcache.scheduling.wall import Wall

log = logging.getLogger("mlxcache.engine")

PADDING = 1.25  # largest ratio of a batch's padded bytes to the sum of its rows' bytes
SYNC = 128  # most steps before a batch's new positions are copied to its rows' lineages

CATCH_UP = 16
"""Tokens per pass for a row that left a batch and whose lineage lacks the newest positions."""

EVICTION_SHARE = 8
"""Divisor: a batch may evict other KV only if it takes at most 1/EVICTION_SHARE of the budget."""

MOST_FED = 32  # most tokens of a pass that checks a guess, with those that it feeds again


@dataclass(slots=True, eq=False)
class Lane:
    """A decoder and its tasks, one task per row, in the order of the rows.

    If `batched`, `bytes` are reserved for the shared buffers, which have room for `capacity`
    positions. Otherwise for copies of the recurrent state, from which wrong guesses are undone.
    """

    decoder: Decoder
    tasks: list[Task]
    batched: bool = False
    bytes: int = 0
    capacity: int = 0

    @property
    def steady(self) -> bool:
        """True if a failed step can be repeated, because its pending tokens are still there."""
        return self.decoder.pending is not None

    def length(self) -> int:
        return max(t.held.length + t.behind for t in self.tasks)


class Lanes:
    """All lanes, and the rules for joining them into batches and splitting them.

    `speculation`: makes the proposals of tokens that passes check; None if nothing is proposed.
    `decode`: makes the decoder of a row that nothing is guessed for.
    """

    def __init__(
        self,
        model: Any,
        kv: KVCache,
        wall: Wall,
        *,
        shared_bytes: int = 0,
        speculation: Speculation | None = None,
        decode: Decode = Decoder.of_lineage,
    ):
        self.model = model
        self._decode = decode
        self.kv = kv
        self._wall = wall
        self.all: list[Lane] = []
        self.layout = kv.layout
        self._shared_bytes = shared_bytes
        self._changed = False
        self.can_batch = self.layout.batchable and self.layout.cacheable
        self.can_batch = self.can_batch and not isinstance(model, Pair)
        self.speculation = speculation if self.layout.rewinds else None
        self._recorder = recorder_of(model, self.layout) if self.speculation else None
        self._proposals_of: dict[Task, Proposals] = {}

    def __len__(self) -> int:
        return sum(len(lane.tasks) for lane in self.all)

    def find(self, task: Task) -> Lane | None:
        return next((lane for lane in self.all if task in lane.tasks), None)

    # -- joining -----------------------------------------------------------------------------

    def enter(self, task: Task) -> None:
        """Start a lane over the task's own lineage, and feed the prompt's last token."""
        assert task.output is not None
        lineage, row = task.held.lineage, task.output.row
        lineage.note_pass()
        proposals, size = self._proposals(task)
        decoder: Decoder
        try:
            if proposals is not None:
                served = self.model.verify if isinstance(self.model, Pair) else self.model
                decoder = Verifier(served, row, lineage, proposals, recorder=self._recorder)
            else:
                decoder = self._decode(self.model, row, lineage)
            decoder.start([int(task.fed[-1])])
            lineage.advance(1)
            if proposals is not None:
                proposals.catch_up()
        except BaseException:
            self._proposals_of.pop(task, None)
            self.kv.budget.release("batch", size)
            raise
        self.all.append(Lane(decoder, [task], bytes=size))
        self._changed = True

    def _proposals(self, task: Task) -> tuple[Proposals | None, int]:
        """Return the proposals for a task, and the bytes reserved to undo wrong guesses.

        They are for two copies of a row's recurrent state, 0 for a model without such a state.
        Nothing is proposed if memory is short.
        """
        proposals = self._proposals_of.get(task)
        if proposals is None and self.speculation is not None:
            redo = self.layout.recurrent and self._recorder is None
            proposals = self.speculation.begin(task, redo=redo)
        redone = proposals is not None and self.layout.recurrent
        size = 2 * self.layout.running_bytes if redone else 0
        if proposals is None or (size and not self.kv.ram.reserve("batch", size, evict="idle")):
            return None, 0
        self._proposals_of[task] = proposals
        return proposals, size

    def gather(self) -> None:
        """Join lanes of single rows of similar length, all at once: each join copies the batch."""
        if not (self.can_batch and self._changed) or any(map(_in_flight, self.all)):
            return
        self._changed = False
        for lane in sorted(self.all, key=lambda ln: not ln.batched):
            new = self._company(lane) if lane in self.all else []
            while new and not self._merge(lane, new):
                new = new[: len(new) // 2]

    def _company(self, lane: Lane) -> list[Lane]:
        """Return the lanes of single rows that should join `lane`, the nearest in length first."""
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

        That is if the padding is small, or if one joint step reads fewer bytes than two separate
        steps: padding adds bytes, but the weights are read only once.
        """
        longer = [*lengths, new]
        if max(longer) * len(longer) <= PADDING * sum(longer):
            return True
        row = self.layout.row_bytes
        more = len(longer) * row(max(longer)) - len(lengths) * row(max(lengths))
        return more <= PADDING * row(new) + self._shared_bytes and self._shared_bytes > 0

    def _merge(self, lane: Lane, new: list[Lane]) -> bool:
        """Join the lanes `new` to `lane`; False, with nothing changed, if that fails."""
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
            others = [ln.decoder for ln in new]
            decoder = lane.decoder.joined(others, lambda: lane.bytes, batched=lane.batched)
            device.confirm()  # before the rows' own pending tokens are dropped
        except Exception as error:  # noqa: BLE001 - logged by the wall
            self.kv.budget.release("batch", size)
            ids = ", ".join(task.record.id for ln in (lane, *new) for task in ln.tasks)
            self._wall.contain(error, f"joining a batch failed, they are decoded as before: {ids}")
            return False
        self.kv.budget.release("batch", lane.bytes)
        lane.decoder = decoder
        for other in new:
            self.kv.budget.release("batch", other.bytes)
            lane.tasks += other.tasks
            self.all.remove(other)
        lane.batched, lane.bytes, lane.capacity = True, size, capacity
        return True

    # -- stepping ----------------------------------------------------------------------------

    def step(self, lane: Lane) -> list[list[Drawn]]:
        """Run one decoding step, after `make_ready`; return the tokens that it hands out, by row.

        A row's list ends before a token drawn from logits that are not finite. A failed pass with a
        guess is made again without it, if the KV is intact.
        """
        if not lane.batched:
            lane.tasks[0].held.lineage.note_pass(lane.decoder.writes)
        count = lane.decoder.feeds
        try:
            drawn = lane.decoder.step()
        except Exception as error:
            if lane.batched or not self._undo_guess(lane.tasks[0], lane.decoder, error):
                raise
            lane.tasks[0].held.lineage.note_pass(lane.decoder.writes)
            drawn = lane.decoder.step()
        if not lane.batched:
            lane.tasks[0].held.lineage.advance(count)
        return drawn

    def make_ready(self, lane: Lane) -> bool:
        """Reserve memory for one more step; return False if a lane of one row gets none.

        A batch that gets no memory is split into lanes of one row; the result is then True.
        """
        if lane.batched:
            if not self._has_room(lane):
                self.split(lane)
            return True
        (task,) = lane.tasks
        if isinstance(lane.decoder, Verifier) and task.behind <= 0:
            return self._propose(task, lane.decoder)
        lineage = task.held.lineage
        if not self.kv.extend(task.held, lineage.length + task.behind + 1):
            return False
        while task.behind:
            at = lineage.length
            piece = task.fed_ids()[at : at + CATCH_UP]
            lineage.note_feed(piece)
            self.model(mx.array(piece)[None], cache=lineage.caches, **lane.decoder.places)
            eval_states(lineage.caches)
            lineage.advance(len(piece))
        return True

    def interrupt(self) -> None:
        """Do not measure the passes in progress, which other work makes longer."""
        for lane in self.all:
            if isinstance(lane.decoder, Verifier):
                lane.decoder.interrupt()

    def _propose(self, task: Task, decoder: Verifier) -> bool:
        """Count how much of the last guess was right, choose the next one, and reserve memory.

        Nothing is proposed while rows may join a batch, if memory is short, or where the next step
        takes a checkpoint. Returns False without memory for one token.
        """
        alone, proposals = len(self.all) == 1, decoder.proposals
        if not alone:
            decoder.interrupt()
        for ended in self._settle(task, decoder):
            proposals.note(ended)
            task.note_pass(proposals.source, ended.checked, ended.right)
        lease, lineage = task.held, task.held.lineage
        out, ready = len(task.out), decoder.ready
        after = out + max(1, len(ready))
        least = lineage.length + decoder.feeds
        most = min(task.limit - after - 1, MOST_FED - decoder.feeds)
        if self.layout.opaque:  # a checkpoint takes the state that is right after its token
            most = min(most, -after % SPACING - 1)
        joining = self.can_batch and self._changed and not alone
        count = proposals.choose(0 if joining else most, ready, decoder.feeds - 1)
        if count and not self.kv.extend(lease, least + count + 1):
            count = 0  # the right tokens of a guess are handed out with the pass after it
        if not self.kv.extend(lease, least):
            return False
        decoder.propose(count)
        return True

    def _settle(self, task: Task, decoder: Verifier) -> list[Pass]:
        """Return the passes that have ended; a pass over a guess that failed is made without it."""
        try:
            return decoder.settle()
        except Exception as error:
            if not self._undo_guess(task, decoder, error):
                raise
        decoder.refeed()
        return []

    def _undo_guess(self, task: Task, decoder: Decoder, error: Exception) -> bool:
        """Take back a pass that checks a guess, after `error`; return whether to go on without it.

        Nothing more is proposed in the reply then. After a device error nothing is taken back,
        because all KV since the last confirmation may be wrong.
        """
        if device.is_device_error(error) or not isinstance(decoder, Verifier):
            return False
        if not (decoder.undo() and task.held.lineage.sound()):
            return False
        log.warning(
            "%s: pass over guessed tokens failed; no further guesses in this reply: %s",
            *(task.record.id, error),
        )
        return True

    def _has_room(self, lane: Lane) -> bool:
        for task in lane.tasks:
            length = task.held.length + task.behind
            if not self.kv.extend(task.held, length + 1):
                return False
        if max(task.behind for task in lane.tasks) >= SYNC:
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
        """Append the KV that a batch has computed to its rows' own lineages."""
        for i, task in enumerate(lane.tasks if lane.batched else []):
            lineage, count = task.held.lineage, task.behind
            if count and lineage.length + count <= max(lineage.capacity, not self.layout.specs):
                lane.decoder.append_row(i, lineage, count)

    def sync(self, task: Task) -> None:
        """Bring the KV of a task's lineage up to the tokens that were handed out."""
        lane = self.find(task)
        if lane is not None and isinstance(lane.decoder, Verifier):
            lane.decoder.proposals.catch_up()
        elif lane is not None:
            self._sync(lane)

    # -- leaving -----------------------------------------------------------------------------

    def leave(self, lane: Lane, gone: list[Task]) -> None:
        """Remove the tasks `gone` from a lane; a batch that gets too small, or fails, is split."""
        self._changed = True
        keep = [i for i, task in enumerate(lane.tasks) if task not in gone]
        self._end_proposals(gone)
        try:
            self._sync(lane)
            if isinstance(lane.decoder, Verifier):
                lane.decoder.rewind(lane.tasks[0].fed_ids())
            if len(keep) > 1 and self._narrow(lane, keep):
                return
        except Exception as error:  # noqa: BLE001 - logged by the wall
            ids = ", ".join(task.record.id for task in gone)
            self._wall.contain(error, f"leaving a lane failed, the rest of a batch is split: {ids}")
        if lane.batched:
            self.split(lane)
        for old in self.all:
            if not old.batched and old.tasks[0] in gone:
                self.kv.budget.release("batch", old.bytes)
        self.all = [ln for ln in self.all if ln.batched or ln.tasks[0] not in gone]
        mx.clear_cache()

    def _end_proposals(self, gone: Collection[Task]) -> None:
        for task in gone:
            if (proposals := self._proposals_of.pop(task, None)) is not None:
                task.note_saved(proposals.end())

    def _narrow(self, lane: Lane, keep: list[int]) -> bool:
        """Keep only the rows with indices `keep`; False if there is no memory for their copies."""
        if not self.kv.ram.has_passing(2 * len(keep) * lane.capacity * self.layout.widest):
            return False
        longest = lane.length()
        lane.decoder.keep(keep)
        lane.tasks = [lane.tasks[i] for i in keep]
        size = len(keep) * self.layout.row_bytes(lane.capacity)
        self.kv.budget.release("batch", lane.bytes - size)
        lane.bytes, lane.capacity = size, lane.capacity - (longest - lane.length())
        return True

    def drop(self, tasks: Collection[Task]) -> None:
        """Drop every lane with one of `tasks`, and its batch: its pending tokens may be wrong."""
        gone = [lane for lane in self.all if not set(tasks).isdisjoint(lane.tasks)]
        self.all = [lane for lane in self.all if lane not in gone]
        self._changed = len(self.all) > 0
        for lane in gone:
            self.kv.budget.release("batch", lane.bytes)
            if lane.batched:
                lane.decoder.drop()
            self._end_proposals(lane.tasks)

    def split(self, lane: Lane) -> None:
        """Split a batch into lanes of one row; each continues from the end of its own lineage."""
        lanes: list[Lane] = []
        for i, task in enumerate(lane.tasks):
            own = lane.decoder.alone(i, task.held.lineage)
            (row,) = own.rows
            if row.processors:
                row.set_context(mx.array(task.fed_ids()))
            proposals, size = self._proposals(task)
            if proposals is not None:
                own = Verifier.resumed(own, task.held.lineage, proposals, self._recorder)
            lanes.append(Lane(own, [task], bytes=size))
        lane.decoder.drop()
        self.all.remove(lane)
        self.all += lanes
        self.kv.budget.release("batch", lane.bytes)
        mx.clear_cache()


def _in_flight(lane: Lane) -> bool:
    return isinstance(lane.decoder, Verifier) and lane.decoder.in_flight
