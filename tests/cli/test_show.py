"""Tables on narrow terminals: which column is shortened, and which are not."""

import re

import pytest
from rich.console import Console

from mlxcache.cli import server, show

ID = "ses_0123456789ab"
COLUMNS = (("id", "left"), ("name", "left"), ("tokens", "right"), ("last used", "right"))


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    """Make Rich treat the output as a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def printed(capsys, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    row = {"id": ID, "name": name, "tokens": "1,234,567", "last used": "12 min ago"}
    show.print_table(COLUMNS, [[row[heading] for heading, _ in COLUMNS]], cut=1)
    output = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    head, line = (one.rstrip() for one in output.splitlines())
    return head, line


def test_the_end_of_a_run_says_what_guesses_brought(capsys) -> None:
    guesses: dict[str, dict[str, float]] = {
        "drafted": {"draft": 0, "history": 1200},
        "accepted": {"draft": 0, "history": 900},
        "passes": {"draft": 0, "history": 70},
        "saved_s": {"draft": 0, "history": 12.5},
    }
    figures = {
        "requests": {"total": 2, "cold": 2, "warm": 0, "restored": 0},
        "saved": {"tokens": 0, "seconds": 0.0},
        "tokens": {"prompt": 9, "cached": 0, "restored": 0, "fed": 9},
        "guesses": guesses,
    }
    server.print_run_summary(Console(no_color=True, highlight=False, force_terminal=False), figures)
    text = capsys.readouterr().out
    assert "Guesses      900 of 1,200 tokens accepted in 70 passes, 12.5 s saved" in text
    guesses["saved_s"]["history"] = -0.5
    server.print_run_summary(Console(no_color=True, highlight=False, force_terminal=False), figures)
    assert "in 70 passes, 0.50 s lost" in capsys.readouterr().out


@pytest.mark.parametrize("width", [52, 60, 80, 119])
def test_only_the_named_column_is_cut(capsys, monkeypatch, width):
    head, line = printed(capsys, monkeypatch, "fix the parser " * 10, width)
    assert len(head) <= width
    assert width - 3 <= len(line) <= width
    assert line.startswith(ID)
    assert line.endswith(("1,234,567  12 min ago", "1,234,567 12 min ago"))
    assert "fix the par" in line
    assert "…" in line


def test_wide_characters_count_twice(capsys, monkeypatch):
    line = printed(capsys, monkeypatch, "修复解析器" * 20, 80)[1]
    assert line.endswith("12 min ago")
    assert len(line) + sum("\u4e00" <= one <= "\u9fff" for one in line) <= 80


def test_a_row_that_fits_is_not_cut(capsys, monkeypatch):
    line = printed(capsys, monkeypatch, "fix the parser", 80)[1]
    assert line == f"{ID}  fix the parser  1,234,567  12 min ago"


def test_a_terminal_narrower_than_the_figures_wraps_lines(capsys, monkeypatch):
    line = printed(capsys, monkeypatch, "fix the parser " * 10, 20)[1]
    assert line.startswith(f"{ID} fix the p… ")
    assert line.endswith("1,234,567 12 min ago")


def test_facts_are_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    show.print_facts([("namespace", "0123456789abcdef" * 4)])
    assert capsys.readouterr().out.rstrip() == "namespace  " + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.0001, "<0.01 s"),
        (0.0049, "<0.01 s"),
        (0.3, "0.30 s"),
        (9.94, "9.94 s"),
        (59.9, "59.9 s"),
        (119.7, "2 min 0 s"),
        (3599.0, "59 min 59 s"),
        (7300.0, "2 h 1 min"),
    ],
)
def test_a_short_duration_is_not_nothing_and_none_has_a_60th_second(seconds, words):
    assert show.format_duration(seconds) == words


def test_one_thing_is_singular():
    assert [show.format_count(n, "token") for n in (0, 1, 2345)] == [
        "0 tokens",
        "1 token",
        "2,345 tokens",
    ]


def test_a_share_of_reuse_counts_what_was_computed():
    """Of a prompt that was cancelled, only what was computed of it."""
    tokens = {"prompt_tokens": 1000, "cached_tokens": 60, "restored_tokens": 0, "fed_tokens": 40}
    assert show.format_reuse(tokens) == "60 of 100 prompt tokens (60%)"
    tokens["restored_tokens"] = 10
    assert show.format_reuse(tokens) == "60 of 100 prompt tokens (60%), 10 of them from disk"


def test_time_saved_is_a_minimum_where_its_cost_is_not_known_for_all_tokens():
    """As for tokens at positions where no prefill was measured."""
    saved = {"tokens": 900, "seconds": 61.0}
    assert show.format_saved(900, saved) == "1 min 1 s"
    assert show.format_saved(1000, saved) == "at least 1 min 1 s"
