"""The tables of docs/reliability.md: a row for each fault, what is seen first, tests at the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE, _, END = (ROOT / "docs" / "reliability.md").read_text().partition("## Which tests show it?")


def rows_of(text: str, head: str) -> list[list[str]]:
    """The cells of all tables with this head."""
    found: list[list[str]] = []
    for table in re.findall(rf"^{re.escape(head)}\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        lines = table.splitlines()
        found += [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return found


PAGE_HEAD = "| what you see | what happened | what is lost | what the log says |"
ROWS = rows_of(PAGE, PAGE_HEAD)
TESTED = rows_of(END, "| what happened, or what is claimed | tests |")
CLAIMS = [row for row in TESTED if row[0] not in {fault for _, fault, *_ in ROWS}]
FAULTS = (
    "a batch fails",
    "raises in a prefill",
    "raises in a reply",
    "NaN",
    "no memory",
    "fails on the GPU",
    "ends a long command",
    "GPU refuses",
    "a template refuses",
    "a template or a tokenizer",
    "MLX thread dies",
    "never returns",
    "disk is full",
    "read-only",
    "seconds per write",
    "directory is removed",
    "index is locked",
    "index is damaged",
    "kill -9",
    "SIGSTOP",
    "clock jumps",
    "no file descriptors",
    "byte of the request",
    "byte of the reply",
    "1 byte per second",
    "10,000 connections",
)


def test_every_fault_has_its_row() -> None:
    for fault in FAULTS:
        assert sum(fault in row[1] for row in ROWS) == 1, fault


def test_rows_say_all_and_those_that_a_client_notices_come_first() -> None:
    """No name of a test stands between them and the reader."""
    assert all(len(row) == 4 and all(row) for row in ROWS)
    assert "`test_" not in PAGE
    for part in PAGE.split("\n## "):
        seen = [row[0] for row in rows_of(part, PAGE_HEAD)]
        unseen = [one.startswith(("nothing", "mostly nothing")) for one in seen]
        assert unseen == sorted(unseen), seen


def test_every_row_has_its_tests_at_the_end() -> None:
    assert {row[1] for row in ROWS} <= {row[0] for row in TESTED}


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row[0])
def test_the_tests_that_are_named_exist(row: list[str]) -> None:
    """A claim may have a measurement instead."""
    assert named(row[1]) or ("bin/bench" in row[1] and row in CLAIMS)


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row[0])
def test_each_claim_stands_in_the_page(row: list[str]) -> None:
    assert f"- {row[0][0].upper()}{row[0][1:]}." in " ".join(PAGE.split())


def named(cell: str) -> list[str]:
    """The tests that a cell names, each of which exists."""
    names = re.findall(r"`(test_\w+)`", cell)
    for name in names:
        pattern = re.compile(rf"^\s*(async )?def {name}\(", re.MULTILINE)
        found = [path for path in (ROOT / "tests").rglob("test_*.py") if name in path.read_text()]
        assert any(pattern.search(path.read_text()) for path in found), name
    return names
