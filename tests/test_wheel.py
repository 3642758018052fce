"""A wheel of a clean checkout, installed where nothing else is: what the README promises works.

`MLXCACHE_WHEEL=FILE` tests that wheel in place of one that is built here. Needs the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin
from zipfile import ZipFile

import httpx
import pytest

from mlxcache.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
MOST_BYTES = 3_000_000
SECONDS = 180.0

pytestmark = pytest.mark.slow


def tracked() -> list[str]:
    """The files of a clean checkout, by their paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files of a clean checkout alone."""
    if given := os.environ.get("MLXCACHE_WHEEL"):
        return Path(given).resolve(strict=True)
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(clone)], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module", params=["pip", "uv"])
def mlxcache(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The words that run the installed command; with `uvx`, it is installed by the first run."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "uv":
        uvx = shutil.which("uvx")
        if uvx is None:
            pytest.skip("uv is not installed")
        command = [uvx, "--no-config", "--python", sys.executable, "--from", str(wheel), "mlxcache"]
        subprocess.run([*command, "--version"], check=True, cwd=folder)
        return [*command[:1], "--offline", *command[1:]]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True, cwd=folder)
    return [str(folder / "bin" / "mlxcache")]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a new user: no variable of this process, of the clone's scripts, or of Python."""
    home = tmp_path_factory.mktemp("home")
    caches = {name: os.environ[name] for name in ("UV_CACHE_DIR",) if name in os.environ}
    if not caches:
        caches["UV_CACHE_DIR"] = str(Path.home() / ".cache" / "uv")
    return {"HOME": str(home), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **caches}


@pytest.fixture(scope="module")
def server(mlxcache: list[str], environ: dict[str, str]) -> Iterator[str]:
    """The address of `mlxcache serve`, which ends by itself when it is asked to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = Path(environ["HOME"]) / f"serve-{port}.log"
    with log.open("wb") as out:
        command = [*mlxcache, "serve", "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=environ["HOME"], env=environ, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + SECONDS
        while not _serves(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
    assert status == 0, log.read_text()


def _serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def run(command: list[str], environ: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [*command, *arguments],
        cwd=environ["HOME"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def test_it_is_small_and_has_each_file_of_the_package(wheel: Path) -> None:
    """And none that is not the package's."""
    assert wheel.stat().st_size < MOST_BYTES
    with ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == {name for name in tracked() if name.startswith("mlxcache/")}


def test_each_command_is_there(mlxcache: list[str], environ: dict[str, str]) -> None:
    """Its help says what it takes."""
    for name in COMMANDS:
        assert f"Usage: mlxcache {name}" in run(mlxcache, environ, name, "--help")


def test_a_conversation_is_answered_and_kept(server: str) -> None:
    """In both APIs, streamed and with a forced tool; the second turn is warm."""
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "What is a cache? " * 20}]}
    cold, warm = (
        httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).json() for _ in range(2)
    )
    prompt = cold["usage"]["prompt_tokens"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
    streamed = httpx.post(
        f"{server}/v1/chat/completions", json=body | {"stream": True}, timeout=60
    ).text
    assert streamed.rstrip().endswith("data: [DONE]")
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    tool = {"name": "pick", "input_schema": schema | {"additionalProperties": False}}
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "pick"}, "max_tokens": 100}
    sent = body | forced | {"model": "any"}
    message = httpx.post(f"{server}/v1/messages", json=sent, timeout=60).json()
    assert message["content"][-1]["input"] == {"n": 7}, message


def test_the_pages_and_all_that_they_load_are_there(server: str) -> None:
    """The dashboard; and a page for each other file of pages in the package."""
    paths = {"/dashboard"}
    if (ROOT / "mlxcache" / "api" / "page" / "docs.html").exists():
        paths |= {"/docs", "/openapi.json"}
    for path in paths:
        page = httpx.get(urljoin(server, path), follow_redirects=True)
        assert page.status_code == 200
        for link in re.findall(r'(?:src|href)="([^"#:]+)"', page.text):
            got = httpx.get(urljoin(str(page.url), link), follow_redirects=True)
            assert got.status_code == 200, (path, link)
    assert "mlxcache" in httpx.get(f"{server}/dashboard", follow_redirects=True).text
    assert httpx.get(f"{server}/metrics").status_code == 200


def test_a_client_is_told_how_to_connect(
    mlxcache: list[str], environ: dict[str, str], server: str
) -> None:
    """With the model's context, which `launch` asks the server for."""
    printed = run(mlxcache, environ, "launch", "claude", "--print-env", "--url", server)
    assert f"export ANTHROPIC_BASE_URL={server};" in printed
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072;" in printed


def test_commands_work_on_the_running_server(
    mlxcache: list[str], environ: dict[str, str], server: str
) -> None:
    """And `doctor` finds that the installed versions fit."""
    request = Path(environ["HOME"]) / "request.json"
    request.write_text('{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}')
    assert "tokens" in run(mlxcache, environ, "warm", "--url", server, str(request))
    run(mlxcache, environ, "sessions", "list", "--url", server)
    assert "Memory" in run(mlxcache, environ, "cache", "stats", "--url", server)
    assert "Nothing is lost" in run(mlxcache, environ, "explain", str(request), str(request))
    assert '"name": "versions"' in run(mlxcache, environ, "doctor", "--quick", "--json")
