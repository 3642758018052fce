"""Anticipation: when a reply is over, what the next turn begins with is rendered and computed.

Templates drop or move thinking, and close turns in another way than the model did. Then the next
prompt parts from what was computed, which is found out while nobody waits: see `prompt.ahead`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mlxcache.engine.ahead import KEPT, Ahead
from mlxcache.engine.records import owned
from mlxcache.engine.task import Task
from mlxcache.errors import MlxcacheError
from mlxcache.prompt.ahead import continued
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.explain import Source
from mlxcache.types import WARMING, Event, Piece, Text, Thinking, ToolCall

log = logging.getLogger("mlxcache.engine")

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
            chat = continued(sent, pieces, job.prompt.names, thoughts=job.api == "messages")
            prompt = self._builder(job.owner).ahead(chat, job.session, job.stop)
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
