"""A server's place in its cache folder."""

import logging

import pytest

from mlxcache.cli.sharing import sharing
from mlxcache.config import Settings
from mlxcache.store.lock import InUse, exclusive_lock, servers

URL = "http://127.0.0.1:8081"


def test_a_server_is_seen_as_long_as_it_runs(tmp_path):
    """With its address and its model."""
    with sharing(Settings(cache_dir=tmp_path, model="org/name"), URL):
        [one] = servers(tmp_path)
        assert (one.url, one.model) == (URL, "org/name")
        with pytest.raises(InUse, match="org/name"), exclusive_lock(tmp_path):
            pass
    assert servers(tmp_path) == []


def test_a_folder_that_is_being_changed_is_waited_for_by_hand(tmp_path):
    """Unless the server is to keep nothing there."""
    with exclusive_lock(tmp_path):
        with pytest.raises(InUse), sharing(Settings(cache_dir=tmp_path), URL):
            pass
        with sharing(Settings(cache_dir=tmp_path, disk="off"), URL):
            assert servers(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_no_reason_not_to_serve(tmp_path, caplog):
    """It is said once."""
    (tmp_path / "file").write_text("")
    with (
        caplog.at_level(logging.WARNING, "mlxcache"),
        sharing(Settings(cache_dir=tmp_path / "file" / "below"), URL),
    ):
        pass
    assert len(caplog.records) == 1
