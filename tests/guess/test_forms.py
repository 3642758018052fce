"""A tool result is indexed as the reply will write it."""

from __future__ import annotations

import pytest

from mlxcache.guess.forms import reply_form, without_line_numbers, writes_escaped

CODE = "def add(a, b):\n    return a + b\n\nclass Foo:\n    pass"


def shown(text: str, form: str) -> str:
    return "\n".join(form.format(n, line) for n, line in enumerate(text.split("\n"), 7))


@pytest.mark.parametrize("form", ["{:6d}\t{}", "{:6d}→{}", "{}: {}", "{:4d} | {}", "a/b.py:{}:{}"])
def test_line_numbers_of_any_notation_are_removed(form: str) -> None:
    """And what stands around them stays."""
    text = shown(CODE, form)
    assert without_line_numbers(text) == CODE
    around = f"The file is:\n{text}\n</file>"
    assert without_line_numbers(around) == f"The file is:\n{CODE}\n</file>"


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
