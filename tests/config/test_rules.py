"""Switches of canonicalisation rules."""

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
def test_switches_are_read_from_flags_variables_and_tables(value):
    """Names may have dashes, states any case."""
    assert read_rules(value) == {"uuid": False, "git_status": True}


@pytest.mark.parametrize("value", ["uuid", "uuid=maybe", "udid=on", {"uuid": 1.5}, 7, [7], True])
def test_an_invalid_switch_is_refused(value):
    """The error names the expected form or the rules."""
    with pytest.raises(ValueError, match=r"RULE=on|must be on or off|no rule"):
        read_rules(value)


def test_rules_have_their_defaults_unless_switched():
    """`no_canonicalise` overrides every switch."""
    assert Settings().rules == RULES
    switched = Settings(canonicalise={"git_status": True, "uuid": False}).rules
    assert switched == {**RULES, "git_status": True, "uuid": False}
    off = Settings(no_canonicalise=True, canonicalise={"git_status": True}).rules
    assert set(off) == set(RULES)
    assert not any(off.values())
