"""The budget of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.tree.budget import Budget


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        Budget(-1)


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
