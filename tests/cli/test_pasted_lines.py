"""The line to paste sets what `mlxcache launch` sets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mlxcache.cli import connect
from mlxcache.cli.launch.claude import anyclaude, claude
from mlxcache.cli.launch.client import Place, Service

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("start", "line", "command"),
    [
        (claude, connect.claude_code(URL, "m", 4096, has_key=False), "claude"),
        (anyclaude, connect.anyclaude(URL, 4096, has_key=False), "anyclaude"),
    ],
)
def test_a_pasted_line_gives_a_client_what_launch_gives_it(
    tmp_path: Path, start: object, line: str, command: str
) -> None:
    """Also the hour that it waits for a first prompt."""
    assert callable(start)
    place = Place(Path(command), (), {}, tmp_path, tmp_path)
    told = start(Service(URL, "m", 4096), place).environment(Service(URL, "m", 4096), {})
    script = f"{line.removesuffix(command)} env"
    done = subprocess.run(["env", "-i", "sh", "-c", script], capture_output=True, check=True)
    found = dict(one.split("=", 1) for one in done.stdout.decode().splitlines())
    assert {name: found.get(name) for name in told} == told
    assert found["API_TIMEOUT_MS"] == found["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3600000"
