"""Sessions as the engine keeps them: booked on a thread of their own, measured in both tiers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlxcache.engine.forget import forget, forget_all, unlearn
from mlxcache.errors import StoreError
from mlxcache.store.leaves import Leaf, anchor_of
from mlxcache.store.listing import Held, Listed, nothing, on_disk
from mlxcache.store.sessions import Session, Sessions, Turn
from mlxcache.types import Job, Tokens

if TYPE_CHECKING:
    from mlxcache.engine.core import Core
    from mlxcache.engine.memory import Memory
    from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

PIN_S = 3.0
"""Seconds after a turn of a pinned session at which its new files, written by then, are pinned."""

SETTLE_S = 10.0
"""Seconds that a session which is still being written to disk is waited for."""


class OnMlxThread(Protocol):
    """Runs an action on the MLX thread; `Engine.call`."""

    def __call__(self, action: Callable[[Core], T], /) -> Awaitable[T]: ...


class SessionBook:
    """The sessions of one engine. Call everything but `turn` from the event loop.

    `store` None: nothing is on disk. What is asked for is answered after the turns booked before.
    """

    def __init__(
        self,
        sessions: Sessions,
        namespace: str,
        model: str,
        call: OnMlxThread,
        store: Store | None = None,
    ):
        self.namespace = namespace
        self.model = model
        self.count = sessions.count()
        self.store = store
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
            model=self.model,
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
        pinned: dict[str, list[Tokens]] = {}
        for leaf in self._sessions.pinned(self.namespace):
            pinned.setdefault(leaf.session, []).append(leaf.ids)
        for id, paths in pinned.items() if self.store is not None else ():
            self.store.pin(id, paths)  # type: ignore[union-attr]

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
            if (store := self.store) is not None:
                disk = await self._run(lambda: on_disk(store, leaves))
        return Listed(session, tuple(leaves), ram, disk)

    # -- changing ----------------------------------------------------------------------------

    async def patch(
        self, id: str, *, name: str | None = None, pinned: bool | None = None
    ) -> Listed:
        """Rename a session ("": no name), pin it or let it go. Raises NotFound and StoreError."""
        session = await self._run(lambda: self._sessions.get(id))
        await self._run(lambda: self._sessions.update(id, name=name, pinned=pinned))
        if pinned is not None and session.namespace == self.namespace:
            await self._run(lambda: self._pin(id, pinned))
        return await self.get(id)

    def _pin(self, id: str, pinned: bool) -> None:
        if self.store is not None:
            self.store.pin(id, [leaf.ids for leaf in self._sessions.leaves(id)] if pinned else [])

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
        if session.namespace != self.namespace:
            return
        await self._run(lambda: self._pin(id, pinned=False))
        for leaf in leaves:
            await self._forget(leaf)

    async def _forget(self, leaf: Leaf) -> None:
        """Cut what only `leaf` needed."""
        needed = await self._run(lambda: self._sessions.needed(self.namespace, leaf.ids))
        if needed >= len(leaf.ids):
            return
        await self._call(lambda core: forget(core.memory, leaf.ids, needed))
        if (store := self.store) is not None:
            await self._run(lambda: store.forget(leaf.ids, needed))
            await self._call(lambda core: unlearn(core, leaf.ids))

    async def clear(self, *, pinned: bool = False) -> int:
        """Empty both tiers and forget the sessions, pinned ones only if `pinned`.

        What requests are using stays until it is evicted. Returns the bytes freed on disk.
        Raises StoreError.
        """
        await self.settled()
        self.count -= await self._run(lambda: self._sessions.clear(pinned=pinned))
        freed = 0
        if (store := self.store) is not None:
            freed = await self._run(lambda: store.clear(pinned=pinned))
        await self._call(forget_all)
        return freed

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


def in_ram(memory: Memory, paths: Sequence[Tokens]) -> Held:
    """What the RAM tier holds of these token ids; asking is no use of it. MLX thread only."""
    tokens, nbytes = [], 0
    ends: dict[int, int] = {}
    for ids in paths:
        match = memory.tree.match(ids, touch=False)
        tokens.append(memory.usable(match, len(ids) + 1)[0])
        for node in match.nodes:
            end = min(node.end, match.length)
            before = ends.get(id(node), node.start)
            if end == node.end and before < end:
                nbytes += node.checkpoint_bytes
            nbytes += max(0, end - before) * memory.layout.bytes_per_token
            ends[id(node)] = max(end, before)
    return Held(tuple(tokens), nbytes)
