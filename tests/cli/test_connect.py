"""The lines to paste, run by a POSIX shell."""

import subprocess

import pytest

from mlxcache.cli.connect import base_url
from mlxcache.cli.launch.clients import Service, anyclaude_variables, claude_variables, shell_line
from mlxcache.cli.remote import NoServer, Remote


def variables(pasted: str, command: str, environ: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of `command` after a shell ran `pasted`."""
    assert pasted.endswith(f" {command}")
    pasted = pasted.removesuffix(command) + "env"
    base = {"PATH": "/usr/bin:/bin", **(environ or {})}
    done = subprocess.run(
        ["sh", "-c", pasted], env=base, capture_output=True, text=True, check=True
    )
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
    "url",
    [
        *("http://127.0.0.1:1?x=1", "http://127.0.0.1:1#x", "http://me:secret@127.0.0.1:1"),
        *("http://\u2460.example:1", "http://a..b:1", "http://127.0.0.1:99999", "127.0.0.1:1"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(NoServer, match="is not a server address"):
        Remote(url)


def line(client: str, *, model: str = "m", has_key: bool = False) -> str:
    of = {"claude": claude_variables, "anyclaude": anyclaude_variables}[client]
    return shell_line(client, of(Service("http://127.0.0.1:1", model, 4096)), has_key=has_key)


def test_anyclaude_gets_both_families_of_variables():
    """Older versions read MLX_LM_*, newer ones LOCAL_*."""
    found = variables(line("anyclaude"), "anyclaude")
    assert found["ANYCLAUDE_MODE"] == "mlx-lm"
    for family in ("MLX_LM", "LOCAL"):
        assert found[f"{family}_URL"] == "http://127.0.0.1:1/v1"
        assert found[f"{family}_MODEL"] == "current-model"
        assert found[f"{family}_API_KEY"]
    assert found["LOCAL_CONTEXT_LENGTH"] == "4096"
    assert found["API_TIMEOUT_MS"] == found["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3600000"


def test_names_with_spaces_and_quotes_survive_the_shell():
    name = "my models/it's $HOME"
    assert variables(line("claude", model=name), "claude")["ANTHROPIC_MODEL"] == name


def test_a_key_is_read_from_the_variable_and_not_in_the_line():
    environ = {"MLXCACHE_API_KEY": "a key"}
    found = variables(line("claude", has_key=True), "claude", environ)
    assert found["ANTHROPIC_AUTH_TOKEN"] == "a key"
    found = variables(line("anyclaude", has_key=True), "anyclaude", environ)
    assert found["MLX_LM_API_KEY"] == "a key"
