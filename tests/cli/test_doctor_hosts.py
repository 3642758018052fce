"""`doctor --hosts` logs in to each other machine and compares versions and the model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxcache.cli.doctor.network import Run, examine_hosts, run_command
from mlxcache.config import Settings
from mlxcache.ranks.group import versions

HOSTS = "127.0.0.1,192.0.2.7"


def answering(output: str, status: int = 0, error: str = "") -> Run:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert command[0] == "ssh"
        assert "192.0.2.7" in command
        return subprocess.CompletedProcess(command, status, output, error)

    return run


def test_a_machine_with_the_same_versions_and_the_model_is_ready(tmp_path: Path):
    settings = Settings(model=str(tmp_path), hosts=HOSTS)
    here, other = examine_hosts(settings, answering(json.dumps([versions(), True])))
    assert (here.status, other.status) == ("ok", "ok")
    assert other.name == "machine 192.0.2.7"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (answering("", 255, "Permission denied"), "ssh: Permission denied"),
        (answering("", 127, "bash: no such file"), "does not run there: bash"),
        (answering(json.dumps([versions() | {"mlx": "0.1"}, True])), "mlx 0.1, here"),
        (answering(json.dumps([versions(), False])), "no model in"),
    ],
)
def test_what_is_missing_on_another_machine_fails_with_a_remedy(
    tmp_path: Path, run: Run, words: str
):
    found = examine_hosts(Settings(model=str(tmp_path), hosts=HOSTS), run)
    assert found[1].status == "fail"
    assert words in found[1].value
    assert found[1].remedy


def test_machines_that_cannot_be_used_are_a_finding(tmp_path: Path):
    """As they are an error of serve; the machines of a hostfile are asked too."""
    (found,) = examine_hosts(Settings(model="m", hosts="127.0.0.1"))
    assert "two machines" in found.value
    file = tmp_path / "hosts.json"
    (found,) = examine_hosts(Settings(model="m", hostfile=file))
    assert "no such file" in found.value
    file.write_text("{")
    (found,) = examine_hosts(Settings(model="m", hostfile=file))
    assert "cannot be read" in found.value
    hosts = [{"ssh": "127.0.0.1"}, {"ssh": "192.0.2.7"}, {"ssh": "192.0.2.7"}]
    file.write_text(json.dumps({"hosts": hosts}))
    found = examine_hosts(
        Settings(model="m", hostfile=file), answering(json.dumps([versions(), True]))
    )[1]
    assert found.status == "ok"


def test_a_program_that_is_missing_is_no_crash():
    assert run_command(["/no/such/program"]).returncode == 255
