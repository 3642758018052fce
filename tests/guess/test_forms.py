"""A tool result is indexed as the reply will write it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mlxcache.guess.forms import reply_form, unwrapped, without_line_numbers, writes_escaped

CODE = "def add(a, b):\n    return a + b\n\nclass Foo:\n    pass"


def shown(text: str, form: str) -> str:
    return "\n".join(form.format(n, line) for n, line in enumerate(text.split("\n"), 7))


NOTATIONS = {
    "Claude Code": "{:6d}→{}",
    "cat -n, OpenHands": "{:6d}\t{}",
    "OpenCode": "{:05d}| {}",
    "Codex": "L{}: {}",
    "Cline": "{} | {}",
    "Cursor": "{:6d}|{}",
    "SWE-agent": "{}:{}",
    "Goose": "{}: {}",
    "bat": "{:4d} | {}",
    "grep -n": "a/b-1.py:{}:{}",
    "grep -n without a match": "a/b-1.py-{}-{}",
}


@pytest.mark.parametrize("form", NOTATIONS.values(), ids=NOTATIONS)
@pytest.mark.parametrize("inner", [False, True])
def test_line_numbers_of_any_notation_are_removed(form: str, inner: bool) -> None:
    """And what stands around them stays, also where an empty or indented line comes first."""
    code = "\n    if x:\n\n        y()" if inner else CODE
    lines = shown(code, form).split("\n")
    for text in ("\n".join(lines), "\n".join(line.rstrip(" ") for line in lines)):
        assert without_line_numbers(text) == code
        around = f"The file is:\n{text}\n</file>"
        assert without_line_numbers(around) == f"The file is:\n{code}\n</file>"


def test_lines_around_a_match_are_numbered_like_it() -> None:
    """`grep -n -C 1` has another mark behind the number of a line that matches."""
    found = "a.py-7-def f():\na.py:8:    return 1\na.py-9-\n--\na.py-30-x\na.py:31:y"
    assert without_line_numbers(found) == "def f():\n    return 1\n\n--\nx\ny"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: json.dumps({"output": text, "metadata": {"exit_code": 0, "seconds": 0.1}}),
        lambda text: json.dumps([{"type": "text", "text": text}]),
        lambda text: json.dumps({"result": {"stdout": text, "stderr": ""}}, ensure_ascii=False),
    ],
)
def test_output_within_json_is_taken_out(wrap: Callable[[str], str]) -> None:
    """Codex and others send a command's output in an object."""
    for text in (CODE, shown(CODE, "{:6d}→{}")):
        assert reply_form(wrap(text), escaped=False) == CODE
        assert reply_form(wrap(text), escaped=True) == CODE.replace("\n", "\\n")


@pytest.mark.parametrize("text", ['{"a": 1, "b": [2, null]}', "{not JSON, but long enough}", "[]"])
def test_json_without_text_stays(text: str) -> None:
    assert unwrapped(text) == text


@pytest.mark.parametrize(
    "text", [CODE, "1: one alone", "2020-01-01\n1999-01-01", "12: a\n11: b", "10 green\n20 red", ""]
)
def test_text_without_line_numbers_stays(text: str) -> None:
    """Numbers that do not ascend, or stand alone, belong to the text."""
    assert without_line_numbers(text) == text


def test_a_family_that_writes_json_has_results_escaped() -> None:
    """Another has them as they are, without their line numbers."""
    text = shown(CODE, "{:6d}\t{}")
    assert reply_form(text, escaped=False) == CODE
    assert reply_form(text, escaped=True) == CODE.replace("\n", "\\n")
    assert reply_form(CODE, escaped=False) is None
    assert reply_form(CODE, escaped=True) == CODE.replace("\n", "\\n")
    assert reply_form("ok\nok", escaped=True) is None


def test_how_a_family_writes_arguments_is_seen_in_its_own_calls() -> None:
    """By its template."""
    assert writes_escaped(lambda value: '{"content": "' + value.replace("\n", "\\n") + '"}')
    assert not writes_escaped(lambda value: f"<parameter=content>\n{value}\n</parameter>")
