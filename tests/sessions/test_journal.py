"""Turns whose table cannot be written when they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxcache.errors import DiskFull
from mlxcache.sessions import journal
from mlxcache.sessions.journal import Served, SessionWriter
from mlxcache.store.database import Database
from mlxcache.store.sessions import Sessions
from mlxcache.types import Job, Prompt, Tokens


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    database = Database.open(tmp_path)
    yield Sessions(database)
    database.close()


@pytest.fixture
def book(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionWriter]:
    monkeypatch.setattr(journal, "RETRY_S", 0.05)
    book = SessionWriter(sessions, Served("model", "path", "space", {}, 512), None)
    yield book
    book.close()


def end(book: SessionWriter, first: int, tokens: int, at: float) -> Tokens:
    """Book a request of a conversation that begins with `first`; its ids."""
    ids = np.full(tokens, first, np.int32)
    job = Job("req", Prompt(ids, (tokens,)), session=f"talk {first}")
    book.add_turn(job, ids, at)
    return ids


def test_a_turn_that_could_not_be_booked_is_booked_later_and_in_order(
    book: SessionWriter,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No other request is needed for it, and the log says once what is wrong."""
    fails, tried = sessions.record_turn, []

    def full(turn: object) -> str:
        tried.append(turn)
        raise DiskFull("no space left")

    monkeypatch.setattr(sessions, "record_turn", full)
    with caplog.at_level(logging.WARNING):
        end(book, 1, 100, 1.0)
        end(book, 2, 100, 2.0)
        longest = end(book, 1, 300, 3.0)
        while len(tried) < 6:
            time.sleep(0.01)
    assert sum("not written" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(sessions, "record_turn", fails)
    while (book.count, [one.turns for one in sessions.all()]) != (2, [2, 1]):
        time.sleep(0.01)
    newest = sessions.all()[0]
    assert newest.label == "talk 1"
    assert sessions.leaves(newest.id)[0].ids.tolist() == longest.tolist()


def test_what_could_never_be_booked_is_told_at_the_end(
    book: SessionWriter, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go where too many wait."""

    def full(turn: object) -> str:
        raise DiskFull("no space left")

    monkeypatch.setattr(sessions, "record_turn", full)
    for number in range(journal.MAX_LATE + 5):
        end(book, number, 10, 1.0)
    assert book.close(30.0) == journal.MAX_LATE
