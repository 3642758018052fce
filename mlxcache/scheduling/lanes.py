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
from mlxcache.guess.drafts import DraftRule, ReplyDrafts
from mlxcache.model import device, rows
from mlxcache.model.kv import eval_states
from mlxcache.model.pair import Pair
from mlxcache.scheduling.decoder import Decoder, Drawn
from mlxcache.scheduling.drafting import DraftingDecoder
from mlxcache.scheduling.guessing import GuessingDecoder, Settled
from mlxcache.scheduling.speculation import Speculation
from mlxcache.scheduling.task import Task
from mlxcache.scheduling.wall import Wall

log = logging.getLogger("mlxcache.engine")

PADDING = 1.25
"""Largest ratio of a batch's padded bytes to the sum of its rows' bytes."""

SYNC = 128
"""Most steps before a batch's new positions are copied to its rows' lineages."""

CATCH_UP = 16
"""Tokens per pass for a row that left a batch and whose lineage lacks the newest positions."""

CATCH_UP_DRAFT = 256
"""Tokens that a draft model has not seen, while nothing is drafted, from which it is fed them."""

EVICTION_SHARE = 8
"""Divisor: a batch may evict other KV only if it takes at most 1/EVICTION_SHARE of the budget."""

MOST_FED = 32
"""Most tokens of a pass that checks a guess, with those that it feeds again."""

DRAFTS = 3
"""Default number of tokens that a draft model proposes at once."""


@dataclass(slots=True, eq=False)
class Lane:
    """A decoder and its tasks, one task per row, in the order of the rows.

    If `batched`, the rows share a batch: `bytes` are reserved for it in the budget, and its buffers
    have room for `capacity` positions. Otherwise `bytes` are reserved for copies of the recurrent
    state, from which wrong guesses are undone; 0 if the lane needs none.
    """

    decoder: Decoder
    tasks: list[Task]
    batched: bool = False
    bytes: int = 0
    capacity: int = 0
    drafts: ReplyDrafts | None = None

    @property
    def steady(self) -> bool:
        """True if a failed step can be repeated, because its pending tokens are still there."""
        return self.decoder.pending is not None

    def length(self) -> int:
        return max(t.held.length + t.behind for t in self.tasks)


def solo(model: Any, task: Task, *, guessing: bool = False) -> Lane:
    """Start a lane over the task's own lineage, and feed the prompt's last token."""
    assert task.output is not None
    lineage, row = task.held.lineage, task.output.row
    lineage.note_pass()
    decoder: Decoder
    if isinstance(model, Pair):
        decoder = DraftingDecoder(model, row, lineage)
    elif guessing:
        decoder = GuessingDecoder(model, row, lineage)
    else:
        lockstep = lineage.layout.lockstep
        decoder = Decoder(model, [row], lineage.caches, lambda: lineage.nbytes, lockstep=lockstep)
    decoder.start([int(task.fed[-1])])
    lineage.advance(1)
    return Lane(decoder, [task])


class Lanes:
    """All lanes, and the rules for joining them into batches and splitting them.

    `drafts`: most tokens that a draft model proposes at once. `rule`: chooses their number; None
    always proposes `drafts`.
    """

    def __init__(
        self,
        model: Any,
        kv: KVCache,
        wall: Wall,
        *,
        shared_bytes: int = 0,
        drafts: int = DRAFTS,
        speculation: Speculation | None = None,
        rule: DraftRule | None = None,
    ):
        self.model = model
        self.kv = kv
        self._wall = wall
        self._rule = rule
        self.all: list[Lane] = []
        self.layout = kv.layout
        self._lockstep = self.layout.lockstep
        self._shared_bytes = shared_bytes
        self._changed = False
        self._drafts = drafts
        window = self.layout.window
        self.sync_after = min(SYNC, window // 2 if window else SYNC)
        self.can_batch = self.layout.batchable and self.layout.cacheable and self.sync_after > 0
        self.can_batch = self.can_batch and not isinstance(model, Pair)
        self.speculation = speculation if self.layout.rewinds else None

    def __len__(self) -> int:
        return sum(len(lane.tasks) for lane in self.all)

    def find(self, task: Task) -> Lane | None:
        return next((lane for lane in self.all if task in lane.tasks), None)

    # -- joining -----------------------------------------------------------------------------

    def enter(self, task: Task) -> None:
        size = self._reserve_states() if self.speculation and task.job.speculate else None
        try:
            lane: Lane = solo(self.model, task, guessing=size is not None)
        except BaseException:
            self.kv.budget.release("batch", size or 0)
            raise
        lane.bytes = size or 0
        if self._rule is not None and isinstance(lane.decoder, DraftingDecoder):
            lane.drafts = ReplyDrafts(self._rule)
        self.all.append(lane)
        self._changed = True

    def _reserve_states(self) -> int | None:
        """Reserve memory for two copies of a row's recurrent state, to undo wrong guesses.

        Returns the bytes reserved, 0 for a model without such a state, or None if memory is short.
        """
        size = 2 * self.layout.running_bytes
        return size if not size or self.kv.ram.reserve("batch", size, evict="idle") else None

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
            others = [ln.decoder.caches for ln in new]
            caches = rows.join(lane.decoder.caches, others, batched=lane.batched)
            self._lockstep.join(caches, lane.decoder.caches, others, lane.batched)
            decoder = lane.decoder
            for other in new:
                decoder = decoder.joined(other.decoder, caches, lambda: lane.bytes)
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

        A row's list ends before a token that was drawn from logits that are not finite. A pass with
        guessed tokens that fails is tried again without them, if the KV is intact.
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

        Waits for a pass that checks drafted or guessed tokens, and chooses those of the next pass.
        A batch that gets no memory is split into lanes of one row; the result is then True.
        """
        if lane.batched:
            if not self._has_room(lane):
                self.split(lane)
            return True
        (task,) = lane.tasks
        if isinstance(lane.decoder, DraftingDecoder):
            return self._settle(lane, lane.decoder)
        if isinstance(lane.decoder, GuessingDecoder) and not task.behind:
            return self._guess(task, lane.decoder)
        lineage = task.held.lineage
        if not self.kv.extend(task.held, lineage.length + task.behind + 1):
            return False
        while task.behind:
            at = lineage.length
            piece = task.fed_ids()[at : at + CATCH_UP]
            lineage.note_pass()
            self._lockstep.feed(lineage, piece)
            self.model(mx.array(piece)[None], cache=lineage.caches, **lane.decoder.places)
            eval_states(lineage.caches)
            lineage.advance(len(piece))
        return True

    def _settle(self, lane: Lane, decoder: DraftingDecoder) -> bool:
        """Count the accepted drafts of the last pass; choose the next ones and reserve memory.

        Drafts fewer or none if memory is short. Returns False without memory for one token.
        """
        (task,) = lane.tasks
        lease, lineage, drafts = task.held, task.held.lineage, lane.drafts
        if len(self.all) > 1:
            decoder.interrupt()
        running = decoder.in_flight
        drafted, right = decoder.settle()
        if running:
            lineage.truncate(lineage.length + right)
        if drafts is not None:
            seconds = decoder.last[1] if decoder.last is not None else None
            waited = decoder.waited
            drafts.note_round(drafted, right, seconds, lineage.length, waited=waited)
        task.note_drafts("draft")
        most = max(0, min(self._drafts, task.limit - len(task.out) - decoder.ready - 1))
        least, count = lineage.length + 1, most
        if drafts is not None:
            count = drafts.choose(most, lineage.length, decoder.unseen)
        if not (self.kv.extend(lease, least + count) or self.kv.extend(lease, least)):
            return False
        count = min(count, lineage.capacity - least)
        if not count and not running and decoder.unseen >= CATCH_UP_DRAFT:
            if drafts is not None:
                drafts.note_catch_up(decoder.unseen, lineage.length)
            decoder.catch_up()
        decoder.propose(count)
        return True

    def interrupt(self) -> None:
        """Do not measure the passes in progress, which other work makes longer."""
        for lane in self.all:
            if isinstance(lane.decoder, GuessingDecoder | DraftingDecoder):
                lane.decoder.interrupt()

    def _guess(self, task: Task, decoder: GuessingDecoder) -> bool:
        """Count how much of the last guess was right, make the next one, and reserve memory.

        Nothing is guessed while rows may join a batch, if memory is short, or where the next step
        takes a checkpoint. Returns False without memory for one token.
        """
        assert self.speculation is not None
        alone = len(self.all) == 1
        if not alone:
            decoder.interrupt()
        if (settled := self._settle_guess(task, decoder)) is not None:
            self.speculation.note(task, settled, alone=alone)
            task.note_drafts("history")
        else:
            self.speculation.note_plain(task, decoder, alone=alone)
        lease, lineage = task.held, task.held.lineage
        out, ready = len(task.out), max(1, len(decoder.ready))
        least = lineage.length + decoder.feeds
        most = min(task.limit - out - ready - 1, MOST_FED - decoder.feeds)
        if self.layout.opaque:  # a checkpoint takes the state that is right after its token
            most = min(most, -(out + ready) % SPACING - 1)
        joining = self.can_batch and self._changed and not alone
        guess = self.speculation.propose(task, decoder, 0 if joining else most)
        if guess and not self.kv.extend(lease, least + len(guess) + 1):
            guess = []  # the right tokens of a guess are handed out with the pass after it
        if not self.kv.extend(lease, least):
            return False
        decoder.propose(guess)
        return True

    def _settle_guess(self, task: Task, decoder: GuessingDecoder) -> Settled | None:
        """Return the result of the last guess; None if none was checked, or its pass failed."""
        try:
            return decoder.settle()
        except Exception as error:
            if not self._undo_guess(task, decoder, error):
                raise
        decoder.refeed()
        return None

    def _undo_guess(self, task: Task, decoder: Decoder, error: Exception) -> bool:
        """Take back a pass that checks a guess, after `error`; return whether to go on without it.

        Nothing more is guessed in the reply then. After a device error nothing is taken back,
        because all KV since the last confirmation may be wrong.
        """
        if device.is_device_error(error) or not isinstance(decoder, GuessingDecoder):
            return False
        if not (decoder.undo() and task.held.lineage.sound()):
            return False
        assert self.speculation is not None
        self.speculation.stop(task)
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
        """Append the KV that a batch has computed to its rows' own lineages."""
        for i, task in enumerate(lane.tasks if lane.batched else []):
            lineage, count = task.held.lineage, task.behind
            if count and lineage.length + count <= max(lineage.capacity, not self.layout.specs):
                linear, opaque = rows.row_tail(self.layout, lane.decoder.caches, i, count)
                self._lockstep.append_row(lane.decoder.caches, i, lineage, count)
                before = lineage.length
                try:
                    lineage.append(linear, count)
                    lineage.set_state(opaque)
                except BaseException:  # KV and state stay those of one position
                    lineage.truncate(before)
                    raise

    def sync(self, task: Task) -> None:
        """Bring the KV of a task's lineage up to the tokens that were handed out."""
        lane = self.find(task)
        if lane is not None and isinstance(lane.decoder, DraftingDecoder):
            lane.decoder.catch_up()
        elif lane is not None:
            self._sync(lane)

    # -- leaving -----------------------------------------------------------------------------

    def leave(self, lane: Lane, gone: list[Task]) -> None:
        """Remove the tasks `gone` from a lane; a batch that gets too small, or fails, is split."""
        self._changed = True
        keep = [i for i, task in enumerate(lane.tasks) if task not in gone]
        self._end_guesses(gone)
        try:
            self._sync(lane)
            if isinstance(lane.decoder, GuessingDecoder):
                lane.decoder.rewind(lane.tasks[0].fed_ids())
            elif isinstance(lane.decoder, DraftingDecoder):
                self._end_drafts(lane, lane.decoder)
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

    def _end_drafts(self, lane: Lane, decoder: DraftingDecoder) -> None:
        (task,) = lane.tasks
        if lane.drafts is not None:
            task.note_guesses(lane.drafts.seconds_saved(task.length))
        decoder.rewind(min(task.length, task.held.lineage.length))

    def _end_guesses(self, gone: list[Task]) -> None:
        if self.speculation is not None:
            for task in gone:
                task.note_guesses(self.speculation.end(task))

    def _narrow(self, lane: Lane, keep: list[int]) -> bool:
        """Keep only the rows with indices `keep`; False if there is no memory for their copies."""
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

    def drop(self, tasks: Collection[Task]) -> None:
        """Drop every lane with one of `tasks`, and its batch: its pending tokens may be wrong."""
        gone = [lane for lane in self.all if not set(tasks).isdisjoint(lane.tasks)]
        self.all = [lane for lane in self.all if lane not in gone]
        self._changed = len(self.all) > 0
        for lane in gone:
            self.kv.budget.release("batch", lane.bytes)
            if lane.batched:
                self._lockstep.drop_batch(lane.decoder.caches)
            self._end_guesses(lane.tasks)

    def split(self, lane: Lane) -> None:
        """Split a batch into lanes of one row; each continues from the end of its own lineage."""
        lanes: list[Lane] = []
        for i, task in enumerate(lane.tasks):
            own = lane.decoder.alone(i, task.held.lineage)
            self._lockstep.take_row(lane.decoder.caches, i, task.held.lineage)
            (row,) = own.rows
            if row.processors:
                row.set_context(mx.array(task.fed_ids()))
            size = self._reserve_states() if self.speculation and task.job.speculate else None
            if size is not None:
                own = GuessingDecoder.resumed(own, task.held.lineage)
            lanes.append(Lane(own, [task], bytes=size or 0))
        self._lockstep.drop_batch(lane.decoder.caches)
        self.all.remove(lane)
        self.all += lanes
        self.kv.budget.release("batch", lane.bytes)
        mx.clear_cache()


def _in_flight(lane: Lane) -> bool:
    return isinstance(lane.decoder, GuessingDecoder) and lane.decoder.in_flight
