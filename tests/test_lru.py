"""Containers bounded by count and size."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from mlxcache.lru import LRU, LatestByGroup


def test_the_least_recently_used_is_evicted_first() -> None:
    kept: LRU[str, str] = LRU(10, len)
    for key in "abc":
        kept.put(key, "123")
    assert kept.get("a") == "123"
    assert kept.put("d", "123") == ["123"]
    assert [kept.get(key) for key in "abcd"] == ["123", None, "123", "123"]
    assert kept.put("d", "12345678901") == ["123", "123", "12345678901"]
    assert [kept.get(key) for key in "abcd"] == [None] * 4
    assert kept.total == 0
    assert kept.setdefault("a", "1") == "1"
    assert kept.setdefault("a", "2") == "1"


def test_a_peek_is_no_use() -> None:
    kept: LRU[int, str] = LRU(2)
    kept.put(1, "one")
    kept.put(2, "two")
    assert kept.peek(1) == "one"
    assert kept.put(3, "three") == ["one"]
    assert kept.values() == ["two", "three"]
    assert kept.pop(2) == "two"
    assert kept.pop(2) is None
    assert (len(kept), kept.total) == (1, 1)


steps = st.lists(st.tuples(st.sampled_from("pgs"), st.integers(0, 5), st.integers(0, 6)))


@given(steps)
def test_an_lru_does_what_an_ordered_dictionary_does(steps: list[tuple[str, int, int]]) -> None:
    kept: LRU[int, int] = LRU(10, lambda value: value)
    plain: OrderedDict[int, int] = OrderedDict()
    for what, key, value in steps:
        if what == "g":
            assert kept.get(key) == plain.get(key)
        elif what == "p":
            kept.put(key, value)
            plain[key] = value
        else:
            assert kept.setdefault(key, value) == plain.setdefault(key, value)
        if key in plain:
            plain.move_to_end(key)
        while sum(plain.values()) > 10:
            plain.popitem(last=False)
        assert kept.values() == list(plain.values())
        assert kept.total == sum(plain.values()) <= 10


def test_groups_keep_their_latest_values() -> None:
    kept: LatestByGroup[str, str] = LatestByGroup(each=2, count=4, limit=100, size=len)
    for value in ("a1", "a2", "a3"):
        kept.add("a", value)
    assert kept.of("a") == ("a2", "a3")
    kept.add("a", "a4", replaced=[kept.of("a")[1]])
    assert kept.of("a") == ("a2", "a4")
    for value in ("b1", "b2", "b3"):
        kept.add("b", value, each=3)
    assert kept.items() == (("a", "a4"), ("b", "b1"), ("b", "b2"), ("b", "b3"))
    kept.add("c", "x" * 97)
    assert kept.items() == (("b", "b3"), ("c", "x" * 97))
    assert (len(kept), kept.total) == (2, 99)
