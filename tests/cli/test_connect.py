"""The lines to paste, run by a POSIX shell."""

import subprocess
from pathlib import Path

import pytest

from mlxcache.cli.connect import anyclaude_line, base_url, claude_code_line
from mlxcache.cli.launch.clients import CLIENTS, ClientName, Invocation, Service


def variables(line: str, command: str, environ: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of `command` after a shell ran `line`."""
    assert line.endswith(f" {command}")
    line = line.removesuffix(command) + "env"
    base = {"PATH": "/usr/bin:/bin", **(environ or {})}
    done = subprocess.run(["sh", "-c", line], env=base, capture_output=True, text=True, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8081"),
        ("localhost", "http://localhost:8081"),
        ("0.0.0.0", "http://127.0.0.1:8081"),
        ("::", "http://[::1]:8081"),
        ("::1", "http://[::1]:8081"),
        ("192.168.1.7", "http://192.168.1.7:8081"),
    ],
)
def test_the_address_is_one_that_local_clients_can_use(host, url):
    assert base_url(host, 8081) == url


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (ClientName.CLAUDE, claude_code_line("http://127.0.0.1:1", "m", 4096, has_key=False)),
        (ClientName.ANYCLAUDE, anyclaude_line("http://127.0.0.1:1", 4096, has_key=False)),
    ],
)
def test_a_pasted_line_sets_the_variables_that_launch_sets(
    tmp_path: Path, name: ClientName, line: str
) -> None:
    """Also the timeouts of an hour for a first prompt."""
    invocation = Invocation(Path(name.value), (), {}, tmp_path, tmp_path)
    service = Service("http://127.0.0.1:1", "m", 4096)
    told = CLIENTS[name].configure(service, invocation).environment(service, {})
    found = variables(line, name.value)
    assert {name: found.get(name) for name in told} == told
    assert found["API_TIMEOUT_MS"] == found["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3600000"


def test_anyclaude_gets_both_families_of_variables():
    """Older versions read MLX_LM_*, newer ones LOCAL_*."""
    found = variables(anyclaude_line("http://127.0.0.1:1", 4096, has_key=False), "anyclaude")
    assert found["ANYCLAUDE_MODE"] == "mlx-lm"
    for family in ("MLX_LM", "LOCAL"):
        assert found[f"{family}_URL"] == "http://127.0.0.1:1/v1"
        assert found[f"{family}_MODEL"] == "current-model"
        assert found[f"{family}_API_KEY"]
    assert found["LOCAL_CONTEXT_LENGTH"] == "4096"


def test_names_with_spaces_and_quotes_survive_the_shell():
    name = "my models/it's $HOME"
    line = claude_code_line("http://127.0.0.1:1", name, 1, has_key=False)
    assert variables(line, "claude")["ANTHROPIC_MODEL"] == name


def test_a_key_is_read_from_the_variable_and_not_in_the_line():
    environ = {"MLXCACHE_API_KEY": "a key"}
    line = claude_code_line("http://127.0.0.1:1", "m", 1, has_key=True)
    assert variables(line, "claude", environ)["ANTHROPIC_AUTH_TOKEN"] == "a key"
    line = anyclaude_line("http://127.0.0.1:1", 1, has_key=True)
    assert variables(line, "anyclaude", environ)["MLX_LM_API_KEY"] == "a key"
