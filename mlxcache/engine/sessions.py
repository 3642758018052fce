"""Sessions as the engine keeps them: booked on a thread of their own, measured in both tiers."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlxcache.engine.ram import forget, forget_all, in_ram, unlearn
from mlxcache.errors import DiskFull, StoreError, Unsupported
from mlxcache.store.database import translated
from mlxcache.store.leaves import Leaf, anchor_of
from mlxcache.store.listing import Listed, nothing, on_disk
from mlxcache.store.prefixes import forget_prefix, pin, viewing
from mlxcache.store.sessions import Session, Sessions, Turn
from mlxcache.store.snapshot import Export, SessionInfo, Spec, export, read_snapshot, restore
from mlxcache.store.store import FREE_FLOOR, Store
from mlxcache.types import Job, Tokens

if TYPE_CHECKING:
    from mlxcache.engine.core import Core

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

PIN_S = 3.0
"""Seconds after a turn of a pinned session at which its new files, written by then, are pinned."""

SETTLE_S = 10.0
"""Seconds that a session which is still being written to disk is waited for."""


class OnMlxThread(Protocol):
    """Runs an action on the MLX thread; `Engine.call`."""

    def __call__(self, action: Callable[[Core], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What sessions are of: a model's name and namespace, and what it caches per token."""

    name: str
    namespace: str
    spec: Spec
    vocab_size: int


class SessionBook:
    """The sessions of one engine. Call everything but `turn` from the event loop.

    `store` None: nothing is on disk. `incoming`: where snapshots wait that are being received.
    What is asked for is answered after the turns booked before.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Served,
        call: OnMlxThread,
        incoming: Path,
        store: Store | None = None,
    ):
        self.namespace = model.namespace
        self._model = model
        self.count = sessions.count()
        self.store = store
        self._incoming = incoming
        self._sessions = sessions
        self._call = call
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-sessions")
        self._timer: threading.Timer | None = None
        self._closed = False
        self._failing = False
        self._submit(self._pin_all)

    # -- booking -----------------------------------------------------------------------------

    def turn(self, job: Job, ids: Tokens, at: float) -> None:
        """Book a finished request, from any thread and at once. `ids`: its prompt and reply."""
        marks, prompt = job.prompt.marks, len(job.prompt.ids)
        turn = Turn(
            namespace=self.namespace,
            model=self._model.name,
            ids=ids,
            prompt_tokens=prompt,
            anchor=anchor_of(marks, prompt),
            head=marks[0] if len(marks) > 1 else 0,
            at=at,
            label=job.session,
            client=job.client,
            title=job.title,
        )
        self._submit(lambda: self._book(turn))

    def _submit(self, action: Callable[[], None]) -> None:
        if not self._closed:
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

    def _book(self, turn: Turn) -> None:
        id = self._sessions.turn(turn)
        self.count = self._sessions.count()
        if self.store is not None and self._sessions.get(id).pinned and self._timer is None:
            self._timer = threading.Timer(PIN_S, lambda: self._submit(self._pin_all))
            self._timer.daemon = True
            self._timer.start()

    def _pin_all(self) -> None:
        self._timer = None
        for id in self._sessions.pinned():
            self._pin(id, pinned=True)

    # -- asking ------------------------------------------------------------------------------

    async def list(self, limit: int | None = None) -> list[Listed]:
        """The sessions of this model, those used last first. Raises StoreError."""
        rows = await self._run(lambda: self._sessions.all(limit))
        return [await self._measured(row) for row in rows]

    async def get(self, id: str) -> Listed:
        """One session. Raises NotFound and StoreError."""
        return await self._measured(await self._run(lambda: self._sessions.get(id)))

    async def _measured(self, session: Session) -> Listed:
        leaves = await self._run(lambda: self._sessions.leaves(session.id))
        ram = disk = nothing(leaves)
        if session.namespace == self.namespace:
            ids = [leaf.ids for leaf in leaves]
            ram = await self._call(lambda core: in_ram(core.memory, ids))
        if self.store is not None:
            seen = viewing(self.store, session.namespace)
            disk = await self._run(lambda: on_disk(seen, leaves))
        return Listed(session, tuple(leaves), ram, disk)

    # -- changing ----------------------------------------------------------------------------

    async def patch(
        self, id: str, *, name: str | None = None, pinned: bool | None = None
    ) -> Listed:
        """Rename a session ("": no name), pin it or let it go. Raises NotFound and StoreError."""
        await self._run(lambda: self._sessions.update(id, name=name, pinned=pinned))
        if pinned is not None:
            await self._run(lambda: self._pin(id, pinned))
        return await self.get(id)

    def _pin(self, id: str, pinned: bool) -> None:
        if self.store is not None:
            pin(self.store, self._sessions, id, pinned=pinned)

    async def fork(self, id: str, *, name: str | None = None, tokens: int | None = None) -> Listed:
        """A new session with the main leaf of `id`, or its first `tokens`.

        Raises NotFound, StoreError, and BadRequest where there are not so many tokens.
        """
        made = await self._run(lambda: self._sessions.fork(id, time.time(), name, tokens))
        self.count += 1
        return await self.get(made)

    async def delete(self, id: str) -> None:
        """Remove a session, and what no other session needs of it from both tiers.

        Raises NotFound and StoreError.
        """
        session = await self._run(lambda: self._sessions.get(id))
        leaves = await self._run(lambda: self._sessions.leaves(id))
        await self.settled()
        await self._run(lambda: self._sessions.delete(id))
        self.count -= 1
        await self._run(lambda: self._pin(id, pinned=False))
        for leaf in leaves:
            await self._forget(session.namespace, leaf)

    async def _forget(self, namespace: str, leaf: Leaf) -> None:
        """Cut what only `leaf` needed."""
        ids = leaf.ids
        needed = await self._run(lambda: self._sessions.needed(namespace, ids))
        if needed >= len(ids):
            return
        if namespace == self.namespace:
            await self._call(lambda core: forget(core.memory, ids, needed))
            await self._call(lambda core: unlearn(core, ids))
        if self.store is not None:
            seen = viewing(self.store, namespace)
            await self._run(lambda: forget_prefix(seen, ids, needed))

    async def clear(self, *, pinned: bool = False) -> dict[str, int]:
        """Empty both tiers and forget the sessions, pinned ones only if `pinned`.

        What requests are using stays until it is evicted. Returns `sessions` that went and
        `freed_bytes` of the disk. Raises StoreError.
        """
        await self.settled()
        sessions = await self._run(lambda: self._sessions.clear(pinned=pinned))
        self.count -= sessions
        freed = 0
        if (store := self.store) is not None:
            freed = await self._run(lambda: store.clear(pinned=pinned))
        await self._call(forget_all)
        return {"sessions": sessions, "freed_bytes": freed}

    # -- snapshots ---------------------------------------------------------------------------

    async def snapshot(self, id: str) -> Export:
        """A snapshot of a session, to be iterated on another thread: reading it blocks.

        Raises NotFound, StoreError, and Unsupported where nothing is on disk.
        """
        store = self._stored()
        info = await self._run(lambda: self._sessions.info(id))
        await self.settled()
        seen = viewing(store, info.namespace)
        return await asyncio.to_thread(export, seen, info)

    def incoming(self, nbytes: int) -> Path:
        """Where to put a snapshot of `nbytes` for `restore`.

        Raises Unsupported where nothing is kept on disk, DiskFull where it has no room.
        """
        self._stored()
        with translated(self._incoming):
            self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(self._incoming).free < nbytes + FREE_FLOOR:
                raise DiskFull(f"The disk has no room for a snapshot of {nbytes} bytes.")
        return self._incoming

    async def restore(self, path: Path, name: str | None = None) -> Listed:
        """Take in the snapshot at `path`. Raises SnapshotRefused, StoreError and Unsupported."""
        store, namespace = self._stored(), self.namespace
        model = self._model

        def take_in() -> SessionInfo:
            checked = read_snapshot(
                path,
                namespace,
                model=model.name,
                spec=model.spec,
                vocab_size=model.vocab_size,
            )
            return restore(store, checked)

        info = await asyncio.to_thread(take_in)
        made = await self._run(lambda: self._sessions.adopt(info, time.time(), name))
        self.count += 1
        return await self.get(made)

    def _stored(self) -> Store:
        if self.store is None:
            raise Unsupported("This server has no disk tier, which snapshots come from and go to.")
        return self.store

    async def settled(self) -> bool:
        """Wait until nothing is on its way to disk; False if that takes too long."""
        deadline = time.monotonic() + SETTLE_S
        while await self._call(lambda core: core.disk is not None and core.disk.busy):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _run(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)

    def close(self) -> None:
        """Book what was handed over, and end. Blocks."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._pool.shutdown()
