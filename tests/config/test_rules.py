"""Switches of canonicalisation's rules: how they are read, and what they come to."""

import pytest

from mlxcache.config import Settings
from mlxcache.config.rules import RULES, read_rules


@pytest.mark.parametrize(
    "value",
    [
        "uuid=off,git_status=on",
        " git-status = ON , uuid=false,",
        ["uuid=off", "git_status=on"],
        {"uuid": False, "git_status": "on"},
    ],
)
def test_switches_are_read(value):
    """From a flag given once or more, a variable, a table."""
    assert read_rules(value) == {"uuid": False, "git_status": True}


@pytest.mark.parametrize("value", ["uuid", "uuid=maybe", "udid=on", {"uuid": 1.5}, 7, [7], True])
def test_what_is_no_switch_is_refused(value):
    """With a sentence."""
    with pytest.raises(ValueError, match=r"RULE=on|must be on or off|no rule"):
        read_rules(value)


def test_rules_are_as_they_are_unless_switched():
    """And none is on where all are off."""
    assert Settings().rules == RULES
    switched = Settings(canonicalise={"git_status": True, "uuid": False}).rules
    assert switched == {**RULES, "git_status": True, "uuid": False}
    off = Settings(no_canonicalise=True, canonicalise={"git_status": True}).rules
    assert set(off) == set(RULES)
    assert not any(off.values())
