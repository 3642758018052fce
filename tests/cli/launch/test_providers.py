"""`mlxcache launch` of clients that take a provider: what each gets, and leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxcache.cli.launch.clients import (
    CLIENTS,
    PI_EXTENSION,
    QWEN_SETTINGS,
    ClientName,
    Invocation,
    Service,
    configure_continue,
    configure_copilot,
    configure_pi,
    configure_qwen,
)
from mlxcache.cli.launch.launching import setup_object
from mlxcache.cli.launch.processes import remove_abandoned_settings, run_client

SERVICE = Service("http://127.0.0.1:1", "toy", 40_000, "a key")
RECORDS = """#!/bin/sh
env > "$RECORD"
[ "$1" = --config ] && cp "$2" "$RECORD.settings"
for path in "$QWEN_CODE_SYSTEM_SETTINGS_PATH" "$CLINE_PROVIDER_SETTINGS_PATH"; do
  if [ -f "$path" ]; then
    cp -p "$path" "$RECORD.settings"
    cp "$path" "$path.new" && mv "$path.new" "$path" # as Cline does
  fi
done
"""


class Ran:
    """A run of a client that records its environment and the settings file that it is given."""

    def __init__(self, name: ClientName, folder: Path, **more: str):
        program, record = folder / name.value, folder / "record"
        program.write_text(RECORDS)
        program.chmod(0o755)
        environ = {"PATH": "/bin:/usr/bin", "RECORD": str(record), **more}
        invocation = Invocation(program, (), environ, folder, folder)
        setup = CLIENTS[name].configure(SERVICE, invocation)
        assert run_client(invocation, setup, SERVICE) == 0
        lines = record.read_text().splitlines()
        self.variables = dict(one.split("=", 1) for one in lines if "=" in one)
        self.settings = Path(f"{record}.settings")


def invoked(folder: Path, *arguments: str, **environ: str) -> Invocation:
    return Invocation(Path("c"), arguments, environ, folder, folder)


def test_qwen_code_gets_variables_and_a_file_with_the_context(tmp_path: Path) -> None:
    """The file has no key, overrides the user's settings, and is gone afterwards."""
    setup = configure_qwen(SERVICE, invoked(tmp_path), machine=())
    assert setup.arguments == ("--auth-type", "openai", "--model", "current-model")
    assert setup.values(SERVICE)["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert setup.values(SERVICE)["OPENAI_API_KEY"] == "a key"
    assert setup.settings == {"model": {"generationConfig": {"contextWindowSize": 40_000}}}
    assert int(setup.variables["QWEN_STREAM_MAX_LIFETIME_MS"] or 0) > 900_000
    if configure_qwen(SERVICE, invoked(tmp_path)).settings_in is None:
        pytest.skip("this machine has settings of Qwen Code")
    ran = Ran(ClientName.QWEN, tmp_path)
    assert json.loads(ran.settings.read_text()) == setup.settings
    assert not Path(ran.variables[QWEN_SETTINGS]).exists()


def test_settings_of_a_whole_machine_are_not_replaced(tmp_path: Path) -> None:
    own = invoked(tmp_path, **{QWEN_SETTINGS: "/their/settings.json"})
    assert configure_qwen(SERVICE, own, machine=()).settings_in is None
    assert configure_qwen(SERVICE, invoked(tmp_path), (tmp_path,)).settings_in is None
    setup = configure_qwen(SERVICE, invoked(tmp_path), (tmp_path / "no",))
    assert setup.settings_in == QWEN_SETTINGS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("-m", "x"), ("--auth-type", "openai")),
        (("--model=x",), ("--auth-type", "openai")),
        (("--auth-type", "anthropic"), ("--model", "current-model")),
    ],
)
def test_flags_that_the_user_gives_to_qwen_code_are_given_once(
    tmp_path: Path, given: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """It fails where a flag stands twice."""
    assert configure_qwen(SERVICE, invoked(tmp_path, *given)).arguments == expected


def test_pi_gets_an_extension_that_adds_a_provider(tmp_path: Path) -> None:
    """The extension registers what the variable describes; the key is in a variable."""
    setup = configure_pi(SERVICE, invoked(tmp_path))
    assert setup.arguments[:2] == ("-e", str(PI_EXTENSION))
    assert setup.arguments[2:] == ("--provider", "mlxcache", "--model", "current-model")
    ran = Ran(ClientName.PI, tmp_path)
    provider = json.loads(ran.variables["PI_MLXCACHE_PROVIDER"])
    assert provider["baseUrl"] == "http://127.0.0.1:1/v1"
    assert provider["apiKey"] == "$MLXCACHE_API_KEY"
    assert ran.variables["MLXCACHE_API_KEY"] == "a key"
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"], model["maxTokens"]) == (
        "current-model", 40_000, 10_000,
    )  # fmt: skip
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js here")
    module = tmp_path / "provider.mjs"
    module.write_bytes(PI_EXTENSION.read_bytes())
    code = (
        f"import add from {json.dumps(str(module))};"
        "add({registerProvider: (...told) => console.log(JSON.stringify(told))})"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code],
        env={"PATH": "/bin:/usr/bin", "PI_MLXCACHE_PROVIDER": json.dumps(provider)}
        | {"PATH": str(Path(shutil.which("node") or "").parent)},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["mlxcache", provider]


def test_cline_gets_a_file_of_providers_for_one_run(tmp_path: Path) -> None:
    """Only its user can read it, and it is gone afterwards, though Cline replaces it."""
    ran = Ran(ClientName.CLINE, tmp_path)
    found = json.loads(ran.settings.read_text())
    assert ran.settings.stat().st_mode & 0o777 == 0o600
    settings = found["providers"][found["lastUsedProvider"]]["settings"]
    assert settings == {
        "provider": "openai-compatible", "apiKey": "a key", "model": "current-model",
        "baseUrl": "http://127.0.0.1:1/v1", "contextWindow": 40_000, "maxTokens": 10_000,
    }  # fmt: skip
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT[\d:.]+Z", found["providers"]["openai-compatible"]["updatedAt"]
    )
    assert not Path(ran.variables["CLINE_PROVIDER_SETTINGS_PATH"]).parent.exists()


def test_cline_s_session_runs_in_the_client(tmp_path: Path) -> None:
    """Cline's daemon would keep another provider, or this run's for the runs after it."""
    own = {"CLINE_SESSION_BACKEND_MODE": "hub", "CLINE_HUB_DISCOVERY_PATH": str(tmp_path / "hub")}
    ran = Ran(ClientName.CLINE, tmp_path, **own)
    assert ran.variables["CLINE_SESSION_BACKEND_MODE"] == "local"
    discovery = Path(ran.variables["CLINE_HUB_DISCOVERY_PATH"])
    with pytest.raises(NotADirectoryError):
        discovery.write_text("a hub")


def test_a_settings_file_that_the_client_replaces_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = tmp_path / "cline"
    program.write_text(
        RECORDS + 'touch "$RECORD.ready"; while [ ! -e "$RECORD.go" ]; do sleep 0.01; done\n'
        '[ -f "$CLINE_PROVIDER_SETTINGS_PATH" ]\n'
    )
    program.chmod(0o755)
    script = (
        "import sys; from pathlib import Path; from tests.cli.launch import test_providers as t\n"
        "import os; from mlxcache.cli.launch.clients import CLIENTS, ClientName\n"
        "here = Path(sys.argv[1]); i = t.Invocation(here / 'cline', (), os.environ, here, here)\n"
        "sys.exit(t.run_client(i, CLIENTS[ClientName.CLINE].configure(t.SERVICE, i), t.SERVICE))"
    )
    record = tmp_path / "record"
    environ = os.environ | {"RECORD": str(record), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environ) as running:
        end = time.monotonic() + 60
        while not Path(f"{record}.ready").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert remove_abandoned_settings() == []
        Path(f"{record}.go").touch()
        assert running.wait(60) == 0
    assert list(tmp_path.glob("mlxcache-launch-*")) == []


def test_files_that_a_killed_client_left_beside_its_settings_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can hold the key: Cline writes its settings to another file first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "mlxcache-launch-abc"
    (folder / "more").mkdir(parents=True)
    for name in ("lock", "settings.json", "settings.json.1234.tmp", "more/copy.json"):
        (folder / name).write_text("a key")
    assert remove_abandoned_settings() == []
    assert not folder.exists()


def test_copilot_needs_no_account(tmp_path: Path) -> None:
    """Other credentials are not sent, and prompt and reply fit into the context."""
    setup = configure_copilot(SERVICE, invoked(tmp_path))
    environ = {"COPILOT_PROVIDER_BEARER_TOKEN": "theirs", "GH_TOKEN": "kept"}
    found = setup.environment(SERVICE, environ)
    assert found["COPILOT_PROVIDER_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert found["COPILOT_PROVIDER_API_KEY"] == "a key"
    assert "COPILOT_PROVIDER_BEARER_TOKEN" not in found
    assert found["GH_TOKEN"] == "kept"
    limits = [found[f"COPILOT_PROVIDER_MAX_{one}_TOKENS"] for one in ("PROMPT", "OUTPUT")]
    assert sum(map(int, limits)) == 40_000
    assert setup_object(setup, SERVICE, invoked(tmp_path))["unset"] == list(setup.unset)


def folder_told(named: str | None, folder: Path) -> str:
    """What a client that is started in `folder` reads from PWD, if the user's is `named`."""
    program, record = folder / "told.py", folder / "told"
    told = f"import os\nopen({str(record)!r}, 'w').write(os.environ['PWD'])\n"
    program.write_text(f"#!{sys.executable}\n{told}")
    program.chmod(0o755)
    environ = {} if named is None else {"PWD": named}
    invocation = Invocation(program, (), environ, folder, folder)
    setup = CLIENTS[ClientName.OPENCODE].configure(SERVICE, invocation)
    assert run_client(invocation, setup, SERVICE) == 0
    return record.read_text()


def test_the_client_works_on_the_folder_in_which_it_is_started(tmp_path: Path) -> None:
    """OpenCode takes it from PWD, which a program may pass on unchanged; a link to it is kept."""
    folder, link = tmp_path / "project", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    assert folder_told(str(link), folder) == str(link)
    for other in (str(tmp_path), str(tmp_path / "none"), None):
        assert folder_told(other, folder) == str(folder)


def test_continue_gets_a_configuration_for_one_run(tmp_path: Path) -> None:
    """The key is in a variable, not in the file; a configuration of the user's is not replaced."""
    ran = Ran(ClientName.CONTINUE, tmp_path)
    text = ran.settings.read_text()
    (model,) = json.loads(text)["models"]
    assert (model["provider"], model["model"]) == ("openai", "current-model")
    assert model["apiBase"] == "http://127.0.0.1:1/v1"
    assert model["apiKey"] == "${{ secrets.MLXCACHE_API_KEY }}"
    assert ran.variables["MLXCACHE_API_KEY"] == "a key"
    assert model["contextLength"] == model["defaultCompletionOptions"]["contextLength"] == 40_000
    assert model["defaultCompletionOptions"]["maxTokens"] == 10_000
    assert SERVICE.credential not in text
    own = configure_continue(SERVICE, invoked(tmp_path, "--config", "theirs.yaml"))
    assert own.settings_in is None
