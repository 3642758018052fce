"""Stored responses: chains, owners, limits, and their end with their session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxcache.errors import NotFound
from mlxcache.store import reply_rows
from mlxcache.store.reply_rows import StoredResponse
from mlxcache.store.session_rows import Turn
from mlxcache.store.sessions import Sessions
from mlxcache.types import token_ids
from tests.store.session_of import NAMESPACE


def stored(id: str, previous: str | None = None, at: float = 1.0) -> StoredResponse:
    return StoredResponse(id, None, previous, at, b'{"id":"' + id.encode() + b'"}', b"[]")


def turn(response: str, label: str = "a") -> Turn:
    ids = token_ids(range(20))
    return Turn(NAMESPACE, "m", ids, 15, 10, 0, 1.0, label=label, response=response)


def test_a_response_is_found_with_all_that_it_continues(sessions: Sessions) -> None:
    for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        sessions.save_response(stored(id, previous))
    assert [one.id for one in sessions.response_chain("c", None)] == ["a", "b", "c"]
    assert sessions.response("c", None) == stored("c", "b")


def test_a_chain_with_a_hole_is_not_found(sessions: Sessions) -> None:
    sessions.save_response(stored("b", "a"))
    with pytest.raises(NotFound, match="'a'"):
        sessions.response_chain("b", None)


def test_a_chain_that_would_fill_the_memory_is_not_read(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_rows, "MAX_CHAIN_BYTES", 1000)
    for id, previous in (("a", None), ("b", "a"), ("c", "b")):
        sessions.save_response(replace(stored(id, previous), items=b"[" + b" " * 400 + b"]"))
    assert len(sessions.response_chain("b", None)) == 2
    with pytest.raises(NotFound, match="1,000 bytes"):
        sessions.response_chain("c", None)


def test_owners_do_not_see_each_others_responses(sessions: Sessions) -> None:
    sessions.save_response(replace(stored("a"), owner="me"))
    assert sessions.response("a", "me").owner == "me"
    for other in (None, "you"):
        with pytest.raises(NotFound):
            sessions.response("a", other)
        with pytest.raises(NotFound):
            sessions.delete_response("a", other)


@pytest.mark.parametrize("first", ["turn", "response"])
def test_a_response_ends_with_its_session(sessions: Sessions, first: str) -> None:
    actions = [lambda: sessions.record_turn(turn("a")), lambda: sessions.save_response(stored("a"))]
    for action in actions if first == "turn" else actions[::-1]:
        action()
    assert sessions.response("a", None).id == "a"
    sessions.save_response(stored("b"))
    sessions.record_turn(turn("b", label="b"))
    sessions.delete(
        sessions.all()[0].id if sessions.all()[0].label == "a" else sessions.all()[1].id
    )
    with pytest.raises(NotFound):
        sessions.response("a", None)
    assert sessions.response("b", None).id == "b"


def test_a_turn_alone_is_no_response(sessions: Sessions) -> None:
    sessions.record_turn(turn("a"))
    with pytest.raises(NotFound):
        sessions.response("a", None)


def test_a_deleted_response_is_gone_and_its_session_stays(sessions: Sessions) -> None:
    sessions.save_response(stored("a"))
    sessions.record_turn(turn("a"))
    sessions.delete_response("a", None)
    assert sessions.count() == 1
    with pytest.raises(NotFound):
        sessions.delete_response("a", None)


def test_the_oldest_go_beyond_the_number_and_the_bytes(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_rows, "MOST_RESPONSES", 3)
    for i in range(5):
        sessions.save_response(stored(f"r{i}", at=float(i)))
    kept = [i for i in range(5) if found(sessions, f"r{i}")]
    assert kept == [2, 3, 4]
    monkeypatch.setattr(reply_rows, "MOST_RESPONSE_BYTES", 1)
    sessions.save_response(stored("new", at=9.0))
    assert found(sessions, "new")
    assert not found(sessions, "r4")


def found(sessions: Sessions, id: str) -> bool:
    try:
        sessions.response(id, None)
    except NotFound:
        return False
    return True


def test_a_chain_is_bounded(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_rows, "MAX_CHAIN", 2)
    for id, previous in (("a", None), ("b", "a"), ("c", "b")):
        sessions.save_response(stored(id, previous))
    assert len(sessions.response_chain("b", None)) == 2
    with pytest.raises(NotFound, match="more than 2"):
        sessions.response_chain("c", None)
