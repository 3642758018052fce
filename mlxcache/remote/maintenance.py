"""Listing and removal of the objects in a remote, for commands that need no server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from mlxcache.config.remote import RemoteUrl
from mlxcache.errors import RemoteUnavailable
from mlxcache.remote.objects import MARKER
from mlxcache.remote.storage import Failure, Plain, Storage, Stored, too_slow

PAGE_S = 30.0
"""Most seconds for a page of a listing, or for removing one."""

KINDS = ("run", "ckpt", "reply", "session")

FOREIGN = "other"
"""Kind of the objects whose names are not of this server's key, or not of servers at all."""

_AGES = (("under 1 day", 1), ("under 7 days", 7), ("under 30 days", 30))
OLDEST = "30 days and more"


@dataclass(slots=True)
class Holdings:
    """Objects in a remote, by kind: bytes, numbers; bytes by age; when the oldest was written."""

    kinds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    ages: Counter[str] = field(default_factory=Counter)
    oldest: datetime | None = None

    def add(self, kind: str, one: Stored, now: datetime) -> None:
        self.kinds[kind] += one.size
        self.counts[kind] += 1
        days = (now - one.modified) / timedelta(days=1)
        self.ages[next((name for name, most in _AGES if days < most), OLDEST)] += one.size
        self.oldest = one.modified if self.oldest is None else min(self.oldest, one.modified)


def measure(url: RemoteUrl, form: Plain, step: Callable[[int], None]) -> Holdings:
    """Count all objects of the remote except the marker; `step(n)` is told how many so far.

    Blocks for about a second per 5,000 objects. Raises RemoteUnavailable.
    """
    holdings, now = Holdings(), datetime.now(UTC)

    async def run() -> None:
        storage = Storage(url)
        async for page in _pages(storage):
            for one in page:
                holdings.add(_kind(form.plain_name(one.path)), one, now)
            step(holdings.counts.total())

    _run(url, run())
    return holdings


def prune(url: RemoteUrl, older_than: timedelta, step: Callable[[int], None]) -> tuple[int, int]:
    """Remove all objects that were written more than `older_than` ago, under any key.

    The marker stays, and so do objects behind a symbolic link in a shared folder. Servers may run
    in the meantime. Returns the number of objects removed, and their bytes. `step(n)` is told how
    many so far. Raises RemoteUnavailable.
    """
    count = freed = 0
    limit = datetime.now(UTC) - older_than

    async def run() -> None:
        nonlocal count, freed
        storage = Storage(url)
        async for page in _pages(storage):
            old = [one for one in page if one.modified < limit]
            if old:
                async with asyncio.timeout(PAGE_S):
                    await storage.delete(*(one.path for one in old))
            count += len(old)
            freed += sum(one.size for one in old)
            step(count)

    _run(url, run())
    return count, freed


def _run(url: RemoteUrl, work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except (Failure, TimeoutError) as error:
        failure = error if isinstance(error, Failure) else too_slow()
        raise RemoteUnavailable(f"the remote {url} failed: {failure}") from error


async def _pages(storage: Storage) -> AsyncIterator[list[Stored]]:
    pages = storage.pages("v1")
    while True:
        try:
            async with asyncio.timeout(PAGE_S):
                page = await anext(pages)
        except StopAsyncIteration:
            return
        yield [one for one in page if one.path != MARKER and storage.is_within(one.path)]


def _kind(name: str | None) -> str:
    parts = (name or "").split("/")
    return parts[2] if len(parts) > 3 and parts[2] in KINDS else FOREIGN
