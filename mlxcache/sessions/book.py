"""The session book: lists, changes and measures sessions, and keeps the stored responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlxcache.cache.kv_cache import KVCache
from mlxcache.common_prefix import common_length
from mlxcache.errors import StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.owner import OWNER
from mlxcache.sessions.files import PromptCacheReader, SessionFiles, Submit
from mlxcache.sessions.journal import CLOSE_S, ROW_BYTES, Served, SessionWriter
from mlxcache.sessions.tree_view import TreePart
from mlxcache.store.found import Problem
from mlxcache.store.leaves import Leaf, LeafRow
from mlxcache.store.listing import Held, Listed
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.response_rows import StoredResponse
from mlxcache.store.session_rows import Gain
from mlxcache.store.sessions import LeafChanged, Session, Sessions
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.store.store import Store
from mlxcache.types import Job, Tokens

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

SETTLE_S = 10.0

MEASURED_AT_ONCE = 100
"""Sessions whose token ids may be in memory at once, to measure what RAM holds of them."""

Learn = Callable[[Mapping[str | None, Sequence[ReplyRow]]], None]
"""Callable that gets new replies by owner, oldest first, on a worker thread."""

WAIT_S = 0.05
"""Most seconds that a request waits for reading the table. A read usually takes under 1 ms."""


async def until_unchanged(read: Callable[[], Awaitable[T]]) -> T:
    while True:
        with suppress(LeafChanged):
            return await read()


class SessionBook:
    """The sessions of one model and the stored responses, with the operations on them.

    Use on the event loop, unless a method says otherwise. `before_removal` is called on the MLX
    thread before KV is removed. Methods may raise StoreError; changes also Busy if the table cannot
    be written for 5 seconds; all NotReady once the book is closed.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Served,
        kv: KVCache,
        thread: MlxThread,
        *,
        submit: Submit,
        prompt_caches: PromptCacheReader,
        before_removal: Callable[[], None],
        incoming: Path,
        decode: Callable[[Sequence[int]], str],
        learn: Learn,
    ):
        self.decode = decode
        self.model = model
        self.namespace = model.namespace
        self.store = kv.disk.store if kv.disk is not None else None
        self._sessions = sessions
        self._kv = kv
        self._thread = thread
        self._before_removal = before_removal
        remote = kv.disk.remote if kv.disk is not None else None
        shared = remote.sessions if remote is not None else None
        self._writer = SessionWriter(sessions, model, self.store, shared, label=kv.label)
        self._checking = asyncio.Lock()
        self._closed = False
        self._replies: ReplyFeed | None = None
        if self.store is not None:
            self._replies = ReplyFeed(sessions, self.store, learn, label=kv.label)
        self.files = SessionFiles(
            self, kv, thread, submit=submit, prompt_caches=prompt_caches, incoming=incoming
        )

    def open(self) -> None:
        """Load the replies on disk, for replay. Blocks. Call before the first request."""
        if self._replies is not None:
            self._replies.start()

    async def refresh_replies(self) -> None:
        """Load the replies that other servers have written since; see `ReplyFeed.refresh`."""
        if self._replies is not None and not self._closed:
            await self._replies.refresh()

    @property
    def count(self) -> int:
        return self._writer.count

    def add_turn(self, job: Job, ids: Tokens, reply: ReplyRow | None, gain: Gain) -> None:
        """Write a finished request as a turn of its session. Any thread; returns at once.

        `ids`: tokens of its prompt and reply as far as they are cached. `reply`: for replay, or
        None.
        """
        self._writer.add_turn(job, ids, time.time(), reply, gain)

    def session_of(self, request: str) -> str | None:
        return self._writer.session_of(request)

    async def written(self) -> None:
        await self._writer.written()

    def shared_with_sessions(self, label: str, ids: Tokens) -> list[tuple[bool, int]]:
        """Return (is this model's, shared leading tokens) of the leaves under a label.

        Any thread; blocks.
        """
        table = self._writer.table
        return [
            (session.namespace == self.namespace, common_length(leaf.ids, ids))
            for session in table.all(label=label)
            for leaf in table.leaves(session.id)
        ]

    # -- asking ------------------------------------------------------------------------------

    async def list(
        self, limit: int | None = None, *, omit: Collection[str] = (), own: bool = False
    ) -> Sequence[Listed]:
        """Return at most `limit` sessions of the current API key, most recently used first.

        Those of other models too, except of the namespaces `omit`, unless `own`.
        """

        def find(table: Sessions) -> Sequence[Session]:
            return [
                one
                for one in table.all(limit, OWNER.get())
                if one.namespace == self.namespace or not (own or one.namespace in omit)
            ]

        return await self._measured(find)

    async def get(self, id: str) -> Listed:
        return (await self._measured(lambda table: [table.get(id, OWNER.get())]))[0]

    async def row(self, id: str) -> Session:
        return await self._writer.read(lambda: self._writer.table.get(id, OWNER.get()))

    async def related(self, session: Session) -> Sequence[Session]:
        """Return the sessions of the same conversation (label) that belong to other models."""
        return await self._writer.read(lambda: self._writer.table.related(session))

    async def with_ram(self, listed: Sequence[Listed]) -> Sequence[Listed]:
        """Add the KV that this model's RAM holds to each one's `ram`; may raise LeafChanged."""
        found: list[Listed] = []
        for at in range(0, len(listed), MEASURED_AT_ONCE):
            page = listed[at : at + MEASURED_AT_ONCE]
            own = {x.session.id: x.leaves for x in page if x.session.namespace == self.namespace}
            held = await self._in_ram(own)
            found += [
                replace(one, ram=one.ram.joined(held.get(one.session.id, Held.nothing(one.leaves))))
                for one in page
            ]
        return found

    async def _in_ram(self, left: dict[str, tuple[LeafRow, ...]]) -> dict[str, Held]:
        def read_ids(leaves: Sequence[LeafRow]) -> dict[LeafRow, Tokens]:
            return {leaf: self._writer.table.ids_of(leaf) for leaf in leaves}

        held: dict[str, Held] = {}
        ids: dict[LeafRow, Tokens] = {}
        while left := {id: leaves for id, leaves in left.items() if id not in held}:
            found = await self._thread.ask(partial(self._kv.measure, left.values(), ids))
            asked = dict(zip(left, found, strict=False))
            held |= {id: one for id, one in asked.items() if one is not None}
            if unknown := [leaf for id in asked.keys() - held.keys() for leaf in left[id]]:
                ids |= await self._writer.read(partial(read_ids, unknown))
        return held

    async def tree_parts(self, listed: Sequence[Listed]) -> Sequence[TreePart]:
        """Return those of `listed` that belong to this model, as the one part of a tree view."""
        own = [one for one in listed if one.session.namespace == self.namespace]
        table = self._writer.table
        leaves = [leaf for one in own for leaf in one.leaves]
        ids = await self._writer.read(
            lambda: [table.ids(leaf.id)[: leaf.tokens] for leaf in leaves]
        )
        return [TreePart(own, dict(zip(leaves, ids, strict=True)), self.decode)]

    async def rows(self, limit: int | None = None) -> Sequence[Session]:
        """Return at most `limit` sessions without their sizes; waits for no MLX thread."""
        return await self._writer.read(lambda: self._writer.table.all(limit, OWNER.get()))

    async def _measured(self, find: Callable[[Sessions], Sequence[Session]]) -> Sequence[Listed]:
        def from_table() -> Sequence[Listed]:
            table = self._writer.table
            listed = table.listed(find(table))
            try:
                return self.store.on_disk(listed, table.ids_of) if self.store else listed
            except LeafChanged:
                raise
            except StoreError:  # the folder was removed, which is logged elsewhere
                return listed

        async def read() -> Sequence[Listed]:
            return await self.with_ram(await self._writer.read(from_table))

        return await until_unchanged(read)

    # -- changing ----------------------------------------------------------------------------

    async def patch(
        self, id: str, *, name: str | None = None, pinned: bool | None = None
    ) -> Listed:
        """Rename, pin or unpin a session; None changes nothing, a name of "" removes it."""
        change = partial(self._sessions.update, id, name=name, pinned=pinned, owner=OWNER.get())
        await self._writer.change(id, change)
        if pinned is not None:
            await self._writer.run(lambda: self._writer.pin(id, pinned=pinned))
        return await self.get(id)

    async def fork(self, id: str, *, name: str | None = None, tokens: int | None = None) -> Listed:
        """Make a new session from the first `tokens` tokens of the main leaf, or all."""
        info = await self.info(id)
        size = len(info.leaves[0].ids) if info.leaves else 0
        made = await self._writer.change(
            id, lambda: self._sessions.fork(id, time.time(), name, tokens), tokens=size
        )
        return await self.get(made)

    async def delete(self, id: str) -> Sequence[Leaf]:
        """Remove a session, and its KV except what others need; return its leaves."""
        session = await self.row(id)
        leaves = await self._writer.read(lambda: self._writer.table.leaves(id))
        await self.settled()
        await self._writer.run(lambda: self._writer.delete(id))
        for leaf in leaves:
            await self.forget(session.namespace, leaf)
        return leaves

    async def forget(self, namespace: str, leaf: Leaf) -> None:
        """Remove the KV of a removed `leaf` that no other leaf needs; in RAM only this model's."""
        ids = leaf.ids
        others = await self._writer.read(lambda: self._writer.table.sharing(namespace, ids))
        needed = max(others.values(), default=0)
        if namespace == self.namespace:
            await self._remove(lambda: self._kv.forget(ids, needed))
        if self.store is not None:
            seen = self.store.for_namespace(namespace)
            await self._writer.run(lambda: seen.remove_unshared(self._writer.table, ids))

    async def clear(self, *, pinned: bool = False) -> dict[str, int]:
        """Clear both tiers and remove all sessions of the current API key.

        KV in use by requests stays until it is evicted.
        """
        if OWNER.get() is None:
            await self.settled()
            removed = await self._writer.run(lambda: self._writer.clear(pinned=pinned))
            await self._remove(self._kv.clear)
            return removed
        before = self.disk_bytes()
        gone = [session for session in await self.rows() if pinned or not session.pinned]
        for session in gone:
            await self.delete(session.id)
        freed = max(0, before - self.disk_bytes())
        return {"sessions": len(gone), "freed_bytes": freed}

    async def _remove(self, action: Callable[[], object]) -> None:
        def remove() -> None:
            self._before_removal()
            action()

        await self._thread.ask(remove)

    def disk_bytes(self) -> int:
        return self.store.stats().used_bytes if self.store else 0

    async def prune(self, limit: int | None = None) -> int:
        """Remove damaged files, evict files down to `limit` bytes, and return the bytes freed."""
        if (store := self.store) is None:
            return 0
        async with self._checking:
            return await asyncio.to_thread(store.prune, limit)

    async def check(self) -> Sequence[Problem]:
        if (store := self.store) is None:
            return ()
        async with self._checking:
            return await asyncio.to_thread(store.check)

    async def info(self, id: str) -> SessionInfo:
        return await self._writer.read(lambda: self._writer.table.info(id, OWNER.get()))

    async def adopt(self, info: SessionInfo, name: str | None) -> Listed:
        enter = partial(self._sessions.adopt, info, time.time(), name, OWNER.get())
        size = sum(len(leaf.ids) for leaf in info.leaves)
        return await self.get(await self._writer.run(enter, tokens=size))

    # -- stored responses --------------------------------------------------------------------

    async def save_response(self, response: StoredResponse) -> None:
        """Store a response; it is durable once this returns."""
        size = len(response.body) + len(response.items)
        save = partial(self._sessions.save_response, response)
        await self._writer.run(save, tokens=size // ROW_BYTES)

    async def response(self, id: str) -> StoredResponse:
        owner = OWNER.get()
        return await self._writer.read(lambda: self._writer.table.response(id, owner))

    async def response_chain(self, id: str) -> Sequence[StoredResponse]:
        """Return a stored response and those that it continues, oldest first.

        Raises NotFound if one is missing or another key's, or if they are too many or too large.
        """
        owner = OWNER.get()
        return await self._writer.read(lambda: self._writer.table.response_chain(id, owner))

    async def delete_response(self, id: str) -> None:
        owner = OWNER.get()
        await self._writer.run(lambda: self._sessions.delete_response(id, owner))

    # -- state ---------------------------------------------------------------------------------

    async def settled(self) -> bool:
        """Wait until no KV is waiting to be written to disk; False after `SETTLE_S` seconds."""
        deadline = time.monotonic() + SETTLE_S
        while await self._thread.ask(lambda: self._kv.writing):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        """Write the turns added before, and stop. Any thread; blocks for about a second at most."""
        self._closed = True
        if self._replies is not None:
            self._replies.close()
        if left := self._writer.close():
            log.warning(
                "model %s: shutdown: %d turns were not written to the table of sessions within "
                "%g s",
                *(self._kv.label, left, CLOSE_S),
            )


class ReplyFeed:
    """Passes stored replies, of other servers or of before a restart, to `learn`, for replay.

    Rendering uses only replies in memory: a thread of this object reads the table, and a prompt
    waits for it only briefly.
    """

    def __init__(self, sessions: Sessions, store: Store, learn: Learn, *, label: str = "unnamed"):
        self._label = label
        self._sessions, self._store, self._learn = sessions, store, learn
        self._last = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-replies")
        self._reading: asyncio.Future[None] | None = None

    def start(self) -> None:
        self._read()

    async def refresh(self) -> None:
        """Pass replies stored since the last read, waiting at most `WAIT_S` seconds."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._pool.submit(self._read))
        await asyncio.wait({self._reading}, timeout=WAIT_S)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> None:
        if not self._store.database.is_there():
            return  # a read would create a removed folder again
        try:
            rows, self._last = self._sessions.replies(self._store.namespace, self._last)
        except StoreError as error:  # reported where the table is written
            log.debug(
                "model %s: cannot read the replies on disk that are kept for replay: %s",
                *(self._label, error),
            )
            return
        except Exception:  # a prompt is rendered without them
            log.exception(
                "model %s: reading the replies on disk failed, they are not replayed", self._label
            )
            return
        if rows:
            self._learn(rows)
