"""Which checkpoints stay: by random paths, and on a conversation that grows."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.tree.thinning import FEWEST, NEWEST, allowed, checkpoints_to_drop

PATHS = st.lists(st.integers(1, 3000), min_size=1, max_size=80).map(
    lambda steps: list(accumulate(steps))
)


def worst(held: list[int], every: list[int], end: int) -> float:
    """The most that a restart at any of `every` feeds more, as a share of what is fed anyway."""
    return max(
        ((at - max((p for p in held if p <= at), default=0)) / max(1, end - at) for at in every),
        default=0.0,
    )


@settings(deadline=None)
@given(path=PATHS, most=st.integers(0, 90), data=st.data())
def test_what_is_to_stay_stays(path, most, data):
    """The first, the newest, the asked for; as many go as it takes, and no more."""
    kept = data.draw(st.sets(st.sampled_from(path)))
    parted = data.draw(st.sets(st.sampled_from(path)))
    gone = checkpoints_to_drop(path, path[-1], most, kept=kept, parted=parted)
    left = [at for at in path if at not in gone]
    assert len(set(gone)) == len(gone)
    assert set(gone) <= set(path)
    assert {path[0], *path[-NEWEST:], *kept} <= set(left)
    assert len(left) >= min(most, len(path))
    movable = set(path[1:-NEWEST]) - kept
    assert len(left) == most or (len(left) < most and not gone) or not movable & set(left)


@settings(deadline=None)
@given(path=PATHS, most=st.integers(0, 90), end=st.integers(0, 9000))
def test_each_that_goes_is_worth_least(path, most, end):
    """Against the definition, step by step."""
    end += path[-1]
    left = list(path)
    for at in checkpoints_to_drop(path, end, most):
        costs = {
            here: (after - before) / max(1, end - after)
            for before, here, after in zip(left, left[1:], left[2:], strict=False)
            if here in left[1:-NEWEST]
        }
        assert costs[at] == min(costs.values())
        left.remove(at)


@settings(deadline=None)
@given(path=PATHS, worth=st.floats(0.01, 2.0))
def test_what_is_worth_enough_stays(path, worth):
    """Without a limit in number, the rest covers the path so well as that."""
    gone = checkpoints_to_drop(path, path[-1], 0, worth=worth)
    left = [at for at in path if at not in gone]
    assert worst(left, gone, path[-1]) < worth
    threes = zip(left[:-NEWEST], left[1:-NEWEST], left[2:], strict=False)
    assert all((c - a) / max(1, path[-1] - c) >= worth for a, _, c in threes)


def test_where_paths_part_counts_more():
    """Of two that would be worth the same."""
    path = list(range(100, 2100, 100))
    plain, parting = (checkpoints_to_drop(path, 2000, 8, parted=parted) for parted in ((), (500,)))
    assert 500 in plain
    assert 500 not in parting


def test_a_growing_conversation_stays_covered():
    """One checkpoint more a message, one gone: an edit anywhere costs a fraction of itself more."""
    kv, size, limit = 1000, 300_000, 0
    held: list[int] = []
    every: list[int] = []
    for message in range(1, 301):
        end = 500 * message
        every.append(end)
        held.append(end)
        most = allowed(end * kv, size, limit) // size
        gone = checkpoints_to_drop(held, end, most)
        held = [at for at in held if at not in gone]
        assert len(held) <= max(most, NEWEST + 1)
        assert held[0] == 500
        assert message % 7 or worst(held, every, end) <= 0.5
    assert size * len(held) <= FEWEST * size + end * kv
