"""Finding strings in text that arrives in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxcache.model.output import Finder, Thought, Visible

letters = st.text("ab\n<", max_size=30)
patterns = st.lists(st.text("ab\n<", min_size=1, max_size=5), max_size=4)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({c % (len(text) + 1) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


def first_completed(text: str, strings: list[str]) -> tuple[str, str | None]:
    """What a search of the whole text finds: the shortest prefix that ends in one of `strings`."""
    for end in range(1, len(text) + 1):
        found = [s for s in strings if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, patterns, st.lists(st.integers(0, 30)))
def test_any_cut_finds_what_the_whole_text_has(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    finder = Finder(strings)
    out, found, rest = "", None, ""
    for piece in cut(text, cuts):
        if found is not None:
            rest += piece
            continue
        safe, found, rest = finder.feed(piece)
        out += safe
    out += finder.flush()
    assert (out, found) == first_completed(text, strings)
    assert out + (found or "") + rest == text


@given(letters, patterns)
def test_nothing_is_held_without_reason(text: str, strings: list[str]) -> None:
    finder = Finder(strings)
    safe, found, _ = finder.feed(text)
    held = finder.flush()
    if found is None:
        assert safe + held == text
        assert not held or any(s.startswith(held) and s != held for s in strings)


def test_the_longer_of_two_that_end_together_wins() -> None:
    assert Finder(["b", "ab"]).feed("xab") == ("x", "ab", "")
    assert Finder(["abc", "b"]).feed("xab") == ("xa", "b", "")


def test_an_endless_near_miss_flows_on() -> None:
    finder = Finder(["aab"])
    assert [finder.feed("a")[0] for _ in range(5)] == ["", "", "a", "a", "a"]


def test_a_stop_string_is_shown_on_request() -> None:
    assert [Visible(["ab"], shown).add("x ab y") for shown in (False, True)] == ["x ", "x ab"]


def test_blank_text_is_let_out_at_once_inside_of_a_text() -> None:
    """Before a text it may be the template's own."""
    assert Visible(()).add(" ") == ""
    assert Visible((), begun=True).add(" ") == " "


def test_blank_text_before_a_block_is_dropped_and_text_is_not() -> None:
    blank = Visible(())
    assert blank.add("\n\n") == ""
    assert blank.before_call() == ""
    text = Visible(())
    assert text.add("so\n\n") == "so\n"
    assert text.before_call() == ""
    lone = Visible(())
    assert lone.add(" \n") + lone.flush() == " \n"


@given(letters, st.lists(st.integers(0, 30)))
def test_thoughts_lose_one_newline_at_each_end(text: str, cuts: list[int]) -> None:
    """Closed, it is the text less those; broken off, the last newline stays."""
    closed, broken = Thought(), Thought()
    pieces = cut(text, cuts)
    whole = text.removeprefix("\n") if text.strip() else ""
    assert "".join(map(closed.add, pieces)) == whole.removesuffix("\n")
    assert "".join(map(broken.add, pieces)) + broken.flush() == whole
