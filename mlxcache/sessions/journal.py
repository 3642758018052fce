"""Booking finished requests as turns of sessions, on a thread of its own, in order."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mlxcache.errors import Busy, NotReady, StoreError
from mlxcache.store.database import Locked
from mlxcache.store.leaves import conversation_key_tokens
from mlxcache.store.session_rows import Gain, ReplyRow
from mlxcache.store.sessions import Sessions, Turn
from mlxcache.store.snapshot_format import Spec
from mlxcache.store.store import Store
from mlxcache.types import Job, Tokens

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

PIN_S = 3.0
"""Seconds after a turn of a pinned session at which its new files, written by then, are pinned."""

ASKED_S = 5.0
"""Seconds that whoever asks waits for others that write the table, or for turns being booked."""

BOOKED_S = 1.0
"""Seconds for which whoever only reads waits for the turns that were handed over before."""

CLOSE_S = 1.0
"""Seconds for which turns are booked when the server stops."""

AGAIN_S = 3.0
"""How often turns that could not be booked are tried again."""

MOST_LATE = 64
"""Turns that wait for that, the newest: their token ids are in RAM meanwhile."""

ROW_BYTES, SPARE_BYTES = 8, 64 << 10
"""What a token id takes in a row and in the log, and what a change takes besides."""


@dataclass(frozen=True, slots=True)
class Served:
    """What sessions are of: a model's name and namespace, and what it caches per token.

    `path`: what mlx-lm's tools have to be given as --model.
    """

    name: str
    path: str
    namespace: str
    spec: Spec
    vocab_size: int


class Booking:
    """The one thread that writes the table of sessions. What runs on it runs in order.

    `count`: sessions in the table, as far as this process knows.
    """

    def __init__(self, sessions: Sessions, model: Served, store: Store | None):
        self.count = 0
        self._sessions = sessions
        self._model = model
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-sessions")
        self._timer: threading.Timer | None = None
        self._again: threading.Timer | None = None
        self._late: deque[Turn] = deque(maxlen=MOST_LATE)
        self._closed = False
        self._failing = False
        self._open = 0
        self._counted = threading.Condition()
        self._submit(self._pin_all)

    def turn(
        self,
        job: Job,
        ids: Tokens,
        at: float,
        reply: ReplyRow | None = None,
        gain: Gain | None = None,
    ) -> None:
        """Book a finished request, from any thread and at once. `ids`: its prompt and reply.

        Where the table cannot be written it is booked once that can be, if the server still runs.
        """
        marks, prompt = job.prompt.marks, len(job.prompt.ids)
        turn = Turn(
            namespace=self._model.namespace,
            model=self._model.name,
            ids=ids,
            prompt_tokens=prompt,
            key_tokens=conversation_key_tokens(marks, prompt),
            head=marks[0] if len(marks) > 1 else 0,
            at=at,
            label=job.session,
            client=job.client,
            title=job.title,
            reply=reply,
            owner=job.owner,
            gain=gain,
        )
        self._submit(lambda: self._book_with_late(turn))

    def _submit(self, action: Callable[[], None]) -> None:
        if not self._closed:
            with self._counted:
                self._open += 1
            self._pool.submit(self._guarded, action)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failing = False
        except StoreError as error:
            if not self._failing:
                log.warning("sessions are not kept: %s", error)
            self._failing = True
        except Exception:
            log.exception("a session could not be kept")
        finally:
            with self._counted:
                self._open -= 1
                self._counted.notify_all()

    def _book_with_late(self, *turns: Turn) -> None:
        """Book, in order, what could not be booked before, and `turns`. Raises StoreError."""
        self._late.extend(turns)
        while self._late:
            turn = self._late.popleft()
            try:
                id = self.with_room(len(turn.ids), partial(self._sessions.record_turn, turn))
            except StoreError:
                if len(self._late) < MOST_LATE:
                    self._late.appendleft(turn)
                if self._again is None:
                    self._again = self._later(AGAIN_S, self._try_again)
                raise
            self._booked(id)

    def _try_again(self) -> None:
        self._again = None
        self._book_with_late()

    def _later(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        """Submit `action` in so many seconds."""
        timer = threading.Timer(seconds, lambda: self._submit(action))
        timer.daemon = True
        timer.start()
        return timer

    def _booked(self, id: str) -> None:
        self.count = self._sessions.count()
        if self._store is not None and self._sessions.get(id).pinned and self._timer is None:
            self._timer = self._later(PIN_S, self._pin_all)

    def _pin_all(self) -> None:
        self._timer = None
        self.count = self._sessions.count()
        for id in self._sessions.pinned():
            self.pin(id, pinned=True)

    def pin(self, id: str, *, pinned: bool) -> None:
        """Evict what is on disk of a session last, or not any more. On the thread."""
        if self._store is not None:
            self._store.pin_session(self._sessions, id, pinned=pinned)

    def with_room(self, tokens: int, action: Callable[[], T]) -> T:
        """The result of `action`, which writes rows of so many tokens, within the disk's cap.

        On the thread. Raises DiskFull where nothing can be evicted for them.
        """
        if self._store is None:
            return action()
        with self._store.database.write():
            self._store.make_room(tokens * ROW_BYTES + SPARE_BYTES)
            return action()

    async def run(self, action: Callable[[], T]) -> T:
        """The result of `action` on the thread, after the turns that were handed over before.

        Raises what it raises, Busy where it cannot begin or has no turn at writing within `ASKED_S`
        (it is not done then), and NotReady at the end.
        """
        self._check_open()
        deadline = time.monotonic() + ASKED_S
        future = self._pool.submit(self._patiently, action, deadline)
        waited = asyncio.wrap_future(future)
        await asyncio.wait({waited}, timeout=ASKED_S)
        if not waited.done() and future.cancel():
            raise _busy()
        return await waited

    def _patiently(self, action: Callable[[], T], deadline: float) -> T:
        try:
            with self._sessions.patience(max(0.0, deadline - time.monotonic())):
                return action()
        except Locked as error:
            raise _busy() from error

    async def read(self, action: Callable[[], T]) -> T:
        """The result of `action`, which only reads and so need not wait for who writes.

        The turns that were handed over before are waited for, but not for long. Raises what it
        raises, and NotReady at the end.
        """
        self._check_open()
        booked = asyncio.wrap_future(self._pool.submit(_nothing))
        await asyncio.wait({booked}, timeout=BOOKED_S)
        booked.cancel()
        return await asyncio.to_thread(action)

    def _check_open(self) -> None:
        if self._closed:
            raise NotReady("The server is stopping.", retry_after=5.0)

    def close(self, seconds: float = CLOSE_S) -> int:
        """Book what was handed over, for at most so long, and end; how many turns were not."""
        self._closed = True
        for timer in (self._timer, self._again):
            if timer is not None:
                timer.cancel()
        self._pool.shutdown(wait=False)
        deadline = time.monotonic() + seconds
        with self._counted:
            while self._open and (left := deadline - time.monotonic()) > 0:
                self._counted.wait(left)
            return self._open + len(self._late)


def _nothing() -> None:
    """What those who read wait for."""


def _busy() -> Busy:
    return Busy("Another process is writing the table of sessions: try again.", retry_after=5.0)
