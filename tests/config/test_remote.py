"""The URL of a remote and the file with its key."""

from __future__ import annotations

import pytest

from mlxcache.config import load_settings
from mlxcache.config.keys import read_remote_key
from mlxcache.config.remote import RemoteUrl, read_remote_url
from mlxcache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parts", "shown"),
    [
        ("s3://bucket", ("s3", "bucket", ""), "s3://bucket"),
        ("s3://bucket/", ("s3", "bucket", ""), "s3://bucket"),
        ("gs://b/team/a/", ("gs", "b", "team/a"), "gs://b/team/a"),
        ("az://container/x", ("az", "container", "x"), "az://container/x"),
        ("file:///mnt/my%20share", ("file", "", "/mnt/my share"), "file:///mnt/my share"),
    ],
)
def test_a_url_names_bucket_and_prefix(text, parts, shown):
    assert read_remote_url(text) == RemoteUrl(*parts)
    assert str(read_remote_url(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "bucket/prefix", "https://x/y", "s3://", "s3:///x", "file://host/x", "file:///", 3]
)
def test_other_urls_are_refused(text):
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        read_remote_url(text)


@pytest.mark.parametrize("text", ["s3://KEY:hunter2@bucket/x", "az://c/x?sig=hunter2"])
def test_secrets_in_a_url_are_refused_and_not_repeated(text):
    """The URL is shown in figures and logs."""
    with pytest.raises(ConfigError, match="environment") as raised:
        load_settings({"remote": text}, {})
    assert "hunter2" not in str(raised.value)


def test_a_key_is_64_digits(tmp_path, caplog):
    path = tmp_path / "key"
    path.write_text("0aF1" * 16 + "\n")
    path.chmod(0o600)
    assert read_remote_key(path) == bytes.fromhex("0af1" * 16)
    assert not caplog.records
    path.chmod(0o640)
    read_remote_key(path)
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("text", [b"", b"secret", b"0a" * 31, b"0a" * 33, b"zz" * 32, b"\xff" * 64])
def test_another_content_is_refused_and_not_repeated(tmp_path, text):
    path = tmp_path / "key"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as raised:
        read_remote_key(path)
    assert "secret" not in str(raised.value).replace(str(path), "")
    with pytest.raises(ConfigError, match="cannot read"):
        read_remote_key(tmp_path / "none")
