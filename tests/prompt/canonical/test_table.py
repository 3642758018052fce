"""The rules are one list, whether in the settings or in the documentation."""

import re
from pathlib import Path

from mlxcache.config.rules import RULES

PAGE = Path(__file__).parents[3] / "docs" / "how-caching-works.md"


def test_the_page_describes_every_rule_and_its_default():
    """In the order of the settings, and none besides."""
    rows = re.findall(r"^\| `(\w+)` \| (on|off) \|(.+)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [(name, default == "on") for name, default, _ in rows] == list(RULES.items())
    for name, _, cells in rows:
        described = [cell.strip() for cell in cells.split(" | ")]
        assert len(described) == 3, name
        assert all(described), name
