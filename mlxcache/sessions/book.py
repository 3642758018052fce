"""Sessions as the engine keeps them: booked on a thread of their own, measured in both tiers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mlxcache.cache.kv_cache import forget_all, forget_session, in_ram
from mlxcache.common_prefix import common_length
from mlxcache.errors import MlxcacheError, StoreError
from mlxcache.mlx_thread import Calls
from mlxcache.owner import OWNER
from mlxcache.sessions.files import Portable
from mlxcache.sessions.journal import Booking, Served
from mlxcache.sessions.mlx_lm_files import Submit
from mlxcache.sessions.reply_feed import Learn, ReplyFeed
from mlxcache.store.found import Problem
from mlxcache.store.leaves import Leaf
from mlxcache.store.listing import Held, Listed
from mlxcache.store.session_rows import Gain, SessionFigures
from mlxcache.store.sessions import Session, Sessions
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.store.store import Store
from mlxcache.types import WARMING, Tokens

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core
    from mlxcache.engine.task import Task

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

SETTLE_S = 10.0
"""Seconds that a session which is still being written to disk is waited for."""


class SessionBook:
    """The sessions of one engine. Call everything but `ended` from the event loop.

    `store` None: nothing is on disk. `portable`: sessions as files. `incoming`: where those wait
    that are being received. `decode`: a text for token ids. `learn`: see `ReplyFeed`.
    What is asked for is answered after the turns booked before, where that does not take long.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Served,
        core: Core,
        submit: Submit,
        *,
        incoming: Path,
        store: Store | None = None,
        decode: Callable[[Sequence[int]], str],
        learn: Learn,
    ):
        self.decode = decode
        self.namespace = model.namespace
        self.store = store
        self._model = model
        self._sessions = sessions
        self._core = core
        self._calls = Calls(core.scheduler.inbox)
        self._booking = Booking(sessions, model, store)
        self._checking = asyncio.Lock()
        self._replies = ReplyFeed(sessions, store, learn) if store is not None else None
        self.portable = Portable(self, model, submit, incoming)

    async def open(self) -> None:
        """Pass on the replies on disk, now and as others write them. Before the first request."""
        if self._replies is not None:
            await asyncio.to_thread(self._replies.start)

    @property
    def count(self) -> int:
        """How many sessions there are."""
        return self._booking.count

    def ended(self, task: Task, gain: Gain) -> None:
        """Book a request that was admitted and is over. On the MLX thread; returns at once."""
        if task.record.status not in ("done", "cancelled") or task.job.api == WARMING:
            return
        ids = task.tokens()
        if task.out and self._core.memory.tree.match(ids, touch=False).length < len(ids):
            ids = ids[:-1]  # the last token was drawn and not fed: nothing is cached for it
        reply = task.generated()
        self._booking.turn(task.job, ids, time.time(), reply.row if reply else None, gain)

    def booked(self, label: str, ids: Tokens) -> list[tuple[bool, int]]:
        """The tokens that `ids` shares with each leaf of the label's sessions, and whether that was
        computed by the model that is served. In any thread; blocks. Raises StoreError."""
        return [
            (session.namespace == self.namespace, common_length(leaf.ids, ids))
            for session in self._sessions.all()
            if session.label == label
            for leaf in self._sessions.leaves(session.id)
        ]

    async def call(self, action: Callable[[Core], T]) -> T:
        """The result of `action`, run on the MLX thread. Raises what it raises, and NotReady."""
        return await self._calls.ask(lambda: action(self._core))

    def fail(self, error: MlxcacheError) -> None:
        """The MLX thread will answer nobody any more."""
        self._calls.fail(error)

    # -- asking ------------------------------------------------------------------------------

    async def list(self, limit: int | None = None) -> Sequence[Listed]:
        """The sessions, those used last first, also those of other models in the same folder.

        Raises StoreError.
        """
        return await self._measured(lambda: self._sessions.all(limit, OWNER.get()))

    async def get(self, id: str) -> Listed:
        """One session. Raises NotFound and StoreError."""
        return (await self._measured(lambda: [self._sessions.get(id, OWNER.get())]))[0]

    async def rows(self, limit: int | None = None) -> Sequence[Session]:
        """As `list`, without what the tiers hold: asks neither the MLX thread nor the files."""
        return await self._booking.read(lambda: self._sessions.all(limit, OWNER.get()))

    async def _measured(self, find: Callable[[], Sequence[Session]]) -> Sequence[Listed]:
        """What `find` finds, with its leaves, and what each tier holds of them."""
        table = self._sessions

        def from_table() -> list[tuple[Session, Sequence[Leaf], SessionFigures, Held]]:
            return [
                (x, y := table.leaves(x.id), table.figures(x.id), self._on_disk(x, y))
                for x in find()
            ]

        def in_memory(core: Core) -> list[Held]:
            return [
                in_ram(core.memory, [leaf.ids for leaf in leaves])
                if session.namespace == self.namespace
                else Held.nothing(leaves)
                for session, leaves, *_ in rows
            ]

        rows = await self._booking.read(from_table)
        held = await self.call(in_memory)
        return [
            Listed(session, tuple(leaves), ram, disk, figures)
            for (session, leaves, figures, disk), ram in zip(rows, held, strict=True)
        ]

    def _on_disk(self, session: Session, leaves: Sequence[Leaf]) -> Held:
        if self.store is None:
            return Held.nothing(leaves)
        try:
            return self.store.for_namespace(session.namespace).measure_leaves(leaves)
        except StoreError:  # there is no such folder any more, which the log says once
            return Held.nothing(leaves)

    # -- changing ----------------------------------------------------------------------------

    async def patch(
        self, id: str, *, name: str | None = None, pinned: bool | None = None
    ) -> Listed:
        """Rename a session ("": no name), pin it or let it go. Raises NotFound and StoreError."""
        change = partial(self._sessions.update, id, name=name, pinned=pinned, owner=OWNER.get())
        await self._booking.run(change)
        if pinned is not None:
            await self._booking.run(lambda: self._booking.pin(id, pinned=pinned))
        return await self.get(id)

    async def fork(self, id: str, *, name: str | None = None, tokens: int | None = None) -> Listed:
        """A new session with the main leaf of `id`, or its first `tokens`.

        Raises NotFound, StoreError, and BadRequest where there are not so many tokens.
        """
        info, booking = await self.info(id), self._booking
        size = len(info.leaves[0].ids) if info.leaves else 0

        def make() -> str:
            return self._sessions.fork(id, time.time(), name, tokens)

        made = await booking.run(lambda: booking.with_room(size, make))
        self._booking.count += 1
        return await self.get(made)

    async def delete(self, id: str) -> None:
        """Remove a session, and what no other session needs of it from both tiers.

        Raises NotFound and StoreError.
        """
        session = await self._booking.read(lambda: self._sessions.get(id, OWNER.get()))
        leaves = await self._booking.read(lambda: self._sessions.leaves(id))
        await self.settled()
        await self._booking.run(lambda: self._sessions.delete(id))
        self._booking.count -= 1
        await self._booking.run(lambda: self._booking.pin(id, pinned=False))
        for leaf in leaves:
            await self._forget(session.namespace, leaf)

    async def _forget(self, namespace: str, leaf: Leaf) -> None:
        """Cut what only `leaf` needed."""
        ids = leaf.ids
        others = await self._booking.read(lambda: self._sessions.sharing(namespace, ids))
        needed = max(others.values(), default=0)
        if namespace == self.namespace:
            await self.call(lambda core: forget_session(core, ids, needed))
        if self.store is not None:
            seen = self.store.for_namespace(namespace)
            await self._booking.run(lambda: seen.remove_unshared(self._sessions, ids))

    async def clear(self, *, pinned: bool = False) -> dict[str, int]:
        """Empty both tiers and forget the sessions, pinned ones only if `pinned`.

        What requests are using stays until it is evicted. Returns `sessions` that went and
        `freed_bytes` of the disk. An owner clears no more than its own. Raises StoreError.
        """
        if OWNER.get() is not None:
            return await self._clear_own(pinned)
        await self.settled()
        sessions = await self._booking.run(lambda: self._sessions.clear(pinned=pinned))
        self._booking.count -= sessions
        freed = 0
        if (store := self.store) is not None:
            freed = await self._booking.run(lambda: store.clear(pinned=pinned))
        await self.call(forget_all)
        return {"sessions": sessions, "freed_bytes": freed}

    async def _clear_own(self, pinned: bool) -> dict[str, int]:
        before = self.store.stats().used_bytes if self.store else 0
        own = await self._booking.read(lambda: self._sessions.all(None, OWNER.get()))
        gone = [session for session in own if pinned or not session.pinned]
        for session in gone:
            await self.delete(session.id)
        after = self.store.stats().used_bytes if self.store else 0
        return {"sessions": len(gone), "freed_bytes": max(0, before - after)}

    async def prune(self, limit: int | None = None) -> int:
        """Remove damaged files, and what is beyond `limit` bytes on disk; the bytes freed.

        Reads every file. Raises StoreError.
        """
        if (store := self.store) is None:
            return 0
        async with self._checking:
            return await asyncio.to_thread(store.prune, limit)

    async def check(self) -> Sequence[Problem]:
        """What is wrong with the files on disk, each read as a whole; one such look at a time.

        Raises StoreError.
        """
        if (store := self.store) is None:
            return ()
        async with self._checking:
            return await asyncio.to_thread(store.check)

    async def info(self, id: str) -> SessionInfo:
        """A session as a snapshot carries it. Raises NotFound and StoreError."""
        return await self._booking.read(lambda: self._sessions.info(id, OWNER.get()))

    async def adopt(self, info: SessionInfo, name: str | None) -> Listed:
        """Enter a session that came in a file. Raises StoreError."""
        size, booking = sum(len(leaf.ids) for leaf in info.leaves), self._booking
        enter = partial(self._sessions.adopt, info, time.time(), name, OWNER.get())
        made = await booking.run(lambda: booking.with_room(size, enter))
        self._booking.count += 1
        return await self.get(made)

    async def settled(self) -> bool:
        """Wait until nothing is on its way to disk; False if that takes too long."""
        deadline = time.monotonic() + SETTLE_S
        while await self.call(lambda core: core.disk is not None and core.disk.busy):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        """Book what was handed over, for a bounded time, and end. From any thread; blocks."""
        if self._replies is not None:
            self._replies.close()
        if left := self._booking.close():
            log.warning("%d turns could not be entered into the table of sessions in time", left)
