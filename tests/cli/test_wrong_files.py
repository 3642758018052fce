"""Files of the wrong kind: the error says what was expected and what was found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import Result

from tests.cli.conftest import call

MESSAGES = '{"messages": [{"role": "user", "content": "Hello."}]}'


pytestmark = pytest.mark.usefixtures("no_server")


def run(*arguments: str | Path) -> Result:
    return call(*map(str, arguments), status=1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b" \n", "it is empty"),
        (b"\x00\xff\xfe", "it is not UTF-8: byte 1 (0xff, in line 1)"),
        (b"hello world", "it is not JSON (Expecting value: line 1 column 1 (char 0)) and begins"),
        (b"{", "it is not JSON"),
        (f"{MESSAGES}\n{MESSAGES}\n".encode(), "it has 2 JSON values, one per line"),
        (b"[1, 2]", "it is a JSON list of length 2"),
        (b'"abc"', "it is the JSON text 'abc'"),
        (b"null", "it is the JSON value null"),
        (b"{}", "it is an empty object"),
        (b'{"a": 1, "b": 2}', "it is an object without `messages`, with `a`, `b`"),
        (json.dumps(dict.fromkeys("abcdefg")).encode(), "`e` and 2 more"),
        (b'{"prompt": "x"}', "it has `prompt` and no `messages`, like a text completion request"),
        (b'{"input": 5}', "without `messages`"),
        (b'{"id": "c", "choices": []}', "like a server's response"),
        (b'{"messages": "hi"}', "its `messages` is the JSON text 'hi'"),
        (b'{"messages": {}}', "its `messages` is a JSON object"),
        (b'{"messages": []}', "its `messages` is empty"),
        (f'{{"body": {MESSAGES}}}'.encode(), "`messages` is inside `body`"),
        (b'{"messages": [NaN]}', "JSON is malformed"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_a_file_that_is_not_a_request_is_described(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    error = run("explain", file).stderr
    assert f"Error: {file} is not a chat request: " in error
    assert expected in error
    assert "Expected the JSON body of a chat request" in error
    assert "mlxcache serve --record DIR" in error
    assert len(error) < len(str(file)) + 500


def test_the_error_names_the_wrong_one_of_two_files(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(MESSAGES)
    for message, wrong in (
        ({"role": "usr", "content": "x"}, "'usr' (at `messages[0].role`)"),
        ({"role": "user", "content": [{"type": "nonsense"}]}, "nonsense"),
    ):
        bad.write_text(json.dumps({"messages": [message]}))
        error = run("explain", good, bad).stderr
        assert f"{bad} is a chat request that cannot be rendered: " in error
        assert wrong in error


def safetensors(file: Path) -> None:
    mx.save_safetensors(str(file), {"lm_head.weight": mx.zeros((2, 2))})


def cut(file: Path) -> None:
    """Write a snapshot that lacks its last bytes, as an interrupted copy leaves it."""
    header = json.dumps(
        {
            "__metadata__": {"format": "mlxcache-snapshot", "version": "1"},
            "tokens": {"dtype": "I32", "shape": [1000], "data_offsets": [0, 4000]},
        }
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it is empty"),
        (b"hello world", "it is a text that begins with 'hello world'"),
        (MESSAGES.encode() * 200, 'it is a text that begins with \'{"messages"'),
        (gzip.compress(b"x", mtime=0), "it is compressed with gzip; unpack it first"),
        (bytes(range(256)) * 40, "it is 10.2 KB of an unknown format"),
        (safetensors, "it is a safetensors file of another kind"),
    ],
)
def test_a_file_that_is_not_a_snapshot_is_described(
    tmp_path: Path, content: object, expected: str
) -> None:
    """The file is refused before anything is sent or written."""
    file = tmp_path / "file.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        assert callable(content)
        content(file)
    error = run("restore", file).stderr
    assert f"Error: {file} is not a snapshot: " in error
    assert expected in error
    assert "Expected a file written by `mlxcache snapshot ID -o FILE`" in error
    assert not (tmp_path / "unused").exists()


def test_a_truncated_snapshot_is_refused_by_its_size(tmp_path: Path) -> None:
    cut(tmp_path / "x")
    error = run("restore", tmp_path / "x").stderr
    assert "is a damaged snapshot: it was cut short: " in error
