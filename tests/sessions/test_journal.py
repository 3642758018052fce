"""Turns whose table cannot be written when they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcache.errors import DiskFull, NotFound
from mlxcache.sessions import journal
from mlxcache.sessions.journal import MAX_LATE, Served, SessionWriter
from mlxcache.store.database import Database
from mlxcache.store.sessions import Sessions
from mlxcache.types import Job, Prompt, Tokens, token_ids


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
    ids = token_ids([first] * tokens)
    job = Job("req", Prompt(ids, (tokens,)), session=f"talk {first}")
    book.add_turn(job, ids, at)
    return ids


def test_a_turn_that_could_not_be_booked_is_booked_later_and_in_order(
    book, sessions, monkeypatch, caplog
):
    """No other request is needed for it, and the log says once what is wrong."""
    fails, tried = sessions.record_turn, []

    def full(turn: object, *more: object) -> str:
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


def test_what_could_never_be_booked_is_told_at_the_end(book, sessions, monkeypatch):
    """The oldest go where too many wait."""

    def full(turn: object, *more: object) -> str:
        raise DiskFull("no space left")

    monkeypatch.setattr(sessions, "record_turn", full)
    for number in range(MAX_LATE + 5):
        end(book, number, 10, 1.0)
    assert book.close(30.0) == MAX_LATE


async def test_turns_that_cannot_be_written_are_listed(book, sessions, monkeypatch):
    """Beside those on disk, with ids that they keep; they can be removed, and nothing else."""
    end(book, 1, 100, 1.0)
    await book.written()
    writes = sessions.record_turn

    def full(turn: object, *more: object) -> str:
        raise DiskFull("no space left")

    monkeypatch.setattr(sessions, "record_turn", full)
    end(book, 1, 200, 2.0)
    end(book, 2, 100, 3.0)
    job = Job("unlabelled", Prompt(token_ids([3] * 50), (50,)))
    book.add_turn(job, token_ids([3] * 60), 4.0)
    found = await book.read(lambda: book.table.all(None))
    assert [(one.label, one.turns) for one in found] == [(None, 1), ("talk 2", 1), ("talk 1", 2)]
    assert book.count == 3
    assert book.session_of("unlabelled") == found[0].id
    assert len((await book.read(lambda: book.table.leaves(found[2].id)))[0].ids) == 200
    assert len(sessions.all()) == 1
    with pytest.raises(DiskFull, match="in RAM alone"):
        await book.change(found[0].id, lambda: sessions.update(found[0].id, name="x"))
    with pytest.raises(NotFound):
        await book.run(lambda: book.delete("ses_none"))
    await book.run(lambda: sessions.update(found[2].id, name="kept"))
    named = await book.read(lambda: book.table.get(found[2].id))
    assert (named.name, named.turns) == ("kept", 2)
    await book.run(lambda: book.delete(found[1].id))
    assert [one.id for one in await book.read(lambda: book.table.all(None))] == [
        found[0].id,
        found[2].id,
    ]
    monkeypatch.setattr(sessions, "record_turn", writes)
    end(book, 1, 300, 5.0)
    await book.written()
    assert [(one.id, one.turns) for one in sessions.all()] == [(found[2].id, 3), (found[0].id, 1)]
    assert book.table is sessions


async def test_clearing_removes_what_could_not_be_written_too(book, sessions, monkeypatch):
    """Else it would come back with the next write."""
    end(book, 1, 100, 1.0)
    await book.written()

    def full(turn: object, *more: object) -> str:
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "record_turn", full)
        end(book, 2, 100, 2.0)
        await book.written()
        assert await book.run(lambda: book.clear(pinned=False)) == {
            "sessions": 2,
            "freed_bytes": 0,
        }
        assert await book.read(lambda: book.table.all(None)) == []
    end(book, 3, 100, 3.0)
    await book.written()
    assert [one.label for one in await book.read(lambda: book.table.all(None))] == ["talk 3"]


async def test_of_too_many_turns_those_that_others_continue_are_dropped_first(
    book: SessionWriter, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a short conversation stays listed beside a long one."""

    def full(turn: object, *more: object) -> str:
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "record_turn", full)
        end(book, 1, 100, 1.0)
        for number in range(MAX_LATE + 20):
            end(book, 2, 100 + number, 2.0 + number)
        await book.written()
    end(book, 3, 100, 200.0)
    await book.written()
    found = await book.read(lambda: book.table.all(None))
    assert [one.label for one in found] == ["talk 3", "talk 2", "talk 1"]
    assert len(sessions.leaves(found[1].id)[0].ids) == 100 + MAX_LATE + 19
