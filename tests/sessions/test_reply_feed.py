"""Replies on disk reach what renders without its asking."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxcache.sessions.book import ReplyFeed
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.session_rows import Turn
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store
from mlxcache.types import join_ids, token_ids


class Learned:
    """The first token ids of the replies that were passed on, by owner."""

    def __init__(self) -> None:
        self.ids: dict[str | None, list[int]] = {}

    def __call__(self, rows: Mapping[str | None, Sequence[ReplyRow]]) -> None:
        for owner, replies in rows.items():
            self.ids.setdefault(owner, []).extend(int(one.ids[0]) for one in replies)


def opened(folder: Path, namespace: str) -> tuple[Store, Sessions]:
    store = Store.open(folder, namespace, 100_000_000)
    return store, Sessions(store.database)


def write(sessions: Sessions, first: int, namespace: str = "n", owner: str | None = None) -> None:
    """Enter a turn with a reply whose ids begin with `first`."""
    ids = token_ids([first, 1, 2])
    row = ReplyRow(bytes([first]), 1, "t", b"", ids, True, False, False, None)
    prompt = token_ids(range(100 * first, 100 * first + 50))
    whole = join_ids(prompt, ids)
    sessions.record_turn(Turn(namespace, "m", whole, 50, 20, 10, 1.0, reply=row, owner=owner))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def test_replies_of_before_are_known_at_the_start_and_others_soon(folder: Path) -> None:
    """Each once, in order, by owner; those of other models are not passed on."""
    store, sessions = opened(folder, "n")
    other, others = opened(folder, "n")
    write(sessions, 1)
    write(sessions, 2, owner="alice")
    write(sessions, 3, namespace="another")
    learned = Learned()
    feed = ReplyFeed(sessions, store, learned, "m")
    feed.start()
    assert learned.ids == {None: [1], "alice": [2]}
    write(others, 4)
    write(others, 5, owner="bob")
    await feed.refresh()
    assert learned.ids == {None: [1, 4], "alice": [2], "bob": [5]}
    feed.close()
    other.close()
    store.close()


async def test_a_removed_folder_is_not_made_again_by_looking(folder: Path) -> None:
    """Who removes it finds it gone, until a request writes."""
    store, sessions = opened(folder, "n")
    write(sessions, 1)
    feed = ReplyFeed(sessions, store, Learned(), "m")
    feed.start()
    shutil.rmtree(folder)
    await feed.refresh()
    assert not await asyncio.to_thread(folder.exists)
    feed.close()
    store.close()


async def test_a_request_does_not_wait_for_a_slow_table(folder, monkeypatch):
    """The read goes on by itself, and its replies are passed on then."""
    store, sessions = opened(folder, "n")
    learned, free = Learned(), threading.Event()
    feed = ReplyFeed(sessions, store, learned, "m")
    feed.start()
    write(sessions, 1)
    read = sessions.replies

    def slow(*args: Any) -> Any:
        assert free.wait(30)
        return read(*args)

    monkeypatch.setattr(sessions, "replies", slow)
    await feed.refresh()
    assert learned.ids == {}
    free.set()
    while learned.ids != {None: [1]}:  # noqa: ASYNC110 - another thread fills it
        await asyncio.sleep(0.01)
    feed.close()
    store.close()
