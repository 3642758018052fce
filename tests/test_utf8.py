"""Text that a user hands in and that is not UTF-8, and files of mlxcache that were cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcache.cli.connect import read_object
from mlxcache.config import load_settings
from mlxcache.config.keys import read_keys
from mlxcache.errors import BadRequest, ConfigError, ModelError
from mlxcache.model.folder import checked_config
from mlxcache.safetensors import Malformed, Tensor, compose, read_header
from mlxcache.utf8 import NotUtf8, decode_utf8, read_utf8
from mlxcache.wire.chat_bodies import chats_to_warm
from mlxcache.wire.decode import decode

LATIN1 = 'a = 1\nb = "café"\n'.encode("latin-1")
WHERE = r"is not UTF-8: byte 14 \(0xe9, in line 2\)"


def test_the_first_wrong_byte_is_named_with_its_line() -> None:
    with pytest.raises(NotUtf8, match=WHERE):
        decode_utf8(LATIN1)
    with pytest.raises(NotUtf8, match=r"byte 1,014 "):
        decode_utf8(LATIN1, 1000)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_another_encoding_is_named(encoding: str) -> None:
    with pytest.raises(NotUtf8, match=f"is {encoding.upper()} and not UTF-8"):
        decode_utf8("a = 1".encode(encoding))


def test_line_ends_are_those_of_any_system(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\r\nb\rc\n")
    assert read_utf8(tmp_path / "x") == "a\nb\nc\n"


def test_the_configuration_says_where_it_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(LATIN1)
    with pytest.raises(ConfigError, match=WHERE):
        load_settings({}, {}, file)


def test_a_file_of_keys_names_the_line_and_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"one\ntwo-secr\xe9t\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is not printable ASCII") as caught:
        read_keys(load_settings({"api_keys_file": file}, {}))
    assert "secr" not in str(caught.value)


def test_settings_of_an_agent_and_of_a_model_say_where(tmp_path: Path) -> None:
    for name in ("settings.json", "config.json"):
        (tmp_path / name).write_bytes(LATIN1)
    with pytest.raises(ValueError, match=f"it {WHERE}"):
        read_object(tmp_path / "settings.json")
    with pytest.raises(ModelError, match=WHERE):
        checked_config(tmp_path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"first": "fine", "extra": "caf\xe9"}', r"body is not UTF-8: byte 31 \(0xe9"),
        ('{"a": 1}'.encode("utf-16"), "body is UTF-16"),
        (b'{"a": 1,\xff"b": 2}', r"body is not UTF-8: byte 8 \(0xff"),
        ("\ufeff{}".encode(), "byte order mark"),
    ],
)
def test_a_body_says_where_it_is_not_utf_8(body: bytes, words: str) -> None:
    """The position is that in the body, not in one of its strings."""
    with pytest.raises(BadRequest, match=words):
        decode(dict[str, Any], body)


def test_a_prompt_to_warm_says_where_it_is_not_utf_8() -> None:
    with pytest.raises(BadRequest, match=r"body is not UTF-8: byte 3 .*a system prompt"):
        chats_to_warm(b"caf\xe9 au lait")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (-1, "it was cut short: 255 of its 256 bytes are there"),
        (100, "it was cut short: 100 bytes are there, and its header alone takes 128"),
        (20, "its header does not fit into it"),
    ],
)
def test_a_file_that_was_cut_short_says_what_is_left(tmp_path: Path, size: int, words: str) -> None:
    """As long as it can be told from other files."""
    tensor = Tensor("x", "U8", (128,), memoryview(bytes(128)))
    whole = compose({}, [tensor]) + tensor.bytes
    file = tmp_path / "x"
    file.write_bytes(whole[:size])
    with file.open("rb") as opened, pytest.raises(Malformed, match=words):
        read_header(opened.fileno())
    file.write_bytes(whole + b"more")
    with file.open("rb") as opened, pytest.raises(Malformed, match="has 260 bytes instead of 256"):
        read_header(opened.fileno())


def test_a_header_that_is_not_utf_8_says_where_in_the_file(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"name":"caf\xe9"}}'
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with (
        (tmp_path / "x").open("rb") as opened,
        pytest.raises(Malformed, match=r"its header is not UTF-8: byte 36 \(0xe9"),
    ):
        read_header(opened.fileno(), own=False)
