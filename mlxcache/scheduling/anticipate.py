"""Anticipation: rendering and computing the prefix of the next turn while the server is idle.

A chat template may drop or move thinking, or close a turn differently from the model. The client's
next prompt then diverges from the cached KV. The difference is computed before the client sends its
next turn; `prompt.next_turn` describes how the turn is rendered. A conversation that only the disk
holds is read into RAM.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from mlxcache.cache.checkpoints import stops
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.main_conversation import CacheHints
from mlxcache.cache.restore import DiskLookup
from mlxcache.common_prefix import common_length
from mlxcache.errors import MlxcacheError, StoreError
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.prompt.next_turn import append_reply
from mlxcache.scheduling.prefill import IDLE_S, Prefill
from mlxcache.scheduling.task import Task, for_owner
from mlxcache.scheduling.wall import Wall
from mlxcache.types import WARMING, Job, Piece, Prompt, RequestRecord, Tokens, join_ids

log = logging.getLogger("mlxcache.engine")

MIN_GAIN = 32  # minimum number of tokens left to feed for a turn to be computed in advance

NEAR_MARK = 16
"""Tokens after the last mark that are not anticipated for a model with recurrent layers.

The user's text may change how the tokens just before it are split; the tokens up to a mark never
change.
"""

MAX_TURNS, MAX_COMPUTED = 4, 32
"""Most turns that wait to be computed, and most computed turns remembered for the figures."""

MAX_UNUSED = 8  # consecutive replies that no client continues, after which anticipation stops
MAX_ENDED = 64  # number of the latest conversations for which a continuation is recognised


@dataclass(slots=True, eq=False)
class NextTurn:
    """A turn that the client may send next, to be computed in advance.

    `before`: token ids of the conversation so far, with the reply. `blocked`: memory is full, so
    the turn waits until no write to disk is pending, because KV that is on disk too can be evicted.
    """

    task: Task
    before: Tokens
    blocked: bool = False


class IdlePrefill:
    """Computes anticipated turns, or restores them, using only free memory. MLX thread only.

    The newest turn is the first.

    `tokens`: number of tokens computed in advance so far. `used`: those that requests reused later.
    """

    def __init__(self, kv: KVCache, prefill: Prefill, wall: Wall):
        self.tokens = self.used = 0
        self._kv = kv
        self._wall = wall
        self._prefill = prefill
        self._turns: deque[NextTurn] = deque(maxlen=MAX_TURNS)
        self._computed: deque[tuple[Tokens, int]] = deque(maxlen=MAX_COMPUTED)

    def add(self, prompt: Prompt, before: Tokens) -> None:
        """Queue `prompt`, which continues the conversation `before`, to be computed."""
        self.pause()
        self._turns.append(NextTurn(_task(prompt), before))

    def restore(self, conversation: Tokens) -> None:
        """Look `conversation` up on disk, to restore what RAM lacks of it before it goes on.

        A request that comes meanwhile ends this: it restores what it needs.
        """
        if any(len(conversation) == common_length(t.before, conversation) for t in self._turns):
            return
        task = _task(Prompt(join_ids(conversation, conversation[:1])))
        known = self._kv.reusable(task.ids)
        if task.target - known >= self._kv.min_unknown:
            task.await_lookup(self._kv.look_up(task.ids, known))
        if task.lookup is not None:
            self.pause()
            self._turns.append(NextTurn(task, conversation))

    @property
    def ready(self) -> bool:
        """True if `step` can make progress now, or is to release memory for another model."""
        if self._kv.waits.others_wait:
            return self._leased
        return bool(self._turns) and self._can_advance(self._turns[-1])

    def _can_advance(self, turn: NextTurn) -> bool:
        lookup, lease = turn.task.lookup, turn.task.lease
        if lookup is None:
            return not (turn.blocked and self._kv.writing)
        return lookup.found and (lease is None or self._kv.can_restore(lease, lookup))

    @property
    def _leased(self) -> bool:
        return any(turn.task.lease is not None for turn in self._turns)

    def step(self) -> None:
        """Feed one chunk of the newest turn; drop the turn when nothing of it is left to feed."""
        if not self.ready:
            return
        if self._kv.waits.others_wait:
            self.pause()
            return
        turn = self._turns[-1]
        if not self._guard(turn, lambda: self._advance(turn)):
            self._turns.remove(turn)

    def _guard(self, turn: NextTurn, action: Callable[[], bool]) -> bool:
        """Return the result of `action`; False after an exception, with the turn's lease ended."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - logged by the wall
            kv, task = self._kv, turn.task
            what = f"computing the next turn in advance failed: prompt of {len(task.ids)} tokens"
            what = f"model {kv.label}: {what}"
            if isinstance(error, StoreError | OSError):
                log.warning("%s: %s", what, error)
            else:
                self._wall.contain(error, what)
            if task.lease is not None:
                kv.abandon(task.give_up_lease())
            return False

    def _advance(self, turn: NextTurn) -> bool:
        task = turn.task
        if task.lease is None and not self._start(turn):
            return turn.blocked
        if task.lookup is not None:
            done = self._kv.restore(task.held, task.lookup)
            return not (done and self._release(task))
        began = task.held.length
        self._prefill.feed_chunk(task, IDLE_S)
        self.tokens += task.held.length - began
        if task.remaining:
            return True
        return not self._release(task)

    def _start(self, turn: NextTurn) -> bool:
        """Acquire a lease for a turn; return False if that is not worthwhile or memory is full."""
        task, kv = turn.task, self._kv
        if task.lookup is not None:
            return self._start_restore(task, task.lookup)
        was_blocked, turn.blocked = turn.blocked, False
        if kv.layout.opaque:
            _end_at_mark(task)
        parted = common_length(turn.before, task.ids)
        known = kv.reusable(task.ids)
        image_end = max((span.end for span in task.images), default=0)
        if task.target - known <= MIN_GAIN or kv.match(task.ids) + 1 < parted or known < image_end:
            return False
        if self._acquire(task):
            return True
        # the reply as the model wrote it may go, if no client has continued it
        if kv.forget_unshared(turn.before, parted) and self._acquire(task):
            return True
        turn.blocked = kv.writing and not was_blocked  # else it is given up
        return False

    def _start_restore(self, task: Task, lookup: DiskLookup) -> bool:
        if not lookup.target or not self._acquire(task, lookup.target):
            return False
        if task.restoring and task.held.cached >= lookup.known:
            return True
        self._kv.release(task.give_up_lease())  # a request changed what RAM holds of it
        return False

    def _acquire(self, task: Task, planned: int = 0) -> bool:
        kv, hints = self._kv, CacheHints.of(task.job)
        lease = kv.acquire(task.ids, 0, planned=planned, hints=hints, evict="no")
        if lease is None:
            return False
        if kv.layout.opaque and kv.budget.free < kv.layout.checkpoint_bytes:
            kv.release(lease)  # a state that cannot be kept is of no use
            return False
        task.lend(lease)
        if kv.layout.opaque:
            marks, most = task.job.prompt.marks, kv.ram.max_checkpoints(len(task.ids))
            found = stops(marks, lease.cached, task.target, parted=lease.matched, most=most)
            task.plan_stops([*(at for at in found if at < task.target), task.target])
        return True

    def _release(self, task: Task) -> bool:
        """Commit the tokens computed for a turn, and release its lease; return True.

        With a remote, a complete turn is written to disk: the conversation may continue elsewhere.
        """
        lease = task.held
        if task.lookup is None:
            self._kv.commit(lease, task.ids, checkpoint=True)
            if self._kv.is_shared and not task.remaining:
                self._kv.persist(lease, task.ids, whole=True)
            if lease.length > lease.cached:
                self._computed.append((task.ids[: lease.length], lease.cached))
        self._kv.release(lease)
        task.give_up_lease()
        return True

    def drop_failed(self) -> None:
        turns = list(self._turns)
        self._turns.clear()
        self._turns += [turn for turn in turns if turn.task.lease is None]
        with ExitStack() as stack:  # each, even if the device fails again
            for turn in turns:
                if turn.task.lease is not None:
                    stack.callback(self._kv.abandon, turn.task.give_up_lease())

    # -- requests ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Commit what was computed and release all leases; requests can use their memory."""
        for turn in list(self._turns):
            task = turn.task
            done = task.lease is None or self._guard(turn, partial(self._release, task))
            if not done or task.lookup is not None:
                task.drop_lookup()
                self._turns.remove(turn)

    def note_use(self, task: Task) -> None:
        """Add to `used` the tokens computed in advance that the request of `task` reuses."""
        for _ in range(len(self._computed)):
            ids, start = self._computed.popleft()
            shared = min(common_length(ids, task.ids), task.held.cached)
            if shared > start:
                self.used += shared - start
            else:
                self._computed.append((ids, start))

    def clear(self) -> None:
        self.pause()
        self._turns.clear()


def _task(prompt: Prompt) -> Task:
    job = Job("ahead", prompt, api=WARMING)
    record = RequestRecord(job.id, None, "", None, "prefill", 0.0, len(prompt.ids))
    return Task(job, lambda event: None, record)


def _end_at_mark(task: Task) -> None:
    """Shorten the prompt of `task` so that it is computed only up to its last mark."""
    last = max((mark for mark in task.job.prompt.marks if mark < task.target), default=0)
    if 0 < task.target - last <= NEAR_MARK:
        task.shorten(last + 1)


class NextTurnRenderer:
    """Renders the next turns of ended requests in a thread of its own. Use on the event loop.

    `add(prompt, before)` is called on this renderer's thread with each rendered turn and the token
    ids of the conversation so far.
    """

    def __init__(
        self,
        builder: Callable[[str | None], PromptBuilder],
        add: Callable[[Prompt, Tokens], None],
    ):
        self._builder, self._add = builder, add
        self._over: deque[tuple[Task, Sequence[Piece]]] = deque(maxlen=MAX_TURNS)
        self._ended: deque[ChatPrompt] = deque(maxlen=MAX_ENDED)
        self._unused = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-anticipate")

    def note_begin(self, job: Job) -> bool:
        """Return whether the pieces of the reply must be collected, to render the next turn."""
        prompt = job.prompt
        if not isinstance(prompt, ChatPrompt) or job.api == WARMING:
            return False
        for ended in self._ended:
            if _continues(prompt, ended):
                self._unused = 0
                self._ended.remove(ended)
                break
        return True

    def note_end(self, task: Task, pieces: Sequence[Piece], *, idle: bool) -> None:
        """Plan to render the next turn of an ended request, unless it failed or has no reply."""
        prompt = task.job.prompt
        if task.record.status == "done" and pieces and isinstance(prompt, ChatPrompt):
            self._ended.append(prompt)
            self._unused += not task.job.choice  # the client continues one choice at most
            if self._unused <= MAX_UNUSED:
                self._over.append((task, pieces))
        while idle and self._over:
            self._pool.submit(self._render, *self._over.popleft())

    def flush(self) -> None:
        """Wait until every turn queued so far is rendered. Blocks."""
        self._pool.submit(int).result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _render(self, task: Task, pieces: Sequence[Piece]) -> None:
        """Runs on the renderer's thread."""
        job, asked = task.job, task.job.prompt
        assert isinstance(asked, ChatPrompt)
        try:
            chat = append_reply(
                asked.sent, pieces, job.prompt.names, thoughts=job.api == "messages"
            )
            prompt = self._builder(job.owner).next_turn(chat, job.session, job.stop)
        except MlxcacheError as error:  # for example, the conversation is too long to continue
            log.debug("%s: next turn not anticipated: %s", job.id, error)
            return
        except Exception:  # no client waits for it
            log.exception(
                "%s: next turn not anticipated, the reply is not affected: rendering it failed",
                job.id,
            )
            return
        before, job = task.tokens(), for_owner(replace(job, prompt=prompt), job.owner)
        self._add(job.prompt, before)


def _continues(now: ChatPrompt, then: ChatPrompt) -> bool:
    """Return whether conversation `now` consists of `then`, a reply, and more messages."""
    messages, count = now.sent.messages, len(then.sent.messages) - then.sent.continue_final
    if len(messages) <= count + 1 or messages[count].get("role") != "assistant":
        return False
    return not count or messages[count - 1] == then.sent.messages[count - 1]
