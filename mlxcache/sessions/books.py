"""The sessions of several models: each operation is passed to the session book of one model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlxcache.errors import NotFound
from mlxcache.owner import OWNER
from mlxcache.sessions.book import SessionBook, until_unchanged
from mlxcache.sessions.files import PromptCacheExport
from mlxcache.sessions.journal import Served
from mlxcache.sessions.tree_view import TreePart
from mlxcache.store.found import Problem
from mlxcache.store.listing import Listed
from mlxcache.store.session_rows import Session
from mlxcache.store.snapshots import SnapshotExport, read_origin

FindUnopened = Callable[[str, str], Awaitable[tuple[str, Served]]]
"""Find, by a snapshot's namespace and name, the label and description of a model not loaded yet."""


class SessionBooks:
    """The sessions of all models of a server, as `SessionBook` has those of one.

    `opened()` returns the books of the loaded models by label, the default model's first. They
    share one table of sessions.
    """

    def __init__(
        self, opened: Callable[[], Mapping[str, SessionBook]], find_unopened: FindUnopened
    ):
        self._opened = opened
        self._labels: dict[str, str] = {}
        self.files = SeveralFiles(self, find_unopened)

    @property
    def default(self) -> SessionBook:
        return next(iter(self._opened().values()))

    def by_namespace(self) -> Mapping[str, Mapping[str, SessionBook]]:
        """Return the books by namespace, then by label; several if a model has several names."""
        found: dict[str, dict[str, SessionBook]] = {}
        for label, book in self._opened().items():
            found.setdefault(book.namespace, {})[label] = book
        return found

    async def of(self, id: str) -> SessionBook:
        """Return the book of the model that session `id` belongs to, else the default model's."""
        row = await self._row(id)
        own = self.by_namespace().get(row.namespace)
        return next(iter(own.values())) if own else self.default

    async def _row(self, id: str) -> Session:
        missing = NotFound("There are no sessions.")
        for book in self._opened().values():  # one alone has a turn that is not written yet
            try:
                return await book.row(id)
            except NotFound as error:
                missing = error
        raise missing

    def note_label(self, namespace: str, label: str) -> None:
        self._labels[namespace] = label

    def _labelled(self, session: Session) -> Session:
        own = self.by_namespace().get(session.namespace)
        label = next(iter(own)) if own else self._labels.get(session.namespace)
        return replace(session, model=label or session.model)

    # -- asking ------------------------------------------------------------------------------

    async def list(self, limit: int | None = None) -> Sequence[Listed]:
        """Return sessions; those of models that were not loaded have nothing in RAM."""
        newest = await until_unchanged(partial(self._list, limit))
        return [replace(one, session=self._labelled(one.session)) for one in newest]

    async def _list(self, limit: int | None) -> Sequence[Listed]:
        groups = self.by_namespace()
        found: dict[str, Listed] = {}
        for number, (namespace, books) in enumerate(groups.items()):
            first, *others = books.values()
            listed = await first.list(limit, omit=groups.keys() - {namespace}, own=number > 0)
            for book in others:
                listed = await book.with_ram(listed)
            found |= {one.session.id: one for one in listed}
        return sorted(found.values(), key=lambda one: -one.session.last_used_at)[:limit]

    async def get(self, id: str) -> Listed:
        found = await until_unchanged(partial(self._get, id))
        return replace(found, session=self._labelled(found.session))

    async def _get(self, id: str) -> Listed:
        found = await (await self.of(id)).get(id)
        for book in list(self.by_namespace().get(found.session.namespace, {}).values())[1:]:
            [found] = await book.with_ram([found])
        return found

    async def rows(self, limit: int | None = None) -> Sequence[Session]:
        found = {one.id: one for book in self._opened().values() for one in await book.rows(limit)}
        return sorted(found.values(), key=lambda one: -one.last_used_at)[:limit]

    async def related(self, session: Session) -> Sequence[Session]:
        return [self._labelled(one) for one in await self.default.related(session)]

    async def tree_parts(self, listed: Sequence[Listed]) -> Sequence[TreePart]:
        first = [next(iter(books.items())) for books in self.by_namespace().values()]
        return [
            replace(part, model=label)
            for label, book in first
            for part in await book.tree_parts(listed)
        ]

    # -- changing ----------------------------------------------------------------------------

    async def patch(
        self, id: str, *, name: str | None = None, pinned: bool | None = None
    ) -> Listed:
        await (await self.of(id)).patch(id, name=name, pinned=pinned)
        return await self.get(id)

    async def fork(self, id: str, *, name: str | None = None, tokens: int | None = None) -> Listed:
        made = await (await self.of(id)).fork(id, name=name, tokens=tokens)
        return await self.get(made.session.id)

    async def delete(self, id: str) -> None:
        book = await self.of(id)
        namespace = (await book.row(id)).namespace
        leaves = await book.delete(id)
        for other in self.by_namespace().get(namespace, {}).values():
            if other is not book:
                for leaf in leaves:
                    await other.forget(namespace, leaf)

    async def clear(self, *, pinned: bool = False) -> dict[str, int]:
        cleared: Counter[str] = Counter()
        if OWNER.get() is None:
            for book in self._opened().values():
                cleared.update(await book.clear(pinned=pinned))
            return dict(cleared)
        before = self.default.disk_bytes()
        for session in await self.rows():
            if pinned or not session.pinned:
                await self.delete(session.id)
                cleared["sessions"] += 1
        freed = max(0, before - self.default.disk_bytes())
        return {"sessions": cleared["sessions"], "freed_bytes": freed}

    async def prune(self, limit: int | None = None) -> int:
        return await self.default.prune(limit)

    async def check(self) -> Sequence[Problem]:
        return await self.default.check()


class SeveralFiles:
    def __init__(self, books: SessionBooks, find_unopened: FindUnopened):
        self._books = books
        self._find_unopened = find_unopened

    async def snapshot(self, id: str) -> SnapshotExport:
        return await (await self._books.of(id)).files.snapshot(id)

    async def prompt_cache(self, id: str) -> PromptCacheExport:
        return await (await self._books.of(id)).files.prompt_cache(id)

    def incoming(self, nbytes: int) -> Path:
        return self._books.default.files.incoming(nbytes)

    async def restore(
        self, path: Path, name: str | None = None, prompt: str | None = None
    ) -> Listed:
        """Import a file; see `SessionFiles.restore`.

        The model of a snapshot is found by its weights: it may have any name here, and need not be
        loaded. A prompt cache goes to the model whose path or id it states, else to the default
        one.
        """
        namespace, model = await asyncio.to_thread(read_origin, path)
        groups, served = self._books.by_namespace(), None
        book = self._books.default
        if namespace is None:
            books = [book for own in groups.values() for book in own.values()]
            named = (one for one in books if model in (one.model.path, one.model.name))
            book = next(named, book)
        elif namespace in groups:
            book = next(iter(groups[namespace].values()))
        else:
            label, served = await self._find_unopened(namespace, model)
            self._books.note_label(namespace, label)
        made = await book.files.restore(path, name, prompt, served)
        return await self._books.get(made.session.id)
