"""The tables of docs/reliability.md: a row for each fault, and for each row tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLES.splitlines()
    if line.startswith("| ") and not line.startswith(("| fault", "| claim"))
]
CLAIMS = [row for row in ROWS if len(row) == 2]
ROWS = [row for row in ROWS if len(row) != 2]
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
        assert sum(fault in row[0] for row in ROWS) == 1, fault


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_says_all_and_its_tests_exist(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row[2:4])
    assert named(row[4])


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row[0])
def test_every_claim_has_a_test_or_a_measurement(row: list[str]) -> None:
    assert named(row[1]) or "bin/bench" in row[1]


def named(cell: str) -> list[str]:
    """The tests that a cell names, each of which exists."""
    names = re.findall(r"`(test_\w+)`", cell)
    for name in names:
        pattern = re.compile(rf"^\s*(async )?def {name}\(", re.MULTILINE)
        found = [path for path in (ROOT / "tests").rglob("test_*.py") if name in path.read_text()]
        assert any(pattern.search(path.read_text()) for path in found), name
    return names
