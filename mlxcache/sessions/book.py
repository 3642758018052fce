"""Sessions of a server: listed, measured and changed, and what each model keeps of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from mlxcache.cache.kv_cache import KVCache
from mlxcache.common_prefix import common_length
from mlxcache.errors import NotFound, StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.owner import OWNER
from mlxcache.sessions.files import PromptCacheExport, PromptCacheReader, SessionFiles, Submit
from mlxcache.sessions.journal import CLOSE_S, ROW_BYTES, Served, SessionWriter
from mlxcache.sessions.tree_view import TreePart
from mlxcache.store.found import Problem
from mlxcache.store.leaves import Leaf, LeafRow
from mlxcache.store.listing import Held, Listed
from mlxcache.store.reply_rows import ReplyRow, StoredResponse
from mlxcache.store.sessions import ID, LeafChanged, Session, Sessions, id_of
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.store.snapshots import SnapshotExport, read_origin
from mlxcache.store.store import Store
from mlxcache.types import NO_TOKENS, Job, Tokens

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

SETTLE_S = 10.0

MEASURED_AT_ONCE = 100
"""Sessions whose token ids may be in memory at once, to measure what RAM holds of them."""

RECENT = 20
"""Sessions of all models, those used last, among which a model's newest conversation is found."""

Learn = Callable[[Mapping[str | None, Sequence[ReplyRow]]], None]
"""Callable that gets new replies by owner, oldest first, on a worker thread."""

WAIT_S = 0.05
"""Most seconds that a request waits for reading the table. A read usually takes under 1 ms."""

FindUnopened = Callable[[str, str], Awaitable[tuple[str, Served]]]
"""Find, by a snapshot's namespace and name, the label and description of a model not loaded yet."""


async def _until_unchanged(read: Callable[[], Awaitable[T]]) -> T:
    while True:
        with suppress(LeafChanged):
            return await read()


# -- all models ------------------------------------------------------------------------------------


class SessionBook:
    """The sessions of the current API key, of all models of a server. Use on the event loop.

    `opened()` returns what each loaded model keeps of them by label, the default model's first; all
    share one table of sessions. `labelled`: nodes of a tree view say to which model they belong.
    Methods may raise StoreError; changes also Busy if the table cannot be written for 5 seconds;
    all NotReady once the server stops.
    """

    def __init__(
        self,
        opened: Callable[[], Mapping[str, ModelSessions]],
        find_unopened: FindUnopened,
        *,
        labelled: bool,
    ):
        self._opened, self._labels_trees = opened, labelled
        self._labels: dict[str, str] = {}
        self.files = ServerFiles(self, find_unopened)

    @property
    def default(self) -> ModelSessions:
        return next(iter(self._opened().values()))

    def by_namespace(self) -> Mapping[str, Mapping[str, ModelSessions]]:
        """Return the models by namespace, then by label; several if one has several names."""
        found: dict[str, dict[str, ModelSessions]] = {}
        for label, one in self._opened().items():
            found.setdefault(one.namespace, {})[label] = one
        return found

    async def of(self, id: str) -> ModelSessions:
        """Return the model that session `id` belongs to, else the default model."""
        return (await self._find(id))[1][0]

    async def _find(self, id: str) -> tuple[str, Sequence[ModelSessions]]:
        """Return the namespace of session `id` and its loaded models, or else the default one."""
        missing = NotFound("There are no sessions.")
        for one in self._opened().values():  # one alone has a turn that is not written yet
            try:
                namespace = (await one.row(id)).namespace
            except NotFound as error:
                missing = error
            else:
                own = self.by_namespace().get(namespace, {})
                return namespace, list(own.values()) or [self.default]
        raise missing

    def note_label(self, namespace: str, label: str) -> None:
        self._labels[namespace] = label

    def _labelled(self, session: Session) -> Session:
        own = self.by_namespace().get(session.namespace)
        label = next(iter(own)) if own else self._labels.get(session.namespace)
        return replace(session, model=label or session.model)

    # -- asking ------------------------------------------------------------------------------

    async def list(self, limit: int | None = None) -> Sequence[Listed]:
        """Return at most `limit` sessions, most recently used first.

        Those of models that were not loaded have nothing in RAM.
        """
        newest = await _until_unchanged(partial(self._list, limit))
        return [replace(one, session=self._labelled(one.session)) for one in newest]

    async def _list(self, limit: int | None) -> Sequence[Listed]:
        groups = self.by_namespace()
        found: dict[str, Listed] = {}
        for number, (namespace, models) in enumerate(groups.items()):
            first, *others = models.values()
            listed = await first.list(limit, omit=groups.keys() - {namespace}, own=number > 0)
            for other in others:
                listed = await other.with_ram(listed)
            found |= {one.session.id: one for one in listed}
        return sorted(found.values(), key=lambda one: -one.session.last_used_at)[:limit]

    async def get(self, id: str) -> Listed:
        found = await _until_unchanged(partial(self._get, id))
        return replace(found, session=self._labelled(found.session))

    async def _get(self, id: str) -> Listed:
        _, (model, *others) = await self._find(id)
        found = await model.get(id)
        for other in others:
            [found] = await other.with_ram([found])
        return found

    async def rows(self, limit: int | None = None) -> Sequence[Session]:
        """Return at most `limit` sessions without their sizes; waits for no MLX thread."""
        found = {row.id: row for one in self._opened().values() for row in await one.rows(limit)}
        return sorted(found.values(), key=lambda one: -one.last_used_at)[:limit]

    async def related(self, session: Session) -> Sequence[Session]:
        """Return the sessions of the same conversation (label) that belong to other models."""
        return [self._labelled(one) for one in await self.default.related(session)]

    async def tree_parts(self, listed: Sequence[Listed]) -> Sequence[TreePart]:
        """Return those of `listed` that belong to loaded models, as the parts of a tree view."""
        first = [next(iter(models.items())) for models in self.by_namespace().values()]
        return [
            await model.tree_part(listed, label if self._labels_trees else None)
            for label, model in first
        ]

    # -- changing ----------------------------------------------------------------------------

    async def patch(
        self, id: str, *, name: str | None = None, pinned: bool | None = None
    ) -> Listed:
        """Rename, pin or unpin a session; None changes nothing, a name of "" removes it."""
        await (await self.of(id)).patch(id, name=name, pinned=pinned)
        return await self.get(id)

    async def fork(self, id: str, *, name: str | None = None, tokens: int | None = None) -> Listed:
        """Make a new session from the first `tokens` tokens of the main leaf, or all."""
        return await self.get(await (await self.of(id)).fork(id, name, tokens))

    async def delete(self, id: str) -> None:
        """Remove a session, and its KV except what others need."""
        namespace, models = await self._find(id)
        leaves = await models[0].delete(id)
        for model in models:
            for leaf in leaves:
                await model.forget(namespace, leaf)

    async def clear(self, *, pinned: bool = False) -> dict[str, int]:
        """Clear both tiers and remove all sessions. KV in use by requests stays until evicted."""
        if OWNER.get() is None:
            cleared: Counter[str] = Counter()
            for model in self._opened().values():
                cleared.update(await model.clear(pinned=pinned))
            return dict(cleared)
        before = self.default.disk_bytes()
        gone = [session for session in await self.rows() if pinned or not session.pinned]
        for session in gone:
            await self.delete(session.id)
        freed = max(0, before - self.default.disk_bytes())
        return {"sessions": len(gone), "freed_bytes": freed}

    async def prune(self, limit: int | None = None) -> int:
        """Remove damaged files, evict files down to `limit` bytes, and return the bytes freed."""
        return await self.default.prune(limit)

    async def check(self) -> Sequence[Problem]:
        return await self.default.check()


class ServerFiles:
    """Exports sessions of all models to files, and imports them."""

    def __init__(self, book: SessionBook, find_unopened: FindUnopened):
        self._book = book
        self._find_unopened = find_unopened

    async def snapshot(self, id: str) -> SnapshotExport:
        return await (await self._book.of(id)).files.snapshot(id)

    async def prompt_cache(self, id: str) -> PromptCacheExport:
        return await (await self._book.of(id)).files.prompt_cache(id)

    def incoming(self, nbytes: int) -> Path:
        return self._book.default.files.incoming(nbytes)

    async def restore(
        self, path: Path, name: str | None = None, prompt: str | None = None
    ) -> Listed:
        """Import a file; see `SessionFiles.restore`.

        The model of a snapshot is found by its weights: it may have any name here, and need not be
        loaded. A prompt cache goes to the model whose path or id it states, else to the default
        one.
        """
        namespace, model = await asyncio.to_thread(read_origin, path)
        models = [one for own in self._book.by_namespace().values() for one in own.values()]
        if namespace is None:
            fitting = [one for one in models if model in (one.model.path, one.model.name)]
        else:
            fitting = [one for one in models if namespace == one.model.snapshot_namespace]
        if fitting or namespace is None:
            made = await (fitting or [self._book.default])[0].files.restore(path, name, prompt)
        else:
            label, served = await self._find_unopened(namespace, model)
            made = await self._book.default.files.restore(path, name, prompt, served)
            self._book.note_label(namespace, label)
        return await self._book.get(made)


# -- one model -------------------------------------------------------------------------------------


class ModelSessions:
    """What one model keeps of the sessions: turns, KV in RAM, stored responses.

    Use on the event loop, unless a method says otherwise. `writer` writes turns. `before_removal`
    is called on the MLX thread before KV is removed. The methods raise as those of `SessionBook`.
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
        self.writer = SessionWriter(sessions, model, self.store, shared)
        self._checking = asyncio.Lock()
        self._closed = False
        self._replies: ReplyFeed | None = None
        if self.store is not None:
            self._replies = ReplyFeed(sessions, self.store, learn, model.name)
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

    def shared_with_sessions(self, label: str, ids: Tokens) -> list[tuple[bool, int]]:
        """Return (is this model's, shared leading tokens) of the leaves under a label.

        Any thread; blocks.
        """
        table = self.writer.table
        return [
            (session.namespace == self.namespace, common_length(leaf.ids, ids))
            for session in table.all(label=label)
            for leaf in table.leaves(session.id)
        ]

    # -- asking ------------------------------------------------------------------------------

    async def list(
        self, limit: int | None, *, omit: Collection[str], own: bool
    ) -> Sequence[Listed]:
        """Return sessions of this model and, unless `own`, of others but the namespaces `omit`."""

        def find(table: Sessions) -> Sequence[Session]:
            return [
                one
                for one in table.all(limit, OWNER.get())
                if one.namespace == self.namespace or not (own or one.namespace in omit)
            ]

        return await self._measured(find)

    async def get(self, id: str) -> Listed:
        return (await self._measured(lambda table: [table.get(id, OWNER.get())]))[0]

    def id_for(self, job: Job) -> str | None:
        """Return the id that the session of a labelled request has, or will get; else None."""
        if job.session is None or ID.fullmatch(job.session):
            return job.session
        return id_of(self.namespace, job.session, job.owner)

    async def row(self, id: str) -> Session:
        return await self.writer.read(lambda: self.writer.table.get(id, OWNER.get()))

    async def rows(self, limit: int | None = None) -> Sequence[Session]:
        return await self.writer.read(lambda: self.writer.table.all(limit, OWNER.get()))

    async def related(self, session: Session) -> Sequence[Session]:
        return await self.writer.read(lambda: self.writer.table.related(session))

    async def info(self, id: str) -> SessionInfo:
        return await self.writer.read(lambda: self.writer.table.info(id, OWNER.get()))

    async def newest_conversation(self) -> Tokens:
        """Return the main leaf of this model's session that was used last; empty if none is new."""

        def find() -> Tokens:
            table = self.writer.table
            own = (one for one in table.all(RECENT, OWNER.get()) if one.namespace == self.namespace)
            leaves = (table.leaves(one.id) for one in own)
            return next((found[0].ids for found in leaves if found), NO_TOKENS)

        return await self.writer.read(find)

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
            return {leaf: self.writer.table.ids_of(leaf) for leaf in leaves}

        held: dict[str, Held] = {}
        ids: dict[LeafRow, Tokens] = {}
        while left := {id: leaves for id, leaves in left.items() if id not in held}:
            found = await self._thread.ask(partial(self._kv.measure, left.values(), ids))
            asked = dict(zip(left, found, strict=False))
            held |= {id: one for id, one in asked.items() if one is not None}
            if unknown := [leaf for id in asked.keys() - held.keys() for leaf in left[id]]:
                ids |= await self.writer.read(partial(read_ids, unknown))
        return held

    async def tree_part(self, listed: Sequence[Listed], label: str | None) -> TreePart:
        """Return those of `listed` that belong to this model, as a part of a tree view."""
        own = [one for one in listed if one.session.namespace == self.namespace]
        table = self.writer.table
        leaves = [leaf for one in own for leaf in one.leaves]
        ids = await self.writer.read(lambda: [table.ids(leaf.id)[: leaf.tokens] for leaf in leaves])
        return TreePart(own, dict(zip(leaves, ids, strict=True)), self.decode, label)

    async def _measured(self, find: Callable[[Sessions], Sequence[Session]]) -> Sequence[Listed]:
        def from_table() -> Sequence[Listed]:
            table = self.writer.table
            listed = table.listed(find(table))
            try:
                return self.store.on_disk(listed, table.ids_of) if self.store else listed
            except LeafChanged:
                raise
            except StoreError:  # the folder was removed, which is logged elsewhere
                return listed

        return await self.with_ram(await self.writer.read(from_table))

    # -- changing ----------------------------------------------------------------------------

    async def patch(self, id: str, *, name: str | None, pinned: bool | None) -> None:
        change = partial(self._sessions.update, id, name=name, pinned=pinned, owner=OWNER.get())
        await self.writer.change(id, change)
        if pinned is not None:
            await self.writer.run(lambda: self.writer.pin(id, pinned=pinned))

    async def fork(self, id: str, name: str | None, tokens: int | None) -> str:
        """Fork a session; return the id of the new one."""
        info = await self.info(id)
        size = len(info.leaves[0].ids) if info.leaves else 0
        return await self.writer.change(
            id, lambda: self._sessions.fork(id, time.time(), name, tokens), tokens=size
        )

    async def delete(self, id: str) -> Sequence[Leaf]:
        """Remove a session; return its leaves, whose KV is still there (see `forget`)."""
        leaves = await self.writer.read(lambda: self.writer.table.leaves(id))
        await self.settled()
        await self.writer.run(lambda: self.writer.delete(id))
        return leaves

    async def forget(self, namespace: str, leaf: Leaf) -> None:
        """Remove the KV of a removed `leaf` that no other leaf needs; in RAM only this model's."""
        ids = leaf.ids
        others = await self.writer.read(lambda: self.writer.table.sharing(namespace, ids))
        needed = max(others.values(), default=0)
        if namespace == self.namespace:
            await self._remove(lambda: self._kv.forget(ids, needed))
        if self.store is not None:
            seen = self.store.for_namespace(namespace)
            await self.writer.run(lambda: seen.remove_unshared(self.writer.table, ids))

    async def clear(self, *, pinned: bool) -> dict[str, int]:
        """Clear both tiers, and remove all sessions of every owner."""
        await self.settled()
        removed = await self.writer.run(lambda: self.writer.clear(pinned=pinned))
        await self._remove(self._kv.clear)
        return removed

    async def _remove(self, action: Callable[[], object]) -> None:
        def remove() -> None:
            self._before_removal()
            action()

        await self._thread.ask(remove)

    def disk_bytes(self) -> int:
        return self.store.stats().used_bytes if self.store else 0

    async def prune(self, limit: int | None = None) -> int:
        if (store := self.store) is None:
            return 0
        async with self._checking:
            return await asyncio.to_thread(store.prune, limit)

    async def check(self) -> Sequence[Problem]:
        if (store := self.store) is None:
            return ()
        async with self._checking:
            return await asyncio.to_thread(store.check)

    async def adopt(self, info: SessionInfo, name: str | None) -> str:
        """Enter an imported session; return the id that it has here."""
        enter = partial(self._sessions.adopt, info, time.time(), name, OWNER.get())
        return await self.writer.run(enter, tokens=sum(len(leaf.ids) for leaf in info.leaves))

    # -- stored responses --------------------------------------------------------------------

    async def save_response(self, response: StoredResponse) -> None:
        """Store a response; it is durable once this returns."""
        size = len(response.body) + len(response.items)
        save = partial(self._sessions.save_response, response)
        await self.writer.run(save, tokens=size // ROW_BYTES)

    async def response(self, id: str) -> StoredResponse:
        owner = OWNER.get()
        return await self.writer.read(lambda: self.writer.table.response(id, owner))

    async def response_chain(self, id: str) -> Sequence[StoredResponse]:
        """Return a stored response and those that it continues, oldest first.

        Raises NotFound if one is missing or another key's, or if they are too many or too large.
        """
        owner = OWNER.get()
        return await self.writer.read(lambda: self.writer.table.response_chain(id, owner))

    async def delete_response(self, id: str) -> None:
        owner = OWNER.get()
        await self.writer.run(lambda: self._sessions.delete_response(id, owner))

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
        if left := self.writer.close():
            log.warning(
                "model %s: shutdown: %d turns were not written to the table of sessions within "
                "%g s",
                *(self.model.name, left, CLOSE_S),
            )


class ReplyFeed:
    """Passes stored replies, of other servers or of before a restart, to `learn`, for replay.

    Rendering uses only replies in memory: a thread of this object reads the table, and a prompt
    waits for it only briefly.
    """

    def __init__(self, sessions: Sessions, store: Store, learn: Learn, model: str):
        self._model = model
        self._sessions, self._store, self._learn = sessions, store, learn
        self._last = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-replies")
        self._reading: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Pass on the replies stored so far. Blocks."""
        if not self._store.database.is_there():
            return  # a read would create a removed folder again
        try:
            rows, self._last = self._sessions.replies(self._store.namespace, self._last)
        except StoreError as error:  # reported where the table is written
            log.debug(
                "model %s: cannot read the replies on disk that are kept for replay: %s",
                *(self._model, error),
            )
            return
        except Exception:  # a prompt is rendered without them
            log.exception(
                "model %s: reading the replies on disk failed, they are not replayed", self._model
            )
            return
        if rows:
            self._learn(rows)

    async def refresh(self) -> None:
        """Pass on replies stored since the last read, waiting at most `WAIT_S` seconds."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._pool.submit(self.start))
        await asyncio.wait({self._reading}, timeout=WAIT_S)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
