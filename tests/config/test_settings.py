"""Defaults of settings, and checks of values against each other."""

import pytest

from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry
from mlxcache.config.settings import is_loopback
from mlxcache.errors import ConfigError


def test_the_defaults_serve_the_demo_on_this_machine_only():
    """No argument is needed, and other machines cannot connect."""
    settings = Settings()
    assert settings.model is None
    assert (settings.host, settings.port) == ("127.0.0.1", 8081)


def test_listening_on_all_addresses_needs_a_key_or_insecure():
    """Conversations are private."""
    with pytest.raises(ConfigError, match="--api-key KEY"):
        Settings(host="0.0.0.0")
    assert Settings(host="0.0.0.0", api_key=("k",)).host == "0.0.0.0"
    assert Settings(host="0.0.0.0", insecure=True).insecure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_addresses_are_recognised(host):
    """They need no key."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "mac.local", "10.0.0.1"])
def test_other_addresses_are_not_loopback(host):
    """Nor are names other than localhost."""
    assert not is_loopback(host)


def test_a_draft_without_a_model_is_refused():
    """The demo model has no draft model."""
    with pytest.raises(ConfigError, match="--model"):
        Settings(draft_model="small/")


def test_guesses_do_not_go_with_a_draft_model():
    """Each alone does; a table of config.toml counts like the flag."""
    assert Settings(model="m", speculate="auto").speculate_tokens == 31
    with pytest.raises(ConfigError, match="--draft-model"):
        Settings(model="m", draft_model="d", speculate="auto")
    entries = (ModelEntry("m", draft_model="d"), ModelEntry("n"))
    with pytest.raises(ConfigError, match="--speculate off"):
        Settings(model="m", models=entries, speculate="auto")


def test_an_adapter_without_its_model_is_refused():
    """The demo model has no adapters."""
    with pytest.raises(ConfigError, match="--model"):
        Settings(adapter="lora/")


def test_the_key_is_not_in_the_repr():
    """A repr may appear in logs and tracebacks."""
    assert "hunter2" not in repr(Settings(api_key=("hunter2",)))


def test_an_invalid_size_is_refused_on_construction():
    """The engine does not check --ram and --disk again."""
    with pytest.raises(ConfigError, match="not a size"):
        Settings(ram="lots")
    with pytest.raises(ConfigError, match="not a size"):
        Settings(disk="lots")
    with pytest.raises(ConfigError, match="not a size"):
        Settings(wire="all")
    assert Settings(disk="off").disk == "off"
