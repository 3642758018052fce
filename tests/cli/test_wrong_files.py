"""A file that is not what a command takes: what was expected, and what was found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxcache.cli.main import app

MESSAGES = '{"messages": [{"role": "user", "content": "Hello."}]}'


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody serves, and there is no cache folder."""
    for name in ("MLXCACHE_URL", "MLXCACHE_API_KEY", "MLXCACHE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", str(tmp_path / "unused"))
    monkeypatch.setenv("MLXCACHE_PORT", "9")


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b" \n", "it is empty"),
        (b"\x00\xff\xfe", "it is no text, but 3 bytes of something else"),
        (b"hello world", "it is no JSON (Expecting value: line 1 column 1 (char 0)), and begins"),
        (b"{", "it is no JSON"),
        (f"{MESSAGES}\n{MESSAGES}\n".encode(), "it has 2 JSON values, one a line"),
        (b"[1, 2]", "it is a JSON list of 2"),
        (b'"abc"', "it is the JSON text 'abc'"),
        (b"null", "it is the JSON value null"),
        (b"{}", "it is an empty object"),
        (b'{"a": 1, "b": 2}', "it is an object without `messages`, which has `a`, `b`"),
        (json.dumps(dict.fromkeys("abcdefg")).encode(), "`e` and 2 more"),
        (b'{"prompt": "x"}', "it has `prompt` and no `messages`, as a text completion has"),
        (b'{"input": "x"}', "as a request of OpenAI's responses API has"),
        (b'{"id": "c", "choices": []}', "as a server's answer has"),
        (b'{"messages": "hi"}', "its `messages` is the JSON text 'hi'"),
        (b'{"messages": {}}', "its `messages` is a JSON object"),
        (b'{"messages": []}', "its `messages` is empty"),
        (f'{{"body": {MESSAGES}}}'.encode(), "`messages` is below `body`"),
        (b'{"messages": [NaN]}', "JSON is malformed"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_what_is_no_request_is_named_and_what_a_request_is(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    told = run("explain", file).stderr
    assert f"Error: {file} is no chat request: " in told
    assert says in told
    assert "Expected is the JSON body of a chat request" in told
    assert "mlxcache serve --record DIR" in told
    assert len(told) < len(str(file)) + 500


def test_of_two_requests_the_wrong_one_is_named(tmp_path: Path) -> None:
    """Also where it is a request that no template could take."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(MESSAGES)
    bad.write_text('{"messages": [{"role": "usr", "content": "x"}]}')
    told = run("explain", good, bad).stderr
    assert f"{bad} is no chat request that can be rendered: " in told
    assert "'usr' (at `messages[0].role`)" in told


def safetensors(file: Path) -> None:
    mx.save_safetensors(str(file), {"lm_head.weight": mx.zeros((2, 2))})


def cut(file: Path) -> None:
    """A snapshot without its end, as a copy that broke off leaves it."""
    header = json.dumps(
        {
            "__metadata__": {"format": "mlxcache-snapshot", "version": "1"},
            "tokens": {"dtype": "I32", "shape": [1000], "data_offsets": [0, 4000]},
        }
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"hello world", "it is a text, which begins with 'hello world'"),
        (MESSAGES.encode() * 200, 'it is a text, which begins with \'{"messages"'),
        (gzip.compress(b"x", mtime=0), "it is packed with gzip; unpack it first"),
        (bytes(range(256)) * 40, "it is 10.2 KB of something else"),
        (safetensors, "it is a safetensors file of something else"),
        (cut, "it is a snapshot, but cut off or damaged"),
    ],
)
def test_what_is_no_snapshot_is_named_and_what_a_snapshot_is(
    tmp_path: Path, content: object, says: str
) -> None:
    """Before anything is sent or made."""
    file = tmp_path / "file.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        assert callable(content)
        content(file)
    told = run("restore", file).stderr
    assert f"Error: {file} is no snapshot: " in told
    assert says in told
    assert "Expected is a file that `mlxcache snapshot ID -o FILE` wrote" in told
    assert not (tmp_path / "unused").exists()


def test_a_cut_snapshot_is_told_by_its_size(tmp_path: Path) -> None:
    cut(tmp_path / "x")
    told = run("restore", tmp_path / "x").stderr
    assert "bytes, not the " in told
