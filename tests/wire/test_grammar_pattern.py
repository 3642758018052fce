"""Grammars of custom tools become regular expressions."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire.grammar_pattern import MAX_PATTERN, pattern_of_lark, pattern_of_regex

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | delete
// a file, and its lines
add: "*** Add File: " name LF line+
delete: "*** Delete File: " name LF
name: /(.+)/
line: "+" /(.*)/ LF -> added

%import common.LF
"""


def matches(grammar: str, text: str) -> bool:
    return re.search(pattern_of_lark(grammar, "at"), text) is not None


def test_a_grammar_of_patches_matches_patches_and_nothing_else() -> None:
    patch = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch"
    assert matches(PATCH, patch)
    assert matches(PATCH, f"{patch}\n")
    assert matches(PATCH, "*** Begin Patch\n*** Delete File: a\n*** End Patch")
    assert not matches(PATCH, "*** Begin Patch\n*** End Patch")
    assert not matches(PATCH, patch.replace("+x", "x"))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a" | "b" "c"', ["a", "bc"], ["ac", "b", ""]),
        ('start: ("a" | "b")* "."', [".", "abba."], ["c."]),
        ('start: ["-"] INT\n%import common.INT', ["5", "-17"], ["--1", "a"]),
        ('start: "x"~3', ["xxx"], ["xx", "xxxx"]),
        ('start: "x"~1..2', ["x", "xx"], ["", "xxx"]),
        ('start: "on"i', ["ON", "on"], ["no"]),
        ('start: "a".."f" DIGIT+\n%import common.DIGIT', ["b12"], ["g1", "b"]),
        ("start: _WORD\n_WORD: /[a-z]+/i\n  | /[0-9]/", ["Ab", "7"], ["a7"]),
        ("?start: x\n!x.2: /a\\/b/", ["a/b"], ["a\\/b"]),
        ('start: "(*" "[" "\\n"', ["(*[\n"], ["(*["]),
        ('start: "a\0b" /c\0d|\\x00/', ["a\0bc\0d", "a\0b\0"], ["abcd"]),
        ('start: "\\\\\0" /\\\\\0/', ["\\\0\\\0"], ["\\x00\\x00"]),
        (r'start: "\x00".."\x05"', ["\0", "\3"], ["a"]),
        ("start: N\n%import common.NUMBER -> N", ["1.5e3", ".5"], ["e3"]),
        ("start: WS INT\n%import common (WS, INT)", [" 5"], ["5", " "]),
        ('start: start "," INT | INT\n%import common.INT', ["1", "1,22,3"], ["", "1,", ",1"]),
        ('start: line\nline: "-" line | "." "!"?', [".", "--.!"], ["-", ".-"]),
        ('start: "a" start?', ["a", "aaa"], ["", "ab"]),
        ('start: start op start | "0" | "1"\nop: "+" | "-"', ["1", "0+1-1"], ["", "1+", "10"]),
        ('start: "b" start | start "a" | start start | "c"', ["bca", "cbcaac"], ["ba", "acb"]),
        ('start: start | "a"', ["a"], ["", "aa"]),
    ],
)
def test_every_part_of_the_notation_is_read(grammar: str, good: list[str], bad: list[str]) -> None:
    assert all(matches(grammar, text) for text in good)
    assert not any(matches(grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("grammar", "error", "words"),
    [
        ('start: e\ne: "(" e ")" | "1"', Unsupported, "refers to itself"),
        ('start: start "1"', Unsupported, "refers to itself"),
        ('start: e "1" | "2"\ne: start "3"', Unsupported, "refers to itself"),
        ('start: "a"\n%import common (WS, NOTHING)', Unsupported, "imports"),
        ('start: "aa".."bb"', BadRequest, "single characters"),
        ('start: "a"\n%ignore " "', Unsupported, "%ignore"),
        ('start: "a" B\n%import python.B', Unsupported, "imports"),
        ("start: /(?=a)b/", Unsupported, "looks around"),
        ("start: /a b/x", Unsupported, "the flag x"),
        ("start{x}: x", Unsupported, "template"),
        ('start: "a', BadRequest, "unexpected"),
        ('first: "a"', BadRequest, "no rule 'start'"),
        ("start: missing", BadRequest, "no rule 'missing'"),
        ('start: ("a"', BadRequest, "no '\\)'"),
        ('start "a"', BadRequest, "no ':'"),
        ("start: /(/", BadRequest, "not a regular expression"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(
    grammar: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        pattern_of_lark(grammar, "tools[0].format.definition")
    assert str(caught.value).startswith("tools[0].format.definition")


def test_a_grammar_that_grows_without_bound_is_refused() -> None:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
    with pytest.raises(BadRequest, match="too large"):
        pattern_of_lark(f'start: r0\n{rules}\nr40: "{"x" * (MAX_PATTERN // 4)}"', "at")


def test_a_regular_expression_matches_the_whole_text() -> None:
    pattern = pattern_of_regex("a|b", "at")
    assert re.search(pattern, "a")
    assert not re.search(pattern, "ab")
    with pytest.raises(BadRequest, match="not a regular expression"):
        pattern_of_regex("(", "at")


CHAIN = "\n".join(f"r{i}: r{i + 1}" for i in range(3000))
HUGE = MAX_PATTERN - 1000


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
        f'start: r0\n{CHAIN}\nr3000: "a"',
        f'r: "{"x" * (HUGE // 2)}"\nstart: {"r " * (HUGE // 4)}',
    ],
    ids=["parentheses", "chain of rules", "large rule used often"],
)
def test_a_grammar_made_to_be_large_is_refused_at_once(grammar: str) -> None:
    """In less time and memory than the text of its expression would take."""
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="simplify it"):
            pattern_of_lark(grammar, "at")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_long_expression_is_not_compiled() -> None:
    with pytest.raises(BadRequest, match="too large"):
        pattern_of_regex("(ab|cd)" * MAX_PATTERN, "at")
