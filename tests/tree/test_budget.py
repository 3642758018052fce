"""The budget of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.tree.budget import Budget


def test_reserve_is_all_or_nothing():
    """What does not fit changes nothing."""
    budget = Budget(100)
    assert budget.reserve("kv", 60)
    assert not budget.reserve("active", 41)
    assert (budget.used, budget.free, budget.by_kind()) == (60, 40, {"kv": 60})
    assert budget.reserve("active", 40)
    assert budget.free == 0


def test_release_makes_room_again():
    """The high water stays where it was."""
    budget = Budget(100)
    budget.reserve("kv", 100)
    budget.release("kv", 70)
    assert budget.reserve("kv", 10)
    assert (budget.used, budget.high_water) == (40, 100)


def test_a_kind_never_falls_below_zero():
    """Releasing what was not charged is refused and changes nothing, whatever other kinds have."""
    budget = Budget(100)
    budget.reserve("kv", 50)
    budget.reserve("pool", 5)
    with pytest.raises(ValueError, match="pool has 5 bytes"):
        budget.release("pool", 6)
    with pytest.raises(ValueError, match="active has 0 bytes"):
        budget.charge("active", -1)
    assert budget.by_kind() == {"kv": 50, "pool": 5}


def test_charge_may_go_over_the_limit():
    """Bytes that are there already are counted; nothing can be reserved then."""
    budget = Budget(100)
    budget.charge("pool", 130)
    assert (budget.used, budget.free, budget.high_water) == (130, 0, 130)
    assert not budget.reserve("kv", 1)
    assert not budget.reserve("kv", 0)
    budget.charge("pool", -60)
    assert (budget.used, budget.free) == (70, 30)


@pytest.mark.parametrize("verb", ["reserve", "release"])
def test_negative_amounts_are_refused(verb):
    """A negative reservation would be a release in disguise."""
    with pytest.raises(ValueError, match="-1 bytes"):
        getattr(Budget(10), verb)("kv", -1)


def test_a_negative_limit_is_refused():
    """A limit is a number of bytes."""
    with pytest.raises(ValueError, match="-1 bytes"):
        Budget(-1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "release"]),
        st.sampled_from(["kv", "checkpoints", "active"]),
        st.integers(0, 60),
    )
)


@given(limit=st.integers(0, 100), steps=STEPS)
def test_reserving_never_exceeds_the_limit(limit, steps):
    """In any order of steps; used, kinds and high water are those of a plain sum."""
    budget = Budget(limit)
    kinds: dict[str, int] = {}
    high = 0
    for verb, kind, n in steps:
        before = sum(kinds.values())
        if verb == "reserve":
            fits = before + n <= limit
            assert budget.reserve(kind, n) is fits
            kinds[kind] = kinds.get(kind, 0) + (n if fits else 0)
        elif n > kinds.get(kind, 0):
            with pytest.raises(ValueError, match="cannot be released"):
                budget.release(kind, n)
        else:
            budget.release(kind, n)
            kinds[kind] = kinds.get(kind, 0) - n
        high = max(high, sum(kinds.values()))
        assert budget.used == sum(kinds.values()) <= limit
        assert budget.high_water == high
        assert budget.free == limit - budget.used
        assert {k: v for k, v in budget.by_kind().items() if v} == {
            k: v for k, v in kinds.items() if v
        }


def test_a_member_has_what_others_left():
    """Free is the least of what the own limit and the shared limit leave; one step fills both."""
    shared = Budget(100)
    one, other = Budget(80, shared), Budget(70, shared)
    assert shared.reserve("weights:a", 10)
    assert other.reserve("kv", 60)
    assert (one.free, other.free, shared.free) == (30, 10, 30)
    assert not one.reserve("kv", 31)
    assert (one.used, shared.used) == (0, 70)
    assert one.reserve("kv", 30)
    other.release("kv", 60)
    assert (one.free, other.free, shared.free) == (50, 60, 60)
    assert shared.by_kind() == {"weights:a": 10}
    assert (shared.used, shared.high_water) == (40, 100)


def test_no_member_reserves_above_the_shared_limit():
    """Weights charged above the limit leave nothing to anybody, and a free of 0."""
    shared = Budget(100)
    one = Budget(100, shared)
    shared.charge("weights:a", 130)
    assert (one.free, shared.free) == (0, 0)
    assert not one.reserve("kv", 0)
    one.charge("kv", 5)
    assert (one.used, shared.used, shared.high_water) == (5, 135, 135)


MEMBER_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "release", "charge"]),
        st.sampled_from([0, 1, 2]),
        st.sampled_from(["kv", "pool"]),
        st.integers(-60, 60),
    )
)


@given(limits=st.lists(st.integers(0, 120), min_size=3, max_size=3), steps=MEMBER_STEPS)
def test_shared_bytes_are_those_of_the_members_and_its_own(limits, steps):
    """In any order of steps, also refused ones; reserving keeps both limits."""
    shared = Budget(limits[0])
    budgets = [shared, *(Budget(limit, shared) for limit in limits[1:])]
    kinds: list[dict[str, int]] = [{}, {}, {}]
    highs = [0, 0, 0]

    def used(which: int) -> int:
        return sum(sum(one.values()) for one in (kinds if which == 0 else [kinds[which]]))

    for verb, which, kind, n in steps:
        budget, had = budgets[which], kinds[which].get(kind, 0)
        fits = n <= limits[which] - used(which) and n <= limits[0] - used(0)
        if (n < 0 and verb != "charge") or (verb == "release" and n > had) or n < -had:
            with pytest.raises(ValueError, match="bytes"):
                getattr(budget, verb)(kind, n)
        elif verb == "reserve":
            assert budget.reserve(kind, n) is fits
            kinds[which][kind] = had + n * fits
        else:
            getattr(budget, verb)(kind, n)
            kinds[which][kind] = had + (n if verb == "charge" else -n)
        for i, each in enumerate(budgets):
            highs[i] = max(highs[i], used(i))
            assert (each.used, each.high_water) == (used(i), highs[i])
            left = min(limits[i] - used(i), limits[0] - used(0))
            assert each.free == max(0, left)
            assert {k: v for k, v in each.by_kind().items() if v} == {
                k: v for k, v in kinds[i].items() if v
            }
