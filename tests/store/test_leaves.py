"""The rules by which requests find their leaf, on ids alone."""

import numpy as np
import pytest

from mlxcache.store.leaves import (
    SETTLED_TURNS,
    Leaf,
    anchor_of,
    common,
    continued,
    digest_of,
    digests_at,
    takes_over,
)


def ids(*parts):
    """Token ids from ranges: (start, count) pairs."""
    arrays = [np.arange(start, start + count) for start, count in parts]
    return np.concatenate(arrays).astype(np.int32)


def leaf(tokens, *, id=1, anchor=10, turns=1, kind="main"):
    return Leaf(id, "ses_1", kind, tokens, len(tokens), anchor, turns, 0.0)


@pytest.mark.parametrize(
    ("marks", "anchor"),
    [((), 50), ((40,), 40), ((10, 40), 40), ((10, 20, 30, 40), 20)],
)
def test_the_anchor_covers_the_first_message_after_the_head(marks, anchor):
    """The head alone is shared by conversations that have nothing to do with each other."""
    assert anchor_of(marks, 50) == anchor


def test_a_request_continues_the_leaf_it_shares_most_with():
    """At least its anchor; less is another conversation under the same head."""
    short, long = leaf(ids((0, 20)), id=1), leaf(ids((0, 30), (900, 5)), id=2)
    assert continued(ids((0, 30), (500, 5)), [short, long]) is long
    assert continued(ids((0, 9), (500, 50)), [short, long]) is None
    assert continued(ids((0, 5)), [short, long]) is None


def test_a_fork_and_its_origin_go_their_own_ways():
    """Equal ones: the older first, then the one that the request contains whole."""
    origin, fork = leaf(ids((0, 20)), id=1), leaf(ids((0, 20)), id=2)
    assert continued(ids((0, 25)), [fork, origin]) is origin
    origin = leaf(ids((0, 25)), id=1)
    assert continued(ids((0, 20), (700, 5)), [origin, fork]) is fork


def test_a_side_request_that_came_first_is_not_the_main_leaf():
    """A title of 20 tokens before a conversation of 200, but not one that was gone on with."""
    title, talk = leaf(ids((0, 20))), leaf(ids((500, 200)), id=2)
    assert takes_over(talk, title, 0)
    assert not takes_over(talk, leaf(ids((0, 20)), turns=2), 0)
    assert not takes_over(talk, leaf(ids((0, 80))), 0)
    assert not takes_over(title, talk, 0)


def test_after_a_compaction_the_new_prefix_becomes_the_main_one():
    """Under the same head, once it has gone on for long; a sub-agent's other head never does."""
    main = leaf(ids((0, 100), (300, 100)), turns=5)
    late = leaf(ids((0, 100), (600, 50)), id=2, turns=SETTLED_TURNS)
    early = leaf(ids((0, 100), (600, 50)), id=2, turns=SETTLED_TURNS - 1)
    other = leaf(ids((900, 150)), id=2, turns=SETTLED_TURNS)
    assert takes_over(late, main, 100)
    assert not takes_over(early, main, 100)
    assert not takes_over(other, main, 100)
    assert takes_over(leaf(ids((0, 100), (300, 110)), id=1, turns=6), late, 100)


def test_digests_of_prefixes_are_those_of_the_tokens_alone():
    """Taken in one pass, they are what each prefix has on its own."""
    tokens = ids((7, 100))
    found = digests_at(tokens, [64, 3, 100, 101])
    assert found == {n: digest_of(tokens[:n]) for n in (3, 64, 100)}
    assert digest_of(tokens[:64]) != digest_of(tokens[1:65])


def test_common_counts_leading_tokens():
    """Up to the shorter one's end."""
    assert common(ids((0, 5)), ids((0, 9))) == 5
    assert common(ids((0, 5)), ids((1, 5))) == 0
    assert common(ids((0, 5)), ids((0, 3), (9, 9))) == 3
