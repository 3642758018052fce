"""Replies on disk reach what renders without its asking."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlxcache.sessions.reply_feed import ReplyFeed
from mlxcache.store.session_rows import ReplyRow, Turn
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store


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
    ids = np.array([first, 1, 2], np.int32)
    row = ReplyRow(bytes([first]), 1, "t", b"", ids, True, False, False, None)
    prompt = np.arange(100 * first, 100 * first + 50, dtype=np.int32)
    whole = np.concatenate([prompt, ids])
    sessions.record_turn(Turn(namespace, "m", whole, 50, 20, 10, 1.0, reply=row, owner=owner))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_replies_of_before_are_known_at_the_start_and_others_soon(folder: Path) -> None:
    """Each once, in order, by owner; those of other models are not passed on."""
    store, sessions = opened(folder, "n")
    other, others = opened(folder, "n")
    write(sessions, 1)
    write(sessions, 2, owner="alice")
    write(sessions, 3, namespace="another")
    learned = Learned()
    feed = ReplyFeed(sessions, store, learned)
    feed.start()
    assert learned.ids == {None: [1], "alice": [2]}
    write(others, 4)
    write(others, 5, owner="bob")
    until(lambda: "bob" in learned.ids)
    assert learned.ids == {None: [1, 4], "alice": [2], "bob": [5]}
    feed.close()
    other.close()
    store.close()


def test_a_removed_folder_is_not_made_again_by_looking(folder: Path) -> None:
    """Who removes it finds it gone, until a request writes."""
    store, sessions = opened(folder, "n")
    write(sessions, 1)
    feed = ReplyFeed(sessions, store, Learned())
    feed.start()
    shutil.rmtree(folder)
    time.sleep(2)
    assert not folder.exists()
    feed.close()
    store.close()
