"""Defaults of settings, and checks of values against each other."""

from pathlib import Path
from typing import Any

import pytest

from mlxcache.config import Settings
from mlxcache.config.remote import RemoteUrl
from mlxcache.config.rules import RULES, read_rules
from mlxcache.config.settings import is_loopback
from mlxcache.errors import ConfigError


def test_the_defaults_serve_the_demo_on_this_machine_only():
    settings = Settings()
    assert settings.model is None
    assert (settings.host, settings.port) == ("127.0.0.1", 8081)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "0.0.0.0"}, "--api-key KEY"),
        ({"draft_model": "small/"}, "--model"),
        ({"adapter": "lora/"}, "--model"),
        ({"remote_key_file": Path("/key")}, "--remote URL"),
        ({"remote": RemoteUrl("s3", "b", ""), "disk": "off"}, "--disk off"),
        ({"ram": "lots"}, "not a size"),
        ({"disk": "lots"}, "not a size"),
        ({"wire": "all"}, "not a size"),
    ],
)
def test_what_contradicts_is_refused_on_construction(given: dict[str, Any], words: str):
    """The engine does not check it again. The demo has neither adapter nor draft model."""
    with pytest.raises(ConfigError, match=words):
        Settings(**given)


def test_each_alone_is_allowed():
    assert Settings(host="0.0.0.0", api_key=("k",)).host == "0.0.0.0"
    assert Settings(host="0.0.0.0", insecure=True).insecure
    assert Settings(model="m", speculate="auto").speculate_tokens == 31
    assert Settings(disk="off").disk == "off"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_addresses_are_recognised(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "mac.local", "10.0.0.1"])
def test_other_addresses_are_not_loopback(host):
    assert not is_loopback(host)


def test_the_key_is_not_in_the_repr():
    """A repr may appear in logs and tracebacks."""
    assert "hunter2" not in repr(Settings(api_key=("hunter2",)))


@pytest.mark.parametrize(
    "value",
    [
        "uuid=off,git_status=on",
        " git-status = ON , uuid=false,",
        ["uuid=off", "git_status=on"],
        {"uuid": False, "git_status": "on"},
    ],
)
def test_switches_of_rules_are_read_from_flags_variables_and_tables(value):
    assert read_rules(value) == {"uuid": False, "git_status": True}


@pytest.mark.parametrize("value", ["uuid", "uuid=maybe", "udid=on", {"uuid": 1.5}, 7, [7], True])
def test_an_invalid_switch_is_refused(value):
    with pytest.raises(ValueError, match=r"RULE=on|must be on or off|no rule"):
        read_rules(value)


def test_rules_have_their_defaults_unless_switched():
    """`no_canonicalise` overrides every switch."""
    assert Settings().rules == RULES
    switched = Settings(canonicalise={"git_status": True, "uuid": False}).rules
    assert switched == {**RULES, "git_status": True, "uuid": False}
    off = Settings(no_canonicalise=True, canonicalise={"git_status": True}).rules
    assert off == dict.fromkeys(RULES, False)
