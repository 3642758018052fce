"""Reuse counts decide the order of eviction, for every server of a folder."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxcache.store.index import MOST_REUSES, Row
from tests.store.content import kv, opened, tokens
from tests.store.ranked import evicted

HOUR = 3600.0


def run(id: int, used: float, parent: int | None = None, start: int = 0) -> Row:
    return Row(id, "run", b"", b"", b"", start, start + 10, 1, 10, used, parent, None, None)


def gone(rows: list[Row], counts: dict[int, int], need: int = 10) -> list[int]:
    return evicted(rows, need, (), counts) or []


def test_who_was_never_found_goes_before_an_older_one_that_was():
    """Reuses delay eviction, but not forever."""
    rows = [run(1, 0.0), run(2, HOUR), run(3, 2 * HOUR)]
    assert gone(rows, {}) == [1]
    assert gone(rows, {1: 3}) == [2]
    assert gone([run(1, 0.0), run(2, 9 * HOUR), run(3, 10 * HOUR)], {1: 10**6}) == [1]


def test_the_newest_end_of_a_conversation_has_its_uses():
    """The newest run of a conversation inherits the reuses of the run before it."""
    rows = [run(1, HOUR), run(2, 0.0, 1, 10), run(3, HOUR, 1, 10), run(4, HOUR + 60)]
    rows += [run(5, 2 * HOUR)]
    assert gone(rows, {1: 5}, 30) == [2, 4, 3]
    assert gone(rows, {}, 30) == [2, 3, 1]


@given(
    uses=st.dictionaries(st.integers(1, 8), st.integers(0, 50)),
    pinned=st.sets(st.integers(1, 8)),
    times=st.lists(st.integers(0, 10**6), min_size=8, max_size=8),
    need=st.integers(1, 80),
)
def test_pinned_ones_go_last_whatever_was_found(uses, pinned, times, need):
    """Evicted files are enough, in one order for any need, and never younger and reused more."""
    rows = [run(id, float(at)) for id, at in enumerate(times, 1)]
    chosen = evicted(rows, need, pinned, uses) or []
    assert len(chosen) == -(-need // 10)
    every = evicted(rows, 80, pinned, uses) or []
    assert chosen == every[: len(chosen)]
    assert [id in pinned for id in every] == sorted(id in pinned for id in every)
    used = {row.id: row.used for row in rows}
    for before, after in pairwise(every):
        if (before in pinned) == (after in pinned) and used[before] > used[after]:
            assert min(uses.get(before, 0), MOST_REUSES) < min(uses.get(after, 0), MOST_REUSES)


def counts(store) -> list[int]:
    with store.database.read() as connection:
        return sorted(count for (count,) in connection.execute("SELECT count FROM found"))


def test_two_servers_count_together(folder):
    """Each reuse counts once, for the files reused, and is removed with the file."""
    ids = tokens(300)
    with opened(folder, 8 << 20) as one, opened(folder, 8 << 20) as other:
        one.write_run(ids[:128], 0, kv(ids[:128]))
        one.write_run(ids, 128, kv(ids, 128))
        for store in (one, other, other):
            store.reused(store.find(ids, touch=False), 128)
            store.note_uses()
        assert counts(one) == [3]
        one.reused(one.find(ids, touch=False), 300)
        one.note_uses()
        assert counts(other) == [1, 4]
        one.clear()
        assert counts(other) == []


def test_an_index_that_lacks_a_table_is_rebuilt(folder):
    """The files stay; the numbers of uses are lost with it."""
    ids = tokens(200)
    with opened(folder, 8 << 20) as store:
        store.write_run(ids, 0, kv(ids))
        with store.database.write() as connection:
            connection.execute("DROP TABLE found")
    with opened(folder, 8 << 20) as store:
        assert store.find(ids).length == 200
        assert store.stats().quarantined == 1
        store.reused(store.find(ids), 200)
        store.note_uses()
        assert counts(store) == [1]
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    with opened(folder, 8 << 20) as store:
        assert store.find(ids).length == 200
        assert counts(store) == []
