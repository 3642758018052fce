"""`mlxcache cache stats` for people: every figure once, below a heading."""

from __future__ import annotations

import pytest

from mlxcache.cli.cache import print_figures

FIGURES = {
    "ram": {
        "used_bytes": 26_000_000,
        "limit_bytes": 600_000_000,
        "withheld_bytes": 5_000_000,
        "buffer_limit": None,
        "kinds": {"pool": 37_500_000, "kv": 196_600},
    },
    "disk": {"used_bytes": 340_000, "limit_bytes": 0, "state": "ok", "kinds": {"index": 311_000}},
    "active_bytes": 170_000,
    "reserved_bytes": 112_500_000,
    "pending_bytes": 42_000,
    "sessions": 1_234,
    "requests": {"total": 3, "warm": 2, "restored": 0, "cold": 1},
    "saved": {"tokens": 900, "seconds": 1.5},
    "canonicalised": {"date": 0, "git_status": 7},
    "pressure": {"level": "normal"},
    "news": {"size_bytes": 5_000, "more": 6},
}


def printed(figures: dict[str, object], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Lines by the heading above them."""
    print_figures(figures)
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line and not line.startswith(" "):
            groups[line] = []
        elif line:
            groups[next(reversed(groups))].append(" ".join(line.split()))
    return groups


def test_figures_stand_below_headings(capsys: pytest.CaptureFixture[str]):
    """With units, and what is used beside its limit."""
    found = printed(FIGURES, capsys)
    assert found == {
        "Memory": [
            *("used 26 MB of 600 MB", "given up 5 MB", "buffer limit -"),
            *("in use by requests 170 KB", "set aside 112.5 MB", "pressure level normal"),
        ],
        "Memory budget, by what it is for": ["pool 37.5 MB", "kv 196.6 KB"],
        "Disk": ["used 340 KB", "state ok", "on its way to disk 42 KB"],
        "Disk, by what is there": ["index 311 KB"],
        "Prefix tree": ["sessions 1,234"],
        "Requests": [
            *("total 3", "warm 2", "restored 0", "cold 1"),
            *("saved tokens 900", "saved seconds 1.5"),
        ],
        "Canonicalised, in so many requests": ["git status 7"],
        "Other": ["news size 5 KB", "news more 6"],
    }


def test_a_folder_without_a_server_has_its_own_few(capsys: pytest.CaptureFixture[str]):
    """No heading stands alone, and rules that did nothing are one line."""
    found = printed({"disk": {"used_bytes": 5}, "sessions": 0}, capsys)
    assert found == {"Disk": ["used 5 bytes"], "Prefix tree": ["sessions 0"]}
    found = printed({"canonicalised": {"date": 0}}, capsys)
    assert found == {"Canonicalised, in so many requests": ["none"]}
