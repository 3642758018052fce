"""Ids as one owner's: apart from everybody else's, and plain again for who knows the owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.common_prefix import common_length
from mlxcache.owner import MARKED, own_ids, owner_of, plain_ids
from mlxcache.types import Tokens, token_ids

ALICE, BOB = owner_of("alice's key"), owner_of("bob's key")
IDS = st.lists(st.integers(0, 300_000), max_size=12).map(token_ids)


def test_an_owner_is_told_by_the_key_alone_and_does_not_tell_it() -> None:
    """It is kept in tables, so it must be the same at each start."""
    assert owner_of("k1") == owner_of("k1") != owner_of("k2")
    assert "secret" not in owner_of("secret")


@given(IDS)
def test_ids_come_back(ids: Tokens) -> None:
    assert plain_ids(own_ids(ids, ALICE), ALICE).tolist() == ids.tolist()


@given(IDS.filter(len))
def test_two_owners_share_not_even_the_first_token(ids: Tokens) -> None:
    """Whatever goes by prefixes of ids then keeps them apart."""
    mine, theirs = own_ids(ids, ALICE), own_ids(ids, BOB)
    assert common_length(mine, theirs) == 0
    assert common_length(mine, ids) == 0
    assert (mine[:MARKED] < 0).all()
    assert mine[MARKED:].tolist() == ids[MARKED:].tolist()


@given(IDS, st.integers(0, 12))
def test_a_prefix_of_an_owners_ids_is_the_owners_prefix(ids: Tokens, length: int) -> None:
    """Or what was forked or cut at a few tokens would belong to nobody."""
    assert own_ids(ids, ALICE)[:length].tolist() == own_ids(ids[:length], ALICE).tolist()


@given(IDS)
def test_nobodys_ids_are_as_they_are(ids: Tokens) -> None:
    """So that files of before stay valid."""
    assert own_ids(ids, None) is ids
    assert plain_ids(ids, None) is ids


@pytest.mark.parametrize("at", range(MARKED))
def test_ids_of_an_image_at_the_front_come_back_too(at: int) -> None:
    """They are less than 0 already."""
    ids = token_ids([*range(100, 100 + at), -2_000_000_000 + at, *range(100 + at, 120)])
    assert plain_ids(own_ids(ids, ALICE), ALICE).tolist() == ids.tolist()
