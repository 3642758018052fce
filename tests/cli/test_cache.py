"""`mlxcache cache stats` as text: every figure once, under a heading."""

from __future__ import annotations

import re

import pytest

from mlxcache.cli.cache_figures import print_figures

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
    "tokens": {"prompt": 300, "cached": 75},
    "saved": {"tokens": 900, "seconds": 1.5},
    "canonicalised": {"date": 0, "git_status": 7},
    "pressure": {"level": "normal"},
    "news": {"size_bytes": 5_000, "more": 6},
}


def printed(figures: dict[str, object], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Printed lines by heading, without the meaning of each figure."""
    print_figures(figures)
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line and not line.startswith(" "):
            groups[line] = []
        elif line:
            groups[next(reversed(groups))].append(" ".join(re.split("  +", line.strip())[:2]))
    return groups


def test_figures_are_printed_under_headings(capsys: pytest.CaptureFixture[str]):
    found = printed(FIGURES, capsys)
    assert next(iter(found)) == "In short"
    assert found == {
        "In short": [
            *("reused 75 (25%)", "RAM 26 MB of 600 MB", "RAM, reserved 112.5 MB", "disk 340 KB"),
        ],
        "Tokens since the start": ["prompt 300"],
        "Memory": [
            *("withheld 5 MB", "buffer limit -"),
            *("in use by requests 170 KB", "memory pressure normal"),
        ],
        "Memory budget, by kind": ["pool 37.5 MB", "kv 196.6 KB"],
        "Disk": ["state ok", "pending writes 42 KB"],
        "Disk, by kind": ["index 311 KB"],
        "Prefix tree": ["sessions 1,234"],
        "Requests since the start": [
            *("total 3", "warm 2", "restored 0", "cold 1"),
            *("saved tokens 900", "time saved 1.50 s"),
        ],
        "Requests canonicalised, by rule": ["git status 7"],
        "Other": ["news size 5 KB", "news more 6"],
    }


def test_each_figure_has_its_meaning_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures(FIGURES)
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", next(one for one in lines if one.startswith("  cold")).strip()) == [
        *("cold", "1", "under half, or under 17 tokens, reused")
    ]


def test_headings_without_figures_are_omitted(capsys: pytest.CaptureFixture[str]):
    """Canonicalisation rules that changed no request are summed up as `none`."""
    found = printed({"disk": {"used_bytes": 5}, "sessions": 0}, capsys)
    assert found == {"In short": ["disk 5 bytes"], "Prefix tree": ["sessions 0"]}
    found = printed({"canonicalised": {"date": 0}}, capsys)
    assert found == {"Requests canonicalised, by rule": ["none"]}
