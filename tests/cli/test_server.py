"""The server's process: start, welcome, log, files and end."""

import json
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxcache.cli.server import announced, warm_files
from mlxcache.config import Settings
from mlxcache.errors import ContextLengthExceeded
from mlxcache.store.lock import InUse, exclusive_lock, servers
from tests.api.fake import FakeEngine
from tests.cli.conftest import call
from tests.served import served

KEY = "swordfish-0001"
CHAT = {"messages": [{"role": "user", "content": "Tell me about caches."}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server(toy_llama, tmp_path_factory):
    """A server that is shared by the tests that do not stop it."""
    home = tmp_path_factory.mktemp("home")
    environ = {"MLXCACHE_API_KEY": KEY}
    with served("--model", str(toy_llama), "--ram", "400MB", home=home, environ=environ) as running:
        running.wait_for("Ctrl-C stops")
        yield running


def post(server, **extra):
    headers = {"Authorization": f"Bearer {KEY}", "X-Session-Id": "my-session-1234abcd"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | extra, headers=headers)


def test_the_welcome_has_address_model_memory_and_lines_to_paste(server):
    assert "400 MB" in server.output
    assert "65,536 tokens" in server.output
    launch = server.wait_for(r"^cd YOUR-PROJECT\n(\S+) launch --url (\S+)$")
    assert Path(launch[1]).is_absolute()
    assert os.access(launch[1], os.X_OK)
    assert launch[2] == server.url
    assert "ANTHROPIC_" not in server.output


def test_connect_prints_the_lines_of_a_running_server(server):
    """For people and for programs, without the key."""
    where = ("--url", server.url, "--api-key", KEY)
    found = json.loads(call("connect", "--json", *where).output)
    text = call("connect", *where).output
    assert {*found.values()} <= {*text.splitlines()}
    assert f"ANTHROPIC_BASE_URL={server.url} " in found["claude"]
    assert f"MLX_LM_URL={server.url}/v1 " in found["anyclaude"]
    assert KEY not in text
    assert "MLXCACHE_API_KEY" in text


def test_output_to_a_pipe_has_no_escape_codes(server):
    assert "\x1b" not in server.output


def test_each_request_is_one_line_of_the_log(server):
    """With the id under which the session is listed, from its first request on."""
    assert post(server).status_code == 200
    first = server.wait_for(r"(ses_\w+)  prompt (\d+)  cached (\d+)  fed (\d+)  .*  length$")
    assert int(first[2]) == int(first[3]) + int(first[4])
    assert post(server).status_code == 200
    assert server.wait_for(rf"{first[1]} .*\n(?:.*\n)*.*{first[1]}  prompt \d+  cached [1-9]")
    listed = json.loads(call("sessions", "--json", "--url", server.url, "--api-key", KEY).output)
    assert first[1] in {one["id"] for one in listed["data"]}


def test_the_key_is_required_and_never_printed(server):
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 401
    assert KEY not in server.output


def test_the_port_answers_503_while_the_model_loads(toy_llama, tmp_path):
    """Clients that wait for the server are not refused a connection."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen = set()
    with served("--model", str(toy_llama), "--port", str(port), home=tmp_path) as running:
        end = time.monotonic() + 60
        while 200 not in seen and time.monotonic() < end:
            try:
                seen.add(httpx.get(f"http://127.0.0.1:{port}/health").status_code)
            except httpx.TransportError:
                time.sleep(0.005)
        assert seen == {200, 503}
        assert running.url.endswith(f":{port}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_running_reply_and_the_server_within_ten_seconds(
    number, toy_llama, tmp_path
):
    """The client gets an error event, the request is logged, the exit status is 0."""
    received = bytearray()
    with served("--model", str(toy_llama), home=tmp_path) as running:
        body = CHAT | {"max_tokens": 50_000, "stream": True}

        def read() -> None:
            with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body) as reply:
                for piece in reply.iter_raw():
                    received.extend(piece)

        client = threading.Thread(target=read)
        running.wait_for("Ctrl-C stops")
        client.start()
        while not received:
            time.sleep(0.01)
        assert running.stop(number) == 0
        client.join(5)
        assert b'"error"' in received[-400:]
        assert "cancelled" in running.output
        assert "Traceback" not in running.output


def test_a_port_in_use_is_an_error_with_advice(toy_llama, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with served("--model", str(toy_llama), "--port", port, home=tmp_path) as running:
            assert running.process.wait(30) == 1
            running.wait_for(f"Error: port {port} .* in use .*--port N")


def test_a_model_that_does_not_exist_is_an_error(tmp_path):
    with served("--model", str(tmp_path / "nothing"), home=tmp_path) as running:
        assert running.process.wait(60) == 1
        running.wait_for("Error: .*nothing")
        assert "Traceback" not in running.output


def test_the_built_in_demo_is_served_without_a_model(tmp_path):
    with served("--ram", "400MB", home=tmp_path) as running:
        running.wait_for("Ctrl-C stops")
        assert "demo" in running.output
        assert "--model" in running.output
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=CHAT, timeout=60)
        assert reply.status_code == 200
        assert running.stop() == 0


def test_a_server_is_announced_while_it_runs(tmp_path):
    with announced(Settings(cache_dir=tmp_path, model="org/name"), "http://127.0.0.1:8081"):
        [one] = servers(tmp_path)
        assert (one.url, one.model) == ("http://127.0.0.1:8081", "org/name")
        with pytest.raises(InUse, match="org/name"), exclusive_lock(tmp_path):
            pass
    assert servers(tmp_path) == []


def test_a_folder_that_a_command_changes_is_refused(tmp_path):
    """Unless the server stores nothing there."""
    with exclusive_lock(tmp_path):
        with pytest.raises(InUse), announced(Settings(cache_dir=tmp_path), "http://127.0.0.1:8081"):
            pass
        with announced(Settings(cache_dir=tmp_path, disk="off"), "http://127.0.0.1:8081"):
            assert servers(tmp_path) == []


def test_a_folder_that_cannot_be_written_causes_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with (
        caplog.at_level(logging.WARNING, "mlxcache"),
        announced(Settings(cache_dir=tmp_path / "file" / "below"), "http://127.0.0.1:8081"),
    ):
        pass
    assert len(caplog.records) == 1


async def test_each_file_to_warm_is_computed_and_an_invalid_one_skipped(tmp_path, caplog):
    good, bad, gone = (tmp_path / name for name in ("good", "bad", "gone"))
    good.write_text('{"model": "small", "messages": [{"role": "user", "content": "Hi"}]}')
    bad.write_text("{")
    engine: Any = FakeEngine()
    named: list[str | None] = []

    async def find(model: str | None) -> Any:
        named.append(model)
        return engine

    with caplog.at_level(logging.INFO, "mlxcache"):
        await warm_files(find, (bad, gone, good))
    assert len(engine.jobs) == 1
    assert named == [None, "small"]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" ")[0] for line in lines] == [str(bad), str(gone), str(good)]
    for line, expected in zip(lines, ("not warmed", "cannot be read", " warmed: "), strict=True):
        assert expected in line
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    engine.submit_error = ContextLengthExceeded("prompt is too long")
    await warm_files(find, (good,))
    assert "too long" in caplog.text
