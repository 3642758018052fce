"""The session writer: writes finished requests as turns to the table of sessions, in order.

A single thread does all the writing; docstrings call it the writer's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mlxcache.errors import Busy, DiskFull, NotFound, NotReady, StoreError
from mlxcache.lru import LRU
from mlxcache.sessions.late_turns import LateTurn, LateTurns
from mlxcache.store.database import Locked
from mlxcache.store.leaves import conversation_key_tokens, digest_of
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.session_rows import Gain
from mlxcache.store.sessions import Sessions, Turn
from mlxcache.store.snapshot_format import Spec
from mlxcache.store.store import Store
from mlxcache.types import Job, Tokens

if TYPE_CHECKING:
    from mlxcache.remote.session_records import SharedSessions

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

FILES_S = 3.0
"""Seconds between a turn and the look-up and pinning of its new files.

The files have usually been written by then.
"""

WRITE_WAIT_S = 5.0
"""Most seconds that a request waits for the table, because of earlier turns or another process."""

READ_WAIT_S = 1.0
"""Most seconds that a reader waits for earlier turns to be written."""

CLOSE_S = 1.0
"""Most seconds for writing turns when the server stops."""

RETRY_S = 3.0
"""Seconds before turns that could not be written are tried again."""

MAX_RESOLVED = 2000
"""Requests whose session is remembered: more than the requests that the engine lists."""

ROW_BYTES, SPARE_BYTES = 8, 64 << 10
"""Bytes to make room for on disk: for each token id of a turn, and for the rest of a change.

A token id is written twice: to the database's log and to its row.
"""


@dataclass(frozen=True, slots=True)
class Served:
    """The served model, to which sessions belong.

    `name`: id of the model. `path`: value of `--model`, for mlx-lm's tools. `spec`: dtype and shape
    per token of each KV tensor that a snapshot has. `vocab_size`: number of token ids. `whole`: the
    namespace that its snapshots have, which differs from `namespace` if this process has only a
    part of the model; None if it is `namespace`.
    """

    name: str
    path: str
    namespace: str
    spec: Spec
    vocab_size: int
    whole: str | None = None

    @property
    def snapshot_namespace(self) -> str:
        """The namespace that snapshots of the model have."""
        return self.namespace if self.whole is None else self.whole


class SessionWriter:
    """The thread that writes a model's sessions to the table of sessions, one action after another.

    `count`: number of sessions in the table after this process's last write. `shared`: exchanges
    ids and names of sessions with other servers; None without a remote. `label`: that of the model,
    for the log. `close` ends the thread.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Served,
        store: Store | None,
        shared: SharedSessions | None = None,
        *,
        label: str = "unnamed",
    ):
        self.count = 0
        self._label = label
        self._shared = shared
        self._sessions = sessions
        self._model = model
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-sessions")
        self._files_timer: threading.Timer | None = None
        self._continued: set[str] = set()
        self._retry_timer: threading.Timer | None = None
        self._late = LateTurns(sessions)
        self._resolved: LRU[str, str] = LRU(MAX_RESOLVED)
        self._closed = False
        self._failing = False
        self._open = 0
        self._counted = threading.Condition()
        self._submit(self._pin_all)

    def add_turn(
        self,
        job: Job,
        ids: Tokens,
        at: float,
        reply: ReplyRow | None = None,
        gain: Gain | None = None,
    ) -> None:
        """Write a finished request as a turn of its session. Any thread; returns at once.

        `ids`: token ids of the prompt and the reply, shape (n,). `at`: when the request finished,
        in seconds since 1970. `reply`: the reply, to be stored for replay, or None. `gain`: the
        request's numbers of tokens and seconds, to be added to those of the session, or None. If
        the table cannot be written, the turn is written later, as long as the server runs.
        """
        prompt = job.prompt
        marks, length = prompt.marks, len(prompt.ids)
        turn = Turn(
            namespace=self._model.namespace,
            model=self._model.name,
            ids=ids,
            prompt_tokens=length,
            key_tokens=conversation_key_tokens(marks, length),
            head=marks[0] if len(marks) > 1 else 0,
            at=at,
            label=job.session,
            client=job.client,
            title=job.title,
            reply=reply,
            owner=job.owner,
            gain=gain,
            known=getattr(prompt.source, "replies", ()),
            response=job.response,
        )
        self._submit(lambda: self._write_with_late((job.id, turn)))

    def session_of(self, request: str) -> str | None:
        """Return the id of the session to which a request belongs, or None if it is not known.

        It is known once the request's turn is in `table`, and only for the newest `MAX_RESOLVED`
        requests. `request`: id of the request. Any thread; does not block.
        """
        return self._resolved.peek(request)

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
                log.warning(
                    "model %s: turns not written to the table of sessions, retrying every %g s: %s",
                    *(self._label, RETRY_S, error),
                )
            self._failing = True
        except Exception:
            log.exception("model %s: writing to the table of sessions failed", self._label)
        finally:
            with self._counted:
                self._open -= 1
                self._counted.notify_all()

    def _write_with_late(self, *turns: tuple[str, Turn]) -> None:
        """Write, in order, the turns that could not be written before, then `turns`.

        Each turn comes with the id of its request. Raises StoreError.
        """
        for request, turn in turns:
            self._late.add(request, turn)
        try:
            self._late.write(self._write)
        except StoreError:
            if self._retry_timer is None:
                self._retry_timer = self._later(RETRY_S, self._retry)
            raise
        finally:
            for request, session in self._late.shown():
                self._resolved.put(request, session)
            self._refresh_count()

    def _write(self, late: LateTurn) -> None:
        """Write one turn to the table on disk. Raises StoreError."""
        turn, shared = late.turn, self._shared
        key = digest_of(turn.ids[: turn.key_tokens])
        origin = shared.find(turn.owner, key) if shared is not None else None
        record = partial(self._sessions.record_turn, turn, late.session, origin)
        id = self.with_room(len(turn.ids), record)
        self._resolved.put(late.request, id)
        self._note_written(id)
        if shared is not None:
            shared.share(self._sessions.get(id), key)

    def _retry(self) -> None:
        self._retry_timer = None
        self._write_with_late()

    def _later(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        """Submit `action` to the writer's thread after `seconds`; return the timer."""
        timer = threading.Timer(seconds, lambda: self._submit(action))
        timer.daemon = True
        timer.start()
        return timer

    def _note_written(self, id: str) -> None:
        if self._store is not None:
            self._continued.add(id)
            if self._files_timer is None:
                self._files_timer = self._later(FILES_S, partial(self._note_files, self._store))

    def _note_files(self, store: Store) -> None:
        """Look up the files of the sessions with new turns, and pin those of pinned sessions."""
        self._files_timer = None
        continued, self._continued = self._continued, set()
        with suppress(StoreError):  # what is not looked up now is when it is listed
            newest = self._sessions.all(len(continued))
            store.look_ahead(self._sessions.listed(newest), self._sessions.ids_of)
        if not continued.isdisjoint(self._sessions.pinned()):
            self._pin_all()

    def _pin_all(self) -> None:
        self._refresh_count()
        if self._store is not None and self._store.obstacle is not None:
            return  # the start has said it
        for id in self._sessions.pinned():
            self.pin(id, pinned=True)

    def pin(self, id: str, *, pinned: bool) -> None:
        """Pin the files of a session, so that they are evicted last; unpin them unless `pinned`.

        `id`: id of the session, whose row is not changed. Does nothing without a disk tier. Call on
        the writer's thread. Raises StoreError, and NotFound if a session to be pinned is not in the
        table on disk.
        """
        if self._store is not None:
            self._store.pin_session(self._sessions, id, pinned=pinned)

    @property
    def table(self) -> Sessions:
        """The table of sessions to read, on any thread.

        While some turns could not be written to the table on disk, it is a copy of that table in
        memory that has these turns too.
        """
        return self._late.table

    def delete(self, id: str) -> None:
        """Remove the rows of session `id`, and its turns that could not be written yet.

        Its files stay, without its pin. Call on the writer's thread. Raises NotFound if there is no
        such session, and StoreError.
        """
        late = self._late.sessions()
        with self._freeing():
            try:
                self._sessions.get(id)
            except NotFound:
                if id not in late:
                    raise
            else:
                self._sessions.delete(id)
                self.pin(id, pinned=False)
        self._late.forget({id})

    def clear(self, *, pinned: bool) -> dict[str, int]:
        """Remove all sessions and KV files, of all models; pinned ones only if `pinned`.

        Returns a dictionary with `sessions`, the number of removed sessions, and `freed_bytes`, the
        bytes freed on disk. Call on the writer's thread. Raises StoreError.
        """
        late = self._late.sessions()
        with self._freeing():
            # the files first: on a full disk, the rows need their space
            freed = self._store.clear(pinned=pinned) if self._store is not None else 0
            on_disk = {session.id for session in self._sessions.all()}
            gone = self._sessions.clear(pinned=pinned)
            left = {session.id for session in self._sessions.all()}
        self._late.forget(late - left)
        return {"sessions": gone + len(late - on_disk), "freed_bytes": freed}

    def change(self, id: str, action: Callable[[], T]) -> T:
        """Run `action`, which changes the rows of session `id`; return its result.

        Call on the writer's thread. Raises what `action` raises, but DiskFull instead of NotFound
        if the session could not be written to disk yet.
        """
        try:
            return action()
        except NotFound as error:
            if id not in self._late.sessions():
                raise
            raise DiskFull(
                f"The session {id} is in RAM alone, because it could not be written to disk yet: "
                "it can be removed, and changed once the disk has space."
            ) from error

    def _freeing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._store is None else self._store.freeing()

    def with_room(self, tokens: int, action: Callable[[], T]) -> T:
        """Make room on disk for `tokens` token ids in the table, then run `action`.

        Both are one transaction. Without a disk tier, no room is made. Returns the result of
        `action`. Call on the writer's thread. Raises what `action` raises, and StoreError, which is
        DiskFull if no room can be made.
        """
        if self._store is None:
            return action()
        with self._store.database.write():
            self._store.make_room(tokens * ROW_BYTES + SPARE_BYTES)
            return action()

    async def run(self, action: Callable[[], T]) -> T:
        """Run `action` on the writer's thread after the turns added before; return its result.

        Raises what `action` raises. Raises Busy, with nothing done, if for `WRITE_WAIT_S` seconds
        `action` cannot begin or another process keeps the table of sessions locked. Raises NotReady
        once the writer is closed.
        """
        self._check_open()
        deadline = time.monotonic() + WRITE_WAIT_S
        future = self._pool.submit(self._run_within, action, deadline)
        waited = asyncio.wrap_future(future)
        await asyncio.wait({waited}, timeout=WRITE_WAIT_S)
        if not waited.done() and future.cancel():
            raise _busy()
        return await waited

    def _run_within(self, action: Callable[[], T], deadline: float) -> T:
        try:
            with self._sessions.patience(max(0.0, deadline - time.monotonic())):
                result = action()
        except Locked as error:
            raise _busy() from error
        self._late.refresh()
        self._refresh_count()
        return result

    def _refresh_count(self) -> None:
        try:
            self.count = self.table.count()
        except StoreError as error:  # what was asked for is done all the same
            log.debug("cannot refresh the number of sessions: %s", error)

    async def read(self, action: Callable[[], T]) -> T:
        """Run `action`, which only reads, in a worker thread; return its result.

        Waits at most `READ_WAIT_S` seconds for the turns added before. Unlike `run`, it does not
        wait for a locked table. Raises what `action` raises, and NotReady once the writer is
        closed.
        """
        await self.written()
        return await asyncio.to_thread(action)

    async def written(self) -> None:
        """Wait until the turns added before are written, or `READ_WAIT_S` seconds have passed.

        Raises NotReady if the writer is closed.
        """
        self._check_open()
        written = asyncio.wrap_future(self._pool.submit(_nothing))
        await asyncio.wait({written}, timeout=READ_WAIT_S)
        written.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise NotReady("The server is stopping.", retry_after=5.0)

    def close(self, seconds: float = CLOSE_S) -> int:
        """Write the turns added so far, for at most `seconds`, and end the thread.

        Returns the number of turns and other actions that were not written or done in that time; 0
        if all were. Blocks.
        """
        self._closed = True
        for timer in (self._files_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._pool.shutdown(wait=False)
        deadline = time.monotonic() + seconds
        with self._counted:
            while self._open and (left := deadline - time.monotonic()) > 0:
                self._counted.wait(left)
            return self._open + len(self._late)


def _nothing() -> None:
    """Do nothing: once the writer's thread has run this action, all earlier ones have run too."""


def _busy() -> Busy:
    return Busy("Another process is writing the table of sessions: try again.", retry_after=5.0)
