"""Servers share a folder; a command that changes it excludes them."""

import os
import shutil
import subprocess
import sys

import pytest

from mlxcache.errors import StoreError
from mlxcache.store.lock import NOTES, exclusive_lock, servers, serving

HOLD = """
import sys; from pathlib import Path; from mlxcache.store.lock import serving
with serving(Path(sys.argv[1]), "http://127.0.0.1:9", "some/model"):
    print("held", flush=True); sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_change_is_refused_while_a_server_runs_and_named(tmp_path, server):
    with (
        pytest.raises(StoreError, match=f"127.0.0.1:9 .*some/model, process {server.pid}"),
        exclusive_lock(tmp_path),
    ):
        pass
    with serving(tmp_path, "http://127.0.0.1:10", "other"):
        assert {one.url for one in servers(tmp_path)} == {
            "http://127.0.0.1:9",
            "http://127.0.0.1:10",
        }
    assert [one.pid for one in servers(tmp_path)] == [server.pid]
    server.kill()
    server.wait()
    assert servers(tmp_path) == []
    with exclusive_lock(tmp_path):
        pass


def test_a_server_waits_for_no_command(tmp_path):
    with exclusive_lock(tmp_path):
        with pytest.raises(StoreError, match="Another command"), serving(tmp_path, "u", "m"):
            pass
        with pytest.raises(StoreError, match="Another mlxcache command"), exclusive_lock(tmp_path):
            pass
    assert servers(tmp_path) == []


def test_notes_that_are_damaged_or_stale_are_passed_over(tmp_path, server):
    [note] = (tmp_path / NOTES).glob("*.json")
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    links = shutil.copytree(tmp_path, tmp_path / "links", copy_function=os.link)
    (tmp_path / NOTES / "1-1.json").write_text("{")
    (tmp_path / NOTES / "2-1.json").write_text("[1]")
    (tmp_path / NOTES / f"{os.getpid()}-1.json").write_text(note.read_text())
    assert [one.pid for one in servers(tmp_path)] == [server.pid]
    assert servers(copy) == servers(links) == []
    with serving(copy, "u", "m") as id:
        assert [(one.id, one.pid, one.url) for one in servers(copy)] == [(id, os.getpid(), "u")]
        assert [one.pid for one in servers(tmp_path)] == [server.pid]


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"), exclusive_lock(tmp_path / "file" / "below"):
        pass


def test_notes_of_servers_that_were_killed_do_not_pile_up(tmp_path, server):
    (tmp_path / NOTES / "mine.json").write_text("{}")
    server.kill()
    server.wait()
    with serving(tmp_path, "http://here", "model") as id:
        found = {note.name for note in (tmp_path / NOTES).glob("*.json")}
        assert found == {"mine.json", f"{id}.json"}
