"""README's three commands, as somebody types them who has only the README."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.docs import commands, shell
from tests.docs.blocks import BLOCKS, for_server

(THREE,) = (block for block in BLOCKS if block.note == "run by test_newcomer")
SECONDS = 180.0


@shell.WITH_CURL
def test_the_three_commands_do_what_they_say(mlxcache: str, tmp_path: Path):
    """In two terminals: a server, a client that is answered, and the dashboard."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    serve, launch, see = (
        line.partition("#")[0].strip() for line in for_server(THREE.code, url).splitlines()
    )
    assert [commands.split(list(words))[1][0] for words in commands.words(THREE.code)] == [
        "~/mlxcache/bin/serve",
        "cd",
        "~/mlxcache/bin/mlxcache",
        "open",
    ]
    shell.furnish(tmp_path, mlxcache, serves=True)
    environ = shell.environ(tmp_path) | {"MLXCACHE_PORT": url.rpartition(":")[2]}
    server = subprocess.Popen(
        ["sh", "-c", f"exec {serve}"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait(url, server)
        answer = _run(launch, tmp_path, environ)
        assert re.search(r'"type":"message".*"usage"', answer), answer
        assert answer.startswith(f"working in {tmp_path}/YOUR-PROJECT\n")
        page = _run(see, tmp_path, environ)
        assert "<title>" in page
        assert "mlxcache" in page
    finally:
        server.send_signal(signal.SIGTERM)
        printed = server.communicate(timeout=60)[0].decode()
    assert server.returncode == 0, printed
    assert re.search(r"prompt \d+  cached \d+", printed)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert server.poll() is None
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    pytest.fail("it does not serve")


def _run(line: str, folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        ["sh", "-e", "-c", line],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
