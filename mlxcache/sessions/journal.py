"""The session writer: writes finished requests as turns to the table of sessions, on one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mlxcache.common_prefix import common_length
from mlxcache.errors import Busy, DiskFull, NotFound, NotReady, StoreError
from mlxcache.lru import LRU
from mlxcache.store.database import Locked
from mlxcache.store.leaves import conversation_key_tokens, digest_of
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.session_rows import Gain
from mlxcache.store.sessions import Sessions, Turn
from mlxcache.store.snapshot_format import Spec
from mlxcache.store.store import Store
from mlxcache.types import Job, Tokens

if TYPE_CHECKING:
    from mlxcache.remote.records import SharedSessions

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

FILES_S = 3.0
"""Seconds from a turn until its new files, usually written by then, are looked up and pinned."""

WRITE_WAIT_S = 5.0

READ_WAIT_S = 1.0
"""Most seconds that a reader waits for earlier turns to be written."""

CLOSE_S = 1.0

RETRY_S = 3.0

MAX_RESOLVED = 2000
"""Requests whose session is remembered: more than the requests that the engine lists."""

MAX_LATE = 64
"""Turns kept for a retry. Their token ids stay in RAM meanwhile."""

ROW_BYTES, SPARE_BYTES = 8, 64 << 10
"""Bytes of room on disk for each token id (in the log and in its row), and for the rest."""


@dataclass(frozen=True, slots=True)
class Served:
    """The served model, to which sessions belong.

    `path`: value of `--model`. `spec`: dtype and shape per token of each KV tensor in a snapshot.
    `whole`: the namespace that its snapshots have, if this process has only a part of the model.
    """

    name: str
    path: str
    namespace: str
    spec: Spec
    vocab_size: int
    whole: str | None = None

    @property
    def snapshot_namespace(self) -> str:
        return self.namespace if self.whole is None else self.whole


class SessionWriter:
    """The thread that writes a model's sessions to the table of sessions, one action after another.

    `count`: number of sessions in the table after the last write. `shared`: exchanges ids and names
    of sessions with other servers; None without a remote. `pin`, `delete` and `clear` are for
    actions of `run`, on the writer's thread.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Served,
        store: Store | None,
        shared: SharedSessions | None = None,
    ):
        self.count = 0
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
        self._open: set[Future[None]] = set()
        self._submit(self._pin_all)

    def add_turn(
        self,
        job: Job,
        ids: Tokens,
        at: float,
        reply: ReplyRow | None = None,
        gain: Gain | None = None,
    ) -> None:
        """Write a finished request as a turn; later, if the table cannot be written. Any thread.

        `ids`: tokens of its prompt and reply as far as they are cached. `reply`: for replay.
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
            known=prompt.replies,
            response=job.response,
        )
        self._submit(lambda: self._write_with_late((job.id, turn)))

    def session_of(self, request: str) -> str | None:
        return self._resolved.peek(request)

    def _submit(self, action: Callable[[], None]) -> None:
        if not self._closed:
            future = self._pool.submit(self._guarded, action)
            self._open.add(future)
            future.add_done_callback(self._open.discard)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failing = False
        except StoreError as error:
            if not self._failing:
                log.warning(
                    "model %s: turns not written to the table of sessions, retrying every %g s: %s",
                    *(self._model.name, RETRY_S, error),
                )
            self._failing = True
        except Exception:
            log.exception("model %s: writing to the table of sessions failed", self._model.name)

    def _write_with_late(self, *turns: tuple[str, Turn]) -> None:
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
        turn, shared = late.turn, self._shared
        key = digest_of(turn.ids[: turn.key_tokens])
        origin = shared.find(turn.owner, key) if shared is not None else None
        record = partial(self._sessions.record_turn, turn, late.session, origin)
        id = self._with_room(len(turn.ids), record)
        self._resolved.put(late.request, id)
        if self._store is not None:
            self._continued.add(id)
            if self._files_timer is None:
                self._files_timer = self._later(FILES_S, partial(self._note_files, self._store))
        if shared is not None:
            shared.share(self._sessions.get(id), key)

    def _retry(self) -> None:
        self._retry_timer = None
        self._write_with_late()

    def _later(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(seconds, lambda: self._submit(action))
        timer.daemon = True
        timer.start()
        return timer

    def _note_files(self, store: Store) -> None:
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
        if self._store is not None:
            self._store.pin_session(self._sessions, id, pinned=pinned)

    @property
    def table(self) -> Sessions:
        return self._late.table

    def delete(self, id: str) -> None:
        """Remove the rows of session `id`, and its turns that could not be written yet."""
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
        late = self._late.sessions()
        with self._freeing():
            # the files first: on a full disk, the rows need their space
            freed = self._store.clear(pinned=pinned) if self._store is not None else 0
            on_disk = {session.id for session in self._sessions.all()}
            gone = self._sessions.clear(pinned=pinned)
            left = {session.id for session in self._sessions.all()}
        self._late.forget(late - left)
        return {"sessions": gone + len(late - on_disk), "freed_bytes": freed}

    def _freeing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._store is None else self._store.freeing()

    def _with_room(self, tokens: int, action: Callable[[], T]) -> T:
        if self._store is None:
            return action()
        with self._store.database.write():
            self._store.make_room(tokens * ROW_BYTES + SPARE_BYTES)
            return action()

    async def run(self, action: Callable[[], T], *, tokens: int | None = None) -> T:
        """Run `action` on the writer's thread after the turns added before; return its result.

        `tokens`: token ids for which to make room on disk, in the same transaction. Raises Busy,
        with nothing done, if for `WRITE_WAIT_S` seconds `action` cannot begin or another process
        keeps the table locked, and NotReady once the writer is closed.
        """
        self._check_open()
        deadline = time.monotonic() + WRITE_WAIT_S
        whole = action if tokens is None else partial(self._with_room, tokens, action)
        future = self._pool.submit(self._run_within, whole, deadline)
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

    async def change(self, id: str, action: Callable[[], T], *, tokens: int | None = None) -> T:
        """Do as `run`; NotFound of a session `id` that is in RAM alone becomes DiskFull."""

        def change() -> T:
            try:
                return action()
            except NotFound as error:
                if id not in self._late.sessions():
                    raise
                raise DiskFull(
                    f"The session {id} is in RAM alone, because it could not be written to disk "
                    "yet: it can be removed, and changed once the disk has space."
                ) from error

        return await self.run(change, tokens=tokens)

    async def read(self, action: Callable[[], T]) -> T:
        """Run `action`, which only reads, in a worker thread after `written`; return its result."""
        await self.written()
        return await asyncio.to_thread(action)

    async def written(self) -> None:
        self._check_open()
        written = asyncio.wrap_future(self._pool.submit(int))  # all before have run then
        await asyncio.wait({written}, timeout=READ_WAIT_S)
        written.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise NotReady("The server is stopping.", retry_after=5.0)

    def close(self, seconds: float = CLOSE_S) -> int:
        """Write the turns added so far, for at most `seconds`; return how many were not written."""
        self._closed = True
        for timer in (self._files_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._pool.shutdown(wait=False)
        return len(wait(tuple(self._open), seconds).not_done) + len(self._late)


def _busy() -> Busy:
    return Busy("Another process is writing the table of sessions: try again.", retry_after=5.0)


# -- turns that could not be written yet --------------------------------------------------------


@dataclass(slots=True, eq=False)
class LateTurn:
    """A turn and its request; `session` is set once the turn is in the copy `LateTurns.table`."""

    request: str
    turn: Turn
    session: str | None = None

    def show_in(self, copy: Sessions) -> None:
        self.session = copy.record_turn(self.turn, self.session)


class LateTurns:
    """Turns that are not in the table of sessions on disk yet, in order; `write` writes them.

    Used on one thread, except `table`: while some turns could not be written, that is a copy of the
    table in memory that has them too. The id that a new session gets there is also used on disk.
    """

    def __init__(self, sessions: Sessions):
        self._sessions = sessions
        self._turns: list[LateTurn] = []
        self._copy: Sessions | None = None
        self._before: Sessions | None = None

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def table(self) -> Sessions:
        return self._copy or self._sessions

    def add(self, request: str, turn: Turn) -> None:
        """Append a turn. If `MAX_LATE` wait, the oldest that a later one continues is dropped."""
        if len(self._turns) == MAX_LATE:
            del self._turns[self._superseded()]
        self._turns.append(LateTurn(request, turn))

    def _superseded(self) -> int:
        for index, one in enumerate(self._turns):
            ids = one.turn.ids
            for later in self._turns[index + 1 :]:
                same = later.session == one.session and len(later.turn.ids) >= len(ids)
                if same and common_length(later.turn.ids, ids) == len(ids):
                    return index
        return 0

    def write(self, record: Callable[[LateTurn], None]) -> None:
        """Call `record` with each turn in order; on StoreError, show those left in `table`."""
        try:
            while self._turns:
                record(self._turns[0])
                del self._turns[0]
        except StoreError:
            self._show()
            raise
        self._set_copy(None)

    def shown(self) -> list[tuple[str, str]]:
        return [(one.request, one.session) for one in self._turns if one.session is not None]

    def sessions(self) -> set[str]:
        return {one.session for one in self._turns if one.session is not None}

    def forget(self, sessions: set[str]) -> None:
        self._turns = [one for one in self._turns if one.session not in sessions]

    def refresh(self) -> None:
        """Make `table`, if it is a copy, a new one, after the table on disk was changed."""
        if self._copy is not None:
            self._set_copy(None)
            self._show()

    def _show(self) -> None:
        try:
            copy = self._copy or self._sessions.copy()
            try:
                for one in self._turns:
                    if one.session is None or copy is not self._copy:
                        one.show_in(copy)
            except BaseException:
                if copy is not self._copy:
                    copy.close()
                raise
            if copy is not self._copy:
                self._set_copy(copy)
        except StoreError as error:
            log.debug("session lists lack turns that are not on disk yet: %s", error)

    def _set_copy(self, copy: Sessions | None) -> None:
        """Replace the copy; threads may still read it, so it is closed only by the next call."""
        if copy is self._copy is None:
            before, self._before = self._before, None
        else:
            before, self._before = self._before, self._copy
        self._copy = copy
        if before is not None:
            before.close()
