"""The rules are one list, whether in the settings, in the code or in the documentation."""

import re
from pathlib import Path

from mlxcache.config.rules import RULES
from mlxcache.prompt.canonical.table import TABLE

PAGE = Path(__file__).parents[3] / "docs" / "canonicalisation.md"


def test_every_rule_is_described_and_has_a_switch():
    """And none besides."""
    assert [rule.name for rule in TABLE] == list(RULES)


def test_the_page_shows_the_table():
    """Row by row, word for word."""
    shown = re.findall(r"^\| (`\w+` \| (?:on|off) \|.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert shown == [
        f"`{r.name}` | {'on' if RULES[r.name] else 'off'} | {r.shape} | {r.seen} | {r.does}"
        for r in TABLE
    ]
