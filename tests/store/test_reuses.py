"""Reuse counts decide the order of eviction, for every server of a folder."""

from __future__ import annotations

from mlxcache.store.index import Row
from tests.store.content import kv, opened, tokens
from tests.store.ranked import evicted

HOUR = 3600.0


def run(id: int, used: float, parent: int | None = None, start: int = 0) -> Row:
    return Row(id, "run", b"", b"", b"", start, start + 10, 1, 10, used, parent, None, None)


def gone(rows: list[Row], counts: dict[int, int], need: int = 10) -> list[int]:
    return evicted(rows, need, (), counts) or []


def test_who_was_never_found_goes_before_an_older_one_that_was():
    rows = [run(1, 0.0), run(2, HOUR), run(3, 2 * HOUR)]
    assert gone(rows, {}) == [1]
    assert gone(rows, {1: 3}) == [2]
    assert gone([run(1, 0.0), run(2, 9 * HOUR), run(3, 10 * HOUR)], {1: 10**6}) == [1]


def test_the_newest_end_of_a_conversation_has_its_uses():
    rows = [run(1, HOUR), run(2, 0.0, 1, 10), run(3, HOUR, 1, 10), run(4, HOUR + 60)]
    rows += [run(5, 2 * HOUR)]
    assert gone(rows, {1: 5}, 30) == [2, 4, 3]
    assert gone(rows, {}, 30) == [2, 3, 1]


def counts(store) -> list[int]:
    with store.database.read() as connection:
        return sorted(count for (count,) in connection.execute("SELECT count FROM found"))


def test_two_servers_count_together(folder):
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
