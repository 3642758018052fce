"""Figures of sessions: added up, kept, and removed with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxcache.store.leaves import conversation_key_tokens
from mlxcache.store.session_rows import Gain, SessionFigures
from mlxcache.store.sessions import Sessions, Turn
from tests.store.content import opened, tokens


@pytest.fixture
def sessions(folder) -> Iterator[Sessions]:
    with opened(folder) as store:
        yield Sessions(store.database)


def turn(sessions: Sessions, label: str, owner: str | None = None, **figures: float) -> str:
    gain = Gain(SessionFigures(requests=1, **figures), {0: (200, 0.25), 2: (300, 0.5)})  # type: ignore[arg-type]
    ids = tokens(100)
    key = conversation_key_tokens((), 90)
    return sessions.record_turn(
        Turn("space", "model", ids, 90, key, 0, 1.0, label=label, owner=owner, gain=gain)
    )


def figures(sessions: Sessions, id: str) -> SessionFigures:
    return sessions.listed([sessions.get(id)])[0].figures


def test_figures_of_a_sessions_requests_add_up(sessions, folder):
    one = turn(sessions, "one", cached_tokens=10, prompt_tokens=90, saved_tokens=10, saved_s=0.5)
    assert turn(sessions, "one", cached_tokens=30, prompt_tokens=90, first_tokens=1) == one
    other = turn(sessions, "other", prompt_tokens=90)
    with opened(folder) as store:
        again = Sessions(store.database)
        found = figures(again, one)
        assert (found.requests, found.cached_tokens, found.prompt_tokens) == (2, 40, 180)
        assert (found.saved_tokens, found.saved_s, found.first_tokens) == (10, 0.5, 1)
        assert figures(again, other).cached_tokens == 0
        assert again.prefill_times("space") == {0: (600, 0.75), 2: (900, 1.5)}
        assert again.prefill_times("another") == {}


def test_figures_go_with_their_session_and_not_into_a_fork(sessions):
    one = turn(sessions, "one", cached_tokens=10)
    fork = sessions.fork(one, 2.0)
    assert figures(sessions, fork) == SessionFigures()
    sessions.delete(one)
    assert turn(sessions, "one", cached_tokens=5) == one
    assert figures(sessions, one).cached_tokens == 5


def test_owners_with_one_label_have_figures_of_their_own(sessions):
    mine = turn(sessions, "same", owner="me", cached_tokens=10)
    theirs = turn(sessions, "same", owner="you", cached_tokens=70)
    assert mine != theirs
    assert figures(sessions, mine).cached_tokens == 10
    assert figures(sessions, theirs).cached_tokens == 70
