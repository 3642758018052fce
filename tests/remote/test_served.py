"""Two servers as users start them, with a shared folder as their remote."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.served import Served, served

LONG = "A line of a file that an agent has read. " * 400


def waits(server: Served) -> bool:
    cache = httpx.get(f"{server.url}/v1/cache").json()
    return bool(cache["pending_bytes"] or cache["remote"]["exchange"]["waiting"])


def shared(server: Served) -> None:
    end, still = time.monotonic() + 60, 0
    while still < 5:
        assert time.monotonic() < end
        still = 0 if waits(server) else still + 1
        time.sleep(0.2)


def ask(server: Served, messages: list[dict[str, Any]]) -> tuple[int, int]:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    messages.append(answer["choices"][0]["message"])
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens"] - cached


@pytest.mark.slow
def test_a_conversation_alternates_between_two_servers(toy_llama: Path, tmp_path: Path):
    share = tmp_path / "share"
    share.mkdir()
    common = ("--model", str(toy_llama), "--ram", "300MB", "--remote", f"file://{share}")
    with (
        served(*common, "--cache-dir", str(tmp_path / "a"), home=tmp_path) as one,
        served(*common, "--cache-dir", str(tmp_path / "b"), home=tmp_path) as other,
    ):
        messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
        fed = []
        for n in range(6):
            server = (one, other)[n % 2]
            fed.append(ask(server, messages)[1])
            shared(server)
            messages.append({"role": "user", "content": f"Go on with number {n}, please."})
        assert fed[0] > 1000
        assert max(fed[1:]) <= 64 + 30
        remote = httpx.get(f"{other.url}/v1/cache").json()["remote"]
        assert remote["exchange"]["fetched_tokens"] > 1000


@pytest.mark.slow
def test_without_a_remote_nothing_of_it_is_loaded():
    code = (
        "import sys, mlxcache.api.app, mlxcache.cli.serve, mlxcache.engine.models\n"
        "wrong = ('mlxcache.remote', 'obstore', 'cryptography')\n"
        "sys.exit(any(name.startswith(wrong) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_command_that_lists_a_remote_ends_in_order(tmp_path: Path):
    """Threads of the storage's library that still run do not abort the process, in 20 tries."""
    code = (
        "import asyncio, sys\n"
        "from mlxcache.config.remote import read_remote_url\n"
        "from mlxcache.remote.storage import Storage\n"
        "async def main():\n"
        "    async for page in Storage(read_remote_url(sys.argv[1])).pages('v1'): pass\n"
        "asyncio.run(main())"
    )
    (tmp_path / "v1").mkdir()
    for _ in range(20):
        command = [sys.executable, "-c", code, f"file://{tmp_path}"]
        assert subprocess.run(command, check=False).returncode == 0
