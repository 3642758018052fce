"""Clients started by `mlxcache launch` and by the line to paste get the same variables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mlxcache.cli import connect
from mlxcache.cli.launch.clients import CLIENTS, ClientName, Invocation, Service

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (ClientName.CLAUDE, connect.claude_code_line(URL, "m", 4096, has_key=False)),
        (ClientName.ANYCLAUDE, connect.anyclaude_line(URL, 4096, has_key=False)),
    ],
)
def test_a_pasted_line_sets_the_variables_that_launch_sets(
    tmp_path: Path, name: ClientName, line: str
) -> None:
    """Also the timeouts of an hour for a first prompt."""
    invocation = Invocation(Path(name.value), (), {}, tmp_path, tmp_path)
    service = Service(URL, "m", 4096)
    told = CLIENTS[name].configure(service, invocation).environment(service, {})
    script = f"{line.removesuffix(name.value)} env"
    done = subprocess.run(["env", "-i", "sh", "-c", script], capture_output=True, check=True)
    found = dict(one.split("=", 1) for one in done.stdout.decode().splitlines())
    assert {name: found.get(name) for name in told} == told
    assert found["API_TIMEOUT_MS"] == found["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3600000"
