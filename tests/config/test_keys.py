"""API keys from flags, variables and a file, and their ownership of sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcache.config import load_settings, read_keys
from mlxcache.errors import ConfigError


def keys_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_single_key_is_shared_by_all_clients(tmp_path: Path) -> None:
    found = read_keys(load_settings({"api_key": "k1"}, {}))
    assert (found.values, found.owned) == (("k1",), False)
    assert not read_keys(load_settings({}, {})).values
    assert read_keys(load_settings({}, {"MLXCACHE_API_KEY": "k2"})).values == ("k2",)


def test_each_of_several_keys_owns_its_sessions() -> None:
    found = read_keys(load_settings({"api_key": ["k1", "k2"]}, {}))
    assert (found.values, found.owned) == (("k1", "k2"), True)
    assert not read_keys(load_settings({"api_key": ["k1", "k1"]}, {})).owned


def test_each_key_of_a_file_owns_its_sessions(tmp_path: Path) -> None:
    """Also a file's only key, because others may be added later."""
    path = keys_file(tmp_path, "# team\n\nalice: a-key\n  plain-key  \nbob:b:key\n:colon:key\n")
    found = read_keys(load_settings({"api_keys_file": str(path)}, {}))
    assert found.values == ("a-key", "plain-key", "b:key", "colon:key")
    assert found.names == ("alice", "bob")
    one = keys_file(tmp_path, "only\n")
    assert read_keys(load_settings({"api_keys_file": str(one)}, {})).owned
    assert read_keys(load_settings({"api_keys_file": one, "api_key": "k"}, {})).values == (
        "k",
        "only",
    )


@pytest.mark.parametrize(
    "text",
    ["", "# none\n", "alice:\n", "two words\n", "alice: two words\n", "s3cret\nbob: s3cret\n"],
)
def test_errors_of_a_file_do_not_contain_its_keys(tmp_path: Path, text: str) -> None:
    path = keys_file(tmp_path, text)
    with pytest.raises(ConfigError, match="--api-keys-file") as raised:
        read_keys(load_settings({"api_keys_file": str(path)}, {}))
    for said in ("s3cret", "words"):
        assert said not in str(raised.value)


@pytest.mark.parametrize("raw", [b"s\xc3\xa9cret\n", b"\x00\xff", b"k" * (2 << 20)])
def test_a_file_that_is_not_ascii_or_too_large_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="--api-keys-file"):
        read_keys(load_settings({"api_keys_file": path}, {}))
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(load_settings({"api_keys_file": tmp_path / "none"}, {}))


def test_a_file_that_other_users_can_read_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mode, warned in ((0o600, False), (0o644, True), (0o640, True)):
        caplog.clear()
        read_keys(load_settings({"api_keys_file": keys_file(tmp_path, "s3cret\n", mode)}, {}))
        assert ("chmod 600" in caplog.text) is warned
        assert "s3cret" not in caplog.text


def test_a_file_of_keys_allows_listening_on_all_addresses(tmp_path: Path) -> None:
    """An allowed origin does not: other programs send none."""
    path = keys_file(tmp_path, "k\n")
    assert load_settings({"api_keys_file": path, "host": "0.0.0.0"}, {}).host == "0.0.0.0"
    with pytest.raises(ConfigError, match="--insecure"):
        load_settings({"host": "0.0.0.0", "allow_origin": ["http://a"]}, {})


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("http://localhost:3000/", "http://localhost:3000"),
        ("HTTPS://UI.Example", "https://ui.example"),
        ("https://ui.example:443", "https://ui.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
    ],
)
def test_origins_are_normalised_as_browsers_send_them(given: str, origin: str) -> None:
    assert load_settings({"allow_origin": [given]}, {}).allow_origin == (origin,)


@pytest.mark.parametrize("given", ["*", "http://*", "localhost:3000", "null", "http://a/b", ""])
def test_wildcards_and_incomplete_origins_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        load_settings({"allow_origin": [given]}, {})
