"""Bodies of chat requests are recorded to files if recording is on."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlxcache.api.app import create_app
from mlxcache.api.http import ApiSettings
from mlxcache.api.record import Recorder
from mlxcache.errors import ConfigError
from tests.api.fake import FakeEngine, OneModel

BODY = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
KEY = "secret-key-of-a-server"


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_chat_requests_are_kept_as_they_came(tmp_path):
    """Names have time, endpoint and id; files are private, without keys, only chat requests."""
    folder = tmp_path / "a" / "kept"
    recorder = Recorder(folder)
    app = create_app(OneModel(FakeEngine()), ApiSettings(api_key=KEY, recorder=recorder))  # type: ignore[arg-type]
    client = TestClient(app, base_url="http://127.0.0.1", headers={"x-api-key": KEY})
    raw = json.dumps(BODY | {"input": "Hi", "store": False}).encode()
    ids = []
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
        answer = client.post(path, content=raw)
        assert answer.status_code == 200
        ids.append(answer.headers["x-mlxcache-request"])
    client.post("/v1/messages/count_tokens", content=raw)
    client.post("/v1/messages", content=b"{")
    client.post("/v1/messages", content=raw, headers={"x-api-key": "wrong"})
    recorder.close()
    kept = files(folder)
    assert [path.name.partition("-")[2] for path in kept] == [
        f"messages-{ids[0]}.json",
        f"chat-{ids[1]}.json",
        f"responses-{ids[2]}.json",
    ]
    for written in kept:
        assert written.read_bytes() == raw
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_kept_unless_asked_for(tmp_path, monkeypatch):
    """Also not in the server's working directory."""
    monkeypatch.chdir(tmp_path)
    client = TestClient(create_app(OneModel(FakeEngine())), base_url="http://127.0.0.1")  # type: ignore[arg-type]
    assert client.post("/v1/messages", json=BODY).status_code == 200
    assert files(tmp_path) == []


def test_the_newest_are_kept_within_both_limits(tmp_path):
    """Files of an earlier server count; other files stay."""
    (tmp_path / "notes.json").write_text("mine")
    for round in range(2):
        recorder = Recorder(tmp_path, files=4, nbytes=100)
        for i in range(6):
            recorder.record(f"req_{round}{i}", "/v1/messages", b"x" * (10 if i < 5 else 70))
        recorder.close()
        kept = [path for path in files(tmp_path) if path.name != "notes.json"]
        assert sum(path.stat().st_size for path in kept) <= 100
        assert [path.stem[-2:] for path in kept] == [f"{round}{i}" for i in (2, 3, 4, 5)]
    recorder = Recorder(tmp_path, files=4, nbytes=100)
    recorder.record("req_ff", "/v1/messages", b"x" * 101)
    recorder.close()
    assert len(files(tmp_path)) == 5
    assert (tmp_path / "notes.json").read_text() == "mine"


def test_a_folder_that_goes_fails_no_request(tmp_path, caplog):
    """It is logged once."""
    folder = tmp_path / "kept"
    recorder = Recorder(folder)
    folder.rmdir()
    for i in range(3):
        recorder.record(f"req_{i}", "/v1/messages", b"{}")
    recorder.close()
    assert caplog.text.count("request body not written") == 1


def test_a_folder_that_cannot_be_is_wrong_usage(tmp_path):
    """The server refuses to start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--record"):
        Recorder(tmp_path / "file")
