"""A user's machine, and a server, for the tests of `mlxcache launch`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlxcache.cli.main import app
from tests.forked import served
from tests.served import Served

FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "codex-cli ${FAKE_VERSION:-9.9.9}"; exit; fi
{ for word in "$@"; do printf 'ARG %s\\n' "$word"; done; env; } > "$FAKE_OUTPUT.part"
for path in "$QWEN_CODE_SYSTEM_SETTINGS_PATH" "$CLINE_PROVIDER_SETTINGS_PATH"; do
  [ -f "$path" ] && cp -p "$path" "$FAKE_OUTPUT.settings"
done
mv "$FAKE_OUTPUT.part" "$FAKE_OUTPUT"
echo $$ > "$FAKE_OUTPUT.pid"
while [ $# -gt 1 ]; do [ "$1" = --settings ] && cp "$2" "$FAKE_OUTPUT.settings"; shift; done
[ -e "$FAKE_WAIT" ] && exec sleep 600
exit ${FAKE_STATUS:-7}
"""
"""A client that records its arguments and environment, and keeps running while a file exists."""

_OTHERS = (
    *("ANTHROPIC_", "CLAUDE", "CLINE_", "COPILOT_", "LOCAL_", "MLXCACHE_", "MLX_"),
    *("OPENAI_", "OPENCODE", "PI_", "QWEN_"),
)


class Here:
    """A user's machine: a home, a project folder, and the records of the fake clients."""

    def __init__(self, folder: Path):
        self.folder = folder
        names = ("home", "project", "bin", "tmp")
        self.home, self.project, self.programs, self.temporary = (folder / n for n in names)
        self.output, self.wait = folder / "output", folder / "wait"
        for one in (self.home, self.project, self.programs, self.temporary):
            one.mkdir()

    def install(self, *names: str, program: str = FAKE) -> None:
        for name in names:
            (self.programs / name).write_text(program)
            (self.programs / name).chmod(0o755)

    def launch(self, *arguments: str, status: int = 7) -> Result:
        """Run the command and check its exit status, by default the client's."""
        result = CliRunner().invoke(app, ["launch", *arguments])
        assert result.exit_code == status, result.output
        return result

    @property
    def arguments(self) -> list[str]:
        lines = self.output.read_text().splitlines()
        return [line.removeprefix("ARG ") for line in lines if line.startswith("ARG ")]

    @property
    def variables(self) -> dict[str, str]:
        lines = self.output.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if re.match(r"[A-Za-z_]\w*=", line))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    made = Here(tmp_path)
    for name in [n for n in os.environ if n.startswith(_OTHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("TMPDIR", str(made.temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
    monkeypatch.setenv("PATH", f"{made.programs}:/bin:/usr/bin")
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLXCACHE_PORT", "9")  # a server may run at the default port
    monkeypatch.setenv("FAKE_OUTPUT", str(made.output))
    monkeypatch.setenv("FAKE_WAIT", str(made.wait))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(made.project)
    return made


@pytest.fixture(scope="package")
def server(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--model", str(toy("llama")), "--ram", "200MB", "--disk", "off", "--context", "4096")
    with served(*flags, home=tmp_path_factory.mktemp("home")) as running:
        yield running
