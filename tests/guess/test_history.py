"""A conversation continues its own history, and never another owner's."""

from __future__ import annotations

from mlxcache.guess.history import Histories, History
from mlxcache.types import Tokens, join_ids, token_ids


def ids(*tokens: int) -> Tokens:
    return token_ids(tokens)


FIRST = ids(*range(40))


def test_the_next_turn_adds_only_what_is_new() -> None:
    """And what the last reply said is found in it."""
    kept = Histories()
    history = kept.take("a", FIRST)
    history.say([70, 71, 72, 73])
    kept.keep("a", history)
    size = len(history)
    turn = join_ids(FIRST, ids(70, 71, 72, 73, 80, 81, 70, 71, 72))
    again = kept.take("a", turn)
    assert again is history
    assert len(again) == size + 5
    assert again.guess(2).tokens == (73, 80)


def test_no_owner_gets_anothers_text() -> None:
    kept = Histories()
    history = kept.take("a", FIRST)
    history.say([70, 71, 72, 73])
    kept.keep("a", history)
    for owner in ("b", None):
        other = kept.take(owner, join_ids(FIRST, ids(90, 70, 71, 72)))
        assert other is not history
        assert not other.guess(3).tokens


def test_a_history_in_use_is_not_shared() -> None:
    kept = Histories()
    kept.keep(None, kept.take(None, FIRST))
    assert kept.take(None, FIRST) is not kept.take(None, FIRST)


def test_another_branch_keeps_what_was_said_on_the_first() -> None:
    """Text after the place where they part follows the text before it."""
    history = History()
    history.follow(join_ids(FIRST, ids(70, 71, 72, 73)))
    history.follow(join_ids(FIRST, ids(60, 61, 70, 71, 72)))
    assert history.guess(1).tokens == (73,)


def test_forms_of_results_are_added_once_and_the_reply_goes_on() -> None:
    """A form that comes late does not come between the tokens of the reply."""
    history = History()
    history.follow(FIRST)
    history.say([7, 500])
    history.add_forms({"one": ids(500, 501, 502, 503, 504)})
    size = len(history)
    history.add_forms({"one": ids(500, 501, 502, 503, 504)})
    assert len(history) == size
    history.say([501, 502])
    assert history.guess(2).tokens == (503, 504)
    assert history.guess(2).matched == 3


def test_the_oldest_histories_are_forgotten() -> None:
    kept = Histories(most=2)
    for start in (0, 100, 200):
        kept.keep(None, kept.take(None, token_ids(FIRST + start)))
    assert len(kept) == 2
    kept.clear()
    assert len(kept) == 0
