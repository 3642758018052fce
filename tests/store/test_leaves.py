"""Rules that assign requests to leaves, on token ids alone."""

import numpy as np
import pytest

from mlxcache.store.leaves import (
    SETTLED_TURNS,
    Leaf,
    conversation_key_tokens,
    digest_of,
    digests_at,
    find_continued,
    replaces_main,
)


def ids(*parts):
    arrays = [np.arange(start, start + count) for start, count in parts]
    return np.concatenate(arrays).astype(np.int32)


def leaf(tokens, *, id=1, key=10, turns=1, kind="main"):
    return Leaf(tokens, kind, len(tokens), key, turns, 0.0, id=id, session="ses_1")


@pytest.mark.parametrize(
    ("marks", "key"),
    [((), 50), ((40,), 40), ((10, 40), 40), ((10, 20, 30, 40), 20)],
)
def test_the_conversation_key_covers_the_first_message_after_the_head(marks, key):
    assert conversation_key_tokens(marks, 50) == key


def test_a_request_continues_the_leaf_it_shares_most_with():
    short, long = leaf(ids((0, 20)), id=1), leaf(ids((0, 30), (900, 5)), id=2)
    leaves = [short, long]
    assert find_continued(ids((0, 30), (500, 5)), leaves) is long
    assert find_continued(ids((0, 9), (500, 50)), leaves) is None
    assert find_continued(ids((0, 5)), leaves) is None


def test_a_fork_and_its_origin_go_their_own_ways():
    origin, fork = leaf(ids((0, 20)), id=1), leaf(ids((0, 20)), id=2)
    assert find_continued(ids((0, 25)), [fork, origin]) is origin
    origin = leaf(ids((0, 25)), id=1)
    assert find_continued(ids((0, 20), (700, 5)), [origin, fork]) is fork


def test_a_side_request_that_came_first_is_not_the_main_leaf():
    title, talk = leaf(ids((0, 20))), leaf(ids((500, 200)), id=2)
    assert replaces_main(talk, title, 0)
    assert not replaces_main(talk, leaf(ids((0, 20)), turns=2), 0)
    assert not replaces_main(talk, leaf(ids((0, 80))), 0)
    assert not replaces_main(title, talk, 0)


def test_after_a_compaction_the_new_prefix_becomes_the_main_one():
    main = leaf(ids((0, 100), (300, 100)), turns=5)
    late = leaf(ids((0, 100), (600, 50)), id=2, turns=SETTLED_TURNS)
    early = leaf(ids((0, 100), (600, 50)), id=2, turns=SETTLED_TURNS - 1)
    other = leaf(ids((900, 150)), id=2, turns=SETTLED_TURNS)
    assert replaces_main(late, main, 100)
    assert not replaces_main(early, main, 100)
    assert not replaces_main(other, main, 100)
    assert replaces_main(leaf(ids((0, 100), (300, 110)), id=1, turns=6), late, 100)


def test_digests_of_prefixes_are_those_of_the_tokens_alone():
    tokens = ids((7, 100))
    found = digests_at(tokens, [64, 3, 100, 101])
    assert found == {n: digest_of(tokens[:n]) for n in (3, 64, 100)}
    assert digest_of(tokens[:64]) != digest_of(tokens[1:65])
