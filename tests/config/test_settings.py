"""Values that do and do not go together."""

import pytest

from mlxcache.config import Settings
from mlxcache.config.settings import is_loopback
from mlxcache.errors import ConfigError


def test_the_defaults_serve_the_demo_on_this_machine_only():
    """No argument is needed, and nothing is reachable from outside."""
    settings = Settings()
    assert settings.model is None
    assert (settings.host, settings.port) == ("127.0.0.1", 8081)


def test_listening_beyond_this_machine_needs_a_key_or_a_clear_wish():
    """Conversations are private, so an open door is never an accident."""
    with pytest.raises(ConfigError, match="--api-key KEY"):
        Settings(host="0.0.0.0")
    assert Settings(host="0.0.0.0", api_key=("k",)).host == "0.0.0.0"
    assert Settings(host="0.0.0.0", insecure=True).insecure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_addresses_of_this_machine(host):
    """No key is needed there."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "mac.local", "10.0.0.1"])
def test_addresses_that_others_can_reach(host):
    """A name other than localhost is taken for one."""
    assert not is_loopback(host)


def test_a_draft_without_a_model_is_refused():
    """The demo has none to be drafted by."""
    with pytest.raises(ConfigError, match="--model"):
        Settings(draft_model="small/")


def test_an_adapter_without_its_model_is_refused():
    """The demo has no adapters."""
    with pytest.raises(ConfigError, match="--model"):
        Settings(adapter="lora/")


def test_the_key_is_not_in_the_repr():
    """A repr ends up in logs and tracebacks."""
    assert "hunter2" not in repr(Settings(api_key=("hunter2",)))


def test_a_wrong_size_is_found_before_anything_starts():
    """Construction checks --ram and --disk, so that the engine need not."""
    with pytest.raises(ConfigError, match="no size"):
        Settings(ram="lots")
    with pytest.raises(ConfigError, match="no size"):
        Settings(disk="lots")
    assert Settings(disk="off").disk == "off"
