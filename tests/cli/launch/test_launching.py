"""`mlxcache launch`: each client's setup, its user's settings, and the server behind it."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import Result

from mlxcache.cli.connect import CLONE, own_command
from mlxcache.cli.launch import launching
from mlxcache.cli.launch.clients import CLIENTS, ClientName, Service
from mlxcache.errors import ConfigError
from mlxcache.store.lock import is_running
from tests.cli.launch.conftest import FAKE, Here
from tests.served import Served


def test_claude_code_is_pointed_at_the_server(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.install("claude")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-real")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    here.launch("claude", "--url", server.url, "--", "-p", "two words")
    found = here.variables
    assert found["ANTHROPIC_BASE_URL"] == server.url
    assert found["ANTHROPIC_AUTH_TOKEN"] == "local"
    assert found["ANTHROPIC_MODEL"] == "toy"
    assert found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert found["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} & set(found)
    assert here.arguments == ["--permission-mode", "default", "-p", "two words"]
    assert list(here.home.iterdir()) == []
    here.launch("claude", "--url", server.url, "--", "--permission-mode=acceptEdits")
    assert here.arguments == ["--permission-mode=acceptEdits"]


def test_settings_that_override_the_environment_are_overridden(here: Here, server: Served) -> None:
    """By a file that exists while Claude Code runs; the user's files are not changed."""
    here.install("claude")
    theirs = here.home / ".claude" / "settings.json"
    theirs.parent.mkdir()
    text = '{"env": {"ANTHROPIC_BASE_URL": "https://elsewhere", "EDITOR": "vi"}}'
    theirs.write_text(text)
    local = here.project / ".claude" / "settings.local.json"
    local.parent.mkdir()
    local.write_text('{"env": {"ANTHROPIC_API_KEY": "sk"}, "permissions": {"defaultMode": "plan"}}')
    here.launch("claude", "--url", server.url)
    given = json.loads(Path(f"{here.output}.settings").read_text())
    assert given == {"env": {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": ""}}
    assert here.arguments[0] == "--settings"
    assert len(here.arguments) == 2  # the mode is the project's
    assert not Path(here.arguments[1]).exists()
    assert theirs.read_text() == text


def test_variables_that_scripts_set_for_the_server_are_removed(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that an agent runs get the user's environment."""
    here.install("claude")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/x/libopenblas.so.0:/nowhere/own.so")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    here.launch("claude", "--url", server.url)
    assert here.variables["LD_PRELOAD"] == "/nowhere/own.so"
    assert "GLIBC_TUNABLES" not in here.variables


def test_a_clone_has_a_script_that_launches_anyclaude(tmp_path: Path) -> None:
    script = tmp_path / "anyclaude"
    script.write_bytes((Path(__file__).parents[3] / "bin" / "anyclaude").read_bytes())
    (tmp_path / "mlxcache").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    for one in (script, tmp_path / "mlxcache"):
        one.chmod(0o755)
    done = subprocess.run([script, "-p", "two words"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["launch", "anyclaude", "--", "-p", "two words"]
    assert os.access(Path(__file__).parents[3] / "bin" / "anyclaude", os.X_OK)


def test_opencode_gets_a_provider_in_addition_to_the_users(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a variable that overrides files; the key is in another variable."""
    here.install("opencode")
    own = {"theme": "x", "provider": {"other": {"name": "o"}}, "model": "other/m"}
    monkeypatch.setenv("OPENCODE_CONFIG_CONTENT", json.dumps(own))
    here.launch("opencode", "--url", f"{server.url}/v1", "--", "run", "hello")
    found = json.loads(here.variables["OPENCODE_CONFIG_CONTENT"])
    assert found["theme"] == "x"
    assert found["provider"]["other"] == {"name": "o"}
    provider = found["provider"]["mlxcache"]
    assert provider["options"]["baseURL"] == f"{server.url}/v1"
    assert provider["models"]["current-model"]["limit"] == {"context": 4096, "output": 1024}
    assert found["model"] == found["small_model"] == "mlxcache/current-model"
    assert here.variables["MLXCACHE_API_KEY"] == "local"
    assert here.arguments == ["run", "hello"]


def test_anyclaude_starts_no_server_of_its_own(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.install("anyclaude")
    monkeypatch.setenv("MLX_MODEL_PATH", "/a/model")
    here.launch("anyclaude", "--url", server.url)
    assert here.variables["LOCAL_CONTEXT_LENGTH"] == "4096"
    assert "MLX_MODEL_PATH" not in here.variables


def test_codex_is_configured_by_flags(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.install("codex")
    monkeypatch.setenv("FAKE_VERSION", "0.169.0")
    here.launch("codex", "--url", server.url, "--", "exec", "hello")
    told = here.arguments
    assert told[::2][:-1] == ["-c"] * (len(told) // 2 - 1)
    assert f'model_providers.mlxcache.base_url="{server.url}/v1"' in told
    assert 'model_providers.mlxcache.wire_api="responses"' in told
    assert "model_context_window=4096" in told
    assert told[-2:] == ["exec", "hello"]
    assert here.variables["MLXCACHE_API_KEY"] == "local"


@pytest.mark.parametrize(("name", "node"), [("codex", ""), ("qwen", "22"), ("pi", "22.19")])
def test_an_old_version_is_refused(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch, name: str, node: str
) -> None:
    """With an older Node.js, npm would install the same version again."""
    here.install(name)
    monkeypatch.setenv("FAKE_VERSION", "0.15.10")
    result = here.launch(name, "--url", server.url, status=1)
    client = CLIENTS[ClientName(name)]
    assert f"0.15.10 is too old: version {client.oldest} or later is needed" in result.stderr
    assert client.install in result.stderr.splitlines()
    with_node = f"Install it with Node.js {node} or later"
    assert (with_node in " ".join(result.stderr.split())) == bool(node)


@pytest.mark.parametrize("name", list(ClientName))
def test_a_client_that_is_not_installed_is_reported_with_its_install_command(
    here: Here, name: ClientName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a line of its own, before a server is started."""
    monkeypatch.setenv("PATH", str(here.programs))
    result = here.launch(name.value, status=1)
    assert CLIENTS[name].install in result.stderr.splitlines()
    assert not (here.output.parent / "cache" / "log").exists()


def test_continue_can_be_named_like_its_program_or_by_its_own_name(
    here: Here, server: Served
) -> None:
    """Arguments for it may be the same word."""
    here.install("cn")
    here.launch("continue", "--url", server.url, "--", "-p", "continue")
    assert here.arguments[0] == "--config"
    assert here.arguments[2:] == ["-p", "continue"]


@pytest.mark.parametrize("name", list(ClientName))
def test_printed_variables_equal_those_of_the_client(
    here: Here, server: Served, name: ClientName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After evaluation by a shell, also with the lines joined."""
    here.install(name.value)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-real")
    here.launch(name.value, "--url", server.url)
    wanted = here.variables
    printed = here.launch(
        name.value, "--url", server.url.removeprefix("http://"), "--print-env", status=0
    ).stdout
    for text in (printed, printed.replace("\n", " ")):
        script = f"eval {shlex.quote(text)}\nenv"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        named = set(re.findall(r"export (\w+)=", printed))
        assert named
        assert {n: found[n] for n in named} == {n: wanted[n] for n in named}
        assert ("ANTHROPIC_API_KEY" in found) == ("ANTHROPIC_API_KEY" in wanted)


def test_a_printed_command_names_the_file_to_write(here: Here) -> None:
    result = here.launch("cn", "--port", "9", "--print-env", status=0)
    assert "Write this to FILE: {" in result.stderr
    assert result.stderr.endswith("The command to run with them: cn --config FILE\n")


def test_a_key_in_its_variable_is_not_printed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server, model and context come from the model's files."""
    monkeypatch.setenv("MLXCACHE_API_KEY", "very secret")
    result = here.launch("claude", "--port", "9", "--context", "5000", "--print-env", status=0)
    assert 'export ANTHROPIC_AUTH_TOKEN="$MLXCACHE_API_KEY";' in result.stdout.splitlines()
    assert "very secret" not in result.output
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=5000;" in result.stdout
    assert "No server runs" in result.stderr
    found = json.loads(
        here.launch("claude", "--port", "9", "--print-env", "--json", status=0).stdout
    )
    assert found["set"]["ANTHROPIC_AUTH_TOKEN"] == "very secret"
    assert found["command"][0] == "claude"


def test_of_several_models_the_client_is_set_up_for_the_default(
    here: Here, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = here.home / "c.toml"
    config.write_text(
        f'[models.own]\npath = "{toy("llama")}"\ncontext = 6000\n[models.b]\npath = "org/b"\n'
    )
    monkeypatch.setenv("MLXCACHE_CONFIG", str(config))
    result = here.launch("claude", "--port", "9", "--print-env", status=0)
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=6000;" in result.stdout


def pid_of(result: Result) -> int:
    """Return the id of the server that keeps running."""
    found = re.search(r"The server keeps running at (\S+)\. To stop it: kill (\d+)", result.stderr)
    assert found is not None, result.stderr
    return int(found[2])


def until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while is_running(pid):
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            break
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_is_started_if_none_runs_and_found_again(
    here: Here, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps running after the client, and the next client uses it."""
    here.install("claude", "opencode")
    monkeypatch.setenv("MLXCACHE_DISK", "off")
    monkeypatch.setenv("FAKE_STATUS", "0")
    flags = ("--model", str(toy("llama")), "--ram", "200MB", "--api-key", "k y")
    first = here.launch("claude", *flags, "--port", "0", status=0)
    pid = pid_of(first)
    try:
        assert here.variables["ANTHROPIC_AUTH_TOKEN"] == "k y"
        url = here.variables["ANTHROPIC_BASE_URL"]
        log = re.search(r"its log is (\S+)", first.stderr)
        assert log is not None
        assert url in Path(log[1]).read_text()
        command = subprocess.run(
            ["ps", "-o", "args=", "-p", str(pid)], capture_output=True, check=False
        )
        assert b"k y" not in command.stdout
        second = here.launch("opencode", "--ram", "1GB", "--api-key", "k y", status=0)
        assert f'"{url}/v1"' in here.variables["OPENCODE_CONFIG_CONTENT"]
        assert "--ram changes nothing" in second.stderr
        assert "keeps running" not in second.stderr
        wrong = here.launch(
            "claude", "--url", url, "--model", "./other", "--api-key", "k y", status=1
        )
        assert "serves toy" in wrong.stderr
        assert "requires a key" in here.launch("claude", status=1).stderr
    finally:
        os.kill(pid, signal.SIGTERM)
        until_gone(pid)


def new_server(toy: Any) -> tuple[str, ...]:
    return ("--model", str(toy("llama")), "--ram", "200MB", "--disk", "off", "--port", "0")


def assert_gone(url: str) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))


def test_a_server_whose_client_fails_without_a_request_is_stopped(here: Here, toy: Any) -> None:
    """And one that a client has used is not: see the test above. The status is the client's."""
    here.install("claude")
    result = here.launch("claude", *new_server(toy))
    assert "The client sent no request and ended with 7: stopping its server" in result.stderr
    assert "keeps running" not in result.stderr
    assert_gone(here.variables["ANTHROPIC_BASE_URL"])


BROKEN = """#!/bin/sh
echo "SyntaxError: Unexpected token" >&2
exit 1
"""


@pytest.mark.parametrize(
    ("name", "program", "words"),
    [
        ("claude", BROKEN, "SyntaxError: Unexpected token"),
        ("opencode", "#!/nowhere/node\n", "--version failed"),
        ("codex", FAKE.replace("${FAKE_VERSION:-9.9.9}", "dev"), "printed no version"),
    ],
)
def test_a_client_that_does_not_work_is_reported_before_a_server_is_started(
    here: Here, name: str, program: str, words: str
) -> None:
    here.install(name, program=program)
    result = here.launch(name, "--port", "0", status=1)
    assert words in result.stderr
    assert "Starting a server" not in result.stderr
    assert not (here.output.parent / "cache" / "log").exists()


@pytest.mark.slow
def test_a_server_whose_client_cannot_be_started_is_stopped(here: Here, toy: Any) -> None:
    """Also where the client vanished while the model was loaded."""
    here.install("claude", program='#!/bin/sh\necho 1.0.0\nrm "$0"\n')
    result = here.launch("claude", *new_server(toy), status=1)
    assert "cannot be run" in result.stderr
    assert "The client was not started: stopping its server" in result.stderr
    log = re.search(r"its log is (\S+)", result.stderr)
    assert log is not None
    address = re.search(r"^Address +(http://127.0.0.1:\d+)$", Path(log[1]).read_text(), re.M)
    assert address is not None
    assert_gone(address[1])


def test_a_client_that_is_started_in_the_clone_is_told_so(
    here: Here, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command for a project; in a project nothing is said."""
    here.install("claude")
    assert "the sources of mlxcache" not in here.launch("claude", "--url", server.url).stderr
    monkeypatch.chdir(CLONE)
    result = here.launch("claude", "--url", server.url)
    assert f"works on the sources of mlxcache, in {CLONE}" in result.stderr
    assert f"cd YOUR-PROJECT, then {own_command()} launch claude" in result.stderr


@pytest.mark.slow
def test_stop_after_stops_the_server_with_its_client(here: Here, toy: Any) -> None:
    here.install("claude")
    result = here.launch("claude", *new_server(toy), "--stop-after")
    assert "keeps running" not in result.stderr
    assert_gone(here.variables["ANTHROPIC_BASE_URL"])


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(here: Here) -> None:
    here.install("claude")
    result = here.launch("claude", "--model", "foo", "--port", "0", status=1)
    assert "foo is neither an existing folder nor a Hub id" in result.stderr
    assert "serve-" in result.stderr
    assert not here.output.exists()


@pytest.mark.slow
def test_a_port_used_by_another_program_is_an_error(here: Here) -> None:
    """So is an address of another machine without a server."""
    here.install("claude")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = here.launch("claude", "--port", port, status=1)
    assert f"port {port} of 127.0.0.1 is in use by" in result.stderr
    result = here.launch("claude", "--url", "https://127.0.0.1:9", status=1)
    assert "Nothing answers" in result.stderr
    assert "must be an address" in here.launch("claude", "--url", "http://", status=2).stderr


def test_a_current_folder_that_was_removed_is_an_error(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.install("codex")
    gone = here.project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = here.launch("codex", "--port", "1", status=1)
    assert "The current folder cannot be used (No such file or directory)" in result.stderr


def test_signals_are_forwarded_and_the_exit_status_is_that_of_a_shell() -> None:
    """128 and the signal's number; Ctrl-C is left to the client."""
    code = (
        "import sys; from mlxcache.cli.launch.processes import run_process; "
        "sys.exit(run_process(sys.argv[1:], {}))"
    )
    for script in ("kill -INT $PPID; kill -TERM $PPID; exec /bin/sleep 60", "kill -TERM $$"):
        command = [sys.executable, "-c", code, "/bin/sh", "-c", script]
        assert subprocess.run(command, timeout=60, check=False).returncode == 128 + signal.SIGTERM


def test_without_a_terminal_the_client_must_be_named(here: Here) -> None:
    result = here.launch(status=2)
    assert "mlxcache launch CLIENT" in result.stderr
    assert " or ".join(ClientName) in result.stderr


def menu(found: Service | None, model: str | None, width: int = 80, **more: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    launching.print_menu(console, found, model, None, **more)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_menu_describes_each_client_on_this_machine() -> None:
    """By memory and context; a command to copy is unbroken at any width."""
    gigabytes = 10**9
    text = menu(None, None, width=40, memory=64 * gigabytes, which=lambda _: None)
    more = "launch claude --model mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"
    line = f"{own_command()} {more}"
    assert line in text.splitlines()
    assert "Qwen3-4B" in menu(None, None, memory=16 * gigabytes)
    text = menu(Service("http://h:1", "org/m", 30_000), None, which=lambda name: name)
    assert "http://h:1 serves org/m with a context of 30,000 tokens" in text
    long = [one.name for one in CLIENTS.values() if one.first_prompt > 15_000]
    assert long == ["claude", "qwen", "copilot", "anyclaude"]
    words = " ".join(text.split())
    assert words.count("too short") == len(long)
    assert "First prompt: about 18,000 tokens, 30,000 with Node.js before 22." in words
    assert "Not installed" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_menu_takes_a_number_or_a_name(monkeypatch: pytest.MonkeyPatch) -> None:

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for typed, name in (
        ("2\n", ClientName.OPENCODE),
        ("codex\n", ClientName.CODEX),
        ("\n", ClientName.CLAUDE),
    ):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert launching.choose_client(None, "m", None) is name
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdin", Terminal("99\nq\n"))
    with pytest.raises(typer.Exit):
        launching.choose_client(None, "m", None)
    assert "Type a number from 1 to 9, a name such as opencode, or q to leave." in shown.getvalue()
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    with pytest.raises(ConfigError, match="no client was chosen"):
        launching.choose_client(None, "m", None)
