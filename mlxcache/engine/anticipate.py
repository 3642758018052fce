"""Anticipation: when a reply is over, what the next turn begins with is rendered and computed.

Templates drop or move thinking, and close turns in another way than the model did. Then the next
prompt parts from what was computed, which is found out while nobody waits: see `prompt.next_turn`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from mlxcache.cache.checkpoints import stops
from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory, forget
from mlxcache.cache.main_conversation import Claim
from mlxcache.common_prefix import common_length
from mlxcache.engine.prefill import Prefill
from mlxcache.engine.task import Task, owned
from mlxcache.errors import MlxcacheError
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.explain import Source
from mlxcache.prompt.next_turn import append_reply
from mlxcache.types import (
    WARMING,
    Event,
    Job,
    Piece,
    Prompt,
    RequestRecord,
    Text,
    Thinking,
    Tokens,
    ToolCall,
)

log = logging.getLogger("mlxcache.engine")

CHUNK_S = 0.25
"""How long a chunk may take that nobody has asked for, in seconds: a request may come meanwhile."""

WORTH = 32
"""Tokens that the next turn may as well feed itself."""

NEAR = 16
"""Tokens after the last mark that are left to the next turn where states stand for one position.

What a person writes may change how the tokens just before it are cut; a mark's never are.
"""

KEPT, REMEMBERED = 4, 32
"""Conversations that wait to be gone on with, and those of which it is known what was computed."""


@dataclass(slots=True)
class Turn:
    """A turn that may come. `before`: the tokens of the conversation as computed so far, the reply
    included. `blocked`: there is no room until something is on disk."""

    task: Task
    before: Tokens
    blocked: bool = False


class Ahead:
    """The turns that are anticipated, the newest first. One holds a lineage while it is computed.

    `tokens`: how many were fed for turns that had not come. `used`: how many of these a request
    then found.
    """

    def __init__(self, memory: Memory, prefill: Prefill):
        self.memory = memory
        self.prefill = prefill
        self.disk: Disk | None = None
        self.tokens = self.used = 0
        self._turns: deque[Turn] = deque(maxlen=KEPT)
        self._made: deque[tuple[Tokens, int]] = deque(maxlen=REMEMBERED)

    def add(self, prompt: Prompt, before: Tokens) -> None:
        """Have `prompt` computed, all but its last token, after a conversation of `before`."""
        job = Job("ahead", prompt, api=WARMING)
        record = RequestRecord(job.id, None, "", None, "prefill", 0.0, len(prompt.ids))
        self.pause()
        self._turns.append(Turn(Task(job, lambda event: None, record), before))

    @property
    def ready(self) -> bool:
        """Whether `step` would do something now."""
        return bool(self._turns) and not (self._turns[-1].blocked and self._busy)

    @property
    def _busy(self) -> bool:
        return self.disk is not None and self.disk.busy

    def step(self) -> None:
        """Feed one chunk, or find that there is nothing to feed."""
        if not self.ready:
            return
        turn, room = self._turns[-1], self.memory.room
        room.gentle = True
        try:
            if not self._advance(turn):
                self._turns.pop()
        except Exception:  # nobody waits for an answer; the next turn computes what is lacking
            log.exception("a turn could not be anticipated")
            self._turns.pop()
            if turn.task.lease is not None:
                self.memory.abandon(turn.task.lease)
        finally:
            room.gentle = False

    def _advance(self, turn: Turn) -> bool:
        """One chunk of a turn; False once that is all there is to do."""
        task = turn.task
        if task.lease is None and not self._lease(turn):
            return turn.blocked
        began = task.held.lineage.length
        self.prefill.chunk(task, CHUNK_S)
        self.tokens += task.held.lineage.length - began
        if task.remaining:
            return True
        self._let_go(task)
        return False

    def _lease(self, turn: Turn) -> bool:
        """Get the lineage to go on in, if there is room for it, and enough to do to be worth it."""
        task, memory = turn.task, self.memory
        was_blocked, turn.blocked = turn.blocked, False
        if memory.layout.opaque:
            _end_at_mark(task)
        parted = common_length(turn.before, task.ids)
        held = memory.tree.match(task.ids, touch=False).length
        known = memory.known(task.ids)
        pictured = max((span.end for span in task.images), default=0)
        if task.target - known <= WORTH or held + 1 < parted or known < pictured:
            return False
        if self._acquire(task):
            return True
        if self._replace(turn.before, parted) and self._acquire(task):
            return True
        turn.blocked = self._busy and not was_blocked
        return False

    def _replace(self, before: Tokens, parted: int) -> bool:
        """Drop the reply as it was, from `parted` on, if nobody has gone on with it."""
        nodes = [n for n in self.memory.tree.match(before, touch=False).nodes if n.end > parted]
        if not nodes or any(len(n.children) > (n is not nodes[-1]) for n in nodes):
            return False
        return forget(self.memory, before, parted) > 0

    def _acquire(self, task: Task) -> bool:
        memory = self.memory
        lease = memory.acquire(task.ids, 0, claim=Claim.of(task.job))
        if lease is None:
            return False
        if memory.layout.opaque and memory.budget.free < memory.layout.checkpoint_bytes:
            memory.release(lease)  # a state that cannot be kept serves nobody
            return False
        task.lease = lease
        task.record.cached_tokens = lease.cached
        if memory.layout.opaque:
            marks, most = task.job.prompt.marks, memory.room.most_checkpoints(len(task.ids))
            found = stops(marks, lease.cached, task.target, parted=lease.matched, most=most)
            task.stops = (*(at for at in found if at < task.target), task.target)
        return True

    def _let_go(self, task: Task) -> None:
        """Commit what a turn has computed, and release its lineage."""
        lease, task.lease = task.held, None
        self.memory.commit(lease, task.ids, checkpoint=True)
        if lease.lineage.length > lease.cached:
            self._made.append((task.ids[: lease.lineage.length], lease.cached))
        self.memory.release(lease)

    # -- requests ----------------------------------------------------------------------------

    def pause(self) -> None:
        """Release what is held: somebody asks for something. What was computed is kept."""
        room = self.memory.room
        for turn in self._turns:
            if turn.task.lease is not None:
                room.gentle = True
                try:
                    self._let_go(turn.task)
                finally:
                    room.gentle = False

    def admitted(self, task: Task) -> None:
        """Count what a request has found of what was computed ahead of it."""
        for _ in range(len(self._made)):
            ids, start = self._made.popleft()
            shared = min(common_length(ids, task.ids), task.held.cached)
            if shared > start:
                self.used += shared - start
            else:
                self._made.append((ids, start))

    def clear(self) -> None:
        """Anticipate nothing any more."""
        self.pause()
        self._turns.clear()


def _end_at_mark(task: Task) -> None:
    """Have a turn end where its last message begins, if that is near its end."""
    last = max((mark for mark in task.job.prompt.marks if mark < task.target), default=0)
    if 0 < task.target - last <= NEAR:
        task.ids, task.fed = task.ids[: last + 1], task.fed[: last + 1]


LEFT = 8
"""Replies in a row that nobody goes on with, after which no more are anticipated until one is."""

ENDED = 64
"""Conversations, the latest, of which it is noticed that somebody goes on with them."""


class Anticipation:
    """Renders next turns in a thread of its own. Call from the event loop.

    `builder` gives an owner's, `put` has an action run on the MLX thread, `ahead` computes there.
    """

    def __init__(
        self,
        builder: Callable[[str | None], PromptBuilder],
        ahead: Ahead,
        put: Callable[[Callable[[], None]], None],
    ):
        self._builder, self._ahead, self._put = builder, ahead, put
        self._pieces: dict[str, list[Piece]] = {}
        self._over: deque[tuple[Task, list[Piece]]] = deque(maxlen=KEPT)
        self._ended: deque[Source] = deque(maxlen=ENDED)
        self._left = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-anticipate")

    def watch(self, task: Task) -> None:
        """Keep what a request is answered, if it is of a conversation that may go on."""
        source = task.job.prompt.source
        if source is None or task.job.api == WARMING or source.sent.continue_final:
            return
        for ended in self._ended:
            if _goes_on(source, ended):
                self._left = 0
                self._ended.remove(ended)
                break
        pieces = self._pieces[task.job.id] = []
        push = task.push

        def keeping(event: Event | BaseException) -> None:
            """On the MLX thread."""
            if isinstance(event, Text | Thinking | ToolCall):
                pieces.append(event)
            push(event)

        task.push = keeping

    def ended(self, task: Task, *, idle: bool) -> None:
        """A request is over; `idle`: it was the last one."""
        pieces = self._pieces.pop(task.job.id, None)
        if task.record.status == "done" and pieces:
            self._ended.append(task.job.prompt.source)
            self._left += 1
            if self._left <= LEFT:
                self._over.append((task, pieces))
        while idle and self._over:
            self._pool.submit(self._render, *self._over.popleft())

    def close(self) -> None:
        """Render nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _render(self, task: Task, pieces: list[Piece]) -> None:
        """In the thread."""
        job, sent = task.job, task.job.prompt.source.sent
        try:
            chat = append_reply(sent, pieces, job.prompt.names, thoughts=job.api == "messages")
            prompt = self._builder(job.owner).next_turn(chat, job.session, job.stop)
        except MlxcacheError as error:  # such as: it is too long to go on with
            log.debug("%s: the next turn cannot be anticipated: %s", job.id, error)
            return
        except Exception:  # nobody waits for an answer
            log.exception("%s: the next turn could not be rendered", job.id)
            return
        before, job = task.tokens(), owned(replace(job, prompt=prompt), job.owner)
        self._put(lambda: self._ahead.add(job.prompt, before))


def _goes_on(now: Source, then: Source) -> bool:
    """Whether a conversation has the messages of an earlier one, a reply, and more."""
    messages, count = now.sent.messages, len(then.sent.messages)
    if len(messages) <= count + 1 or messages[count].get("role") != "assistant":
        return False
    return messages[count - 1] == then.sent.messages[-1]
