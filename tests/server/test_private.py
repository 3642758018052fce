"""Files hold conversations, so they are private to the user, also under a loose umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.served import Served
from tests.server.api import Api, user, words

if os.name != "posix":
    pytest.skip("modes of files are POSIX's", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is written goes below it, into folders that are not there yet."""
    path = tmp_path_factory.mktemp("private")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def loose(toy: ToyMaker, folder: Path) -> Iterator[Served]:
    """A server started under a umask that lets everyone read and write."""
    before = os.umask(0)
    try:
        flags = ("--cache-dir", str(folder / "a" / "cache"), "--record", str(folder / "b" / "said"))
        with served("--model", str(toy("llama")), "--ram", "200MB", *flags, home=folder) as server:
            assert server.url
            yield server
    finally:
        os.umask(before)


def mlxcache(*arguments: str) -> None:
    command = [sys.executable, "-m", "mlxcache.cli.main", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def open_to_others(folder: Path) -> list[str]:
    """All below `folder` that anybody else may read or write, with its mode."""
    found = []
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO) and not stat.S_ISLNK(mode):
            found.append(f"{path.relative_to(folder)} {stat.filemode(mode)}")
    return found


@pytest.fixture(scope="module")
def made(loose: Served, folder: Path) -> Path:
    """The store, its index and log, what is recorded, and snapshots; the path of one of these."""
    api = Api(loose)
    for turn in range(2):
        api.chat([user(words(1, 100 + turn))], prompt_cache_key="mine")
    (session,) = api.http.get("/v1/sessions").json()["data"]
    url = ("--url", loose.url)
    for format in ("mlx-lm", "mlxcache"):
        snapshot = folder / f"out.{format}"
        mlxcache("snapshot", session["id"], "-o", str(snapshot), "--format", format, *url)
        assert stat.S_IMODE(snapshot.stat().st_mode) == 0o600
        mlxcache("restore", str(snapshot), *url)
    return snapshot


def test_nothing_is_anybody_elses(made: Path, folder: Path) -> None:
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert {".safetensors", ".sqlite", ".json"} <= kinds
    assert len(list((folder / "b" / "said").iterdir())) == 2
    assert open_to_others(folder) == []


def test_nothing_is_when_it_has_ended(loose: Served, made: Path, folder: Path) -> None:
    """A command without a server writes as privately."""
    loose.stop()
    cache = ("--cache-dir", str(folder / "a" / "cache"))
    mlxcache("restore", str(made), *cache)
    mlxcache("cache", "check", *cache)
    assert open_to_others(folder) == []


def test_what_comes_in_is_private_while_it_comes(tmp_path: Path) -> None:
    """A file that is being received lies in a folder of its user's alone."""
    from mlxcache.sessions.files import SessionFiles

    before = os.umask(0)
    try:
        unused: Any = Mock()
        folder = tmp_path / "c" / "incoming"
        files = SessionFiles(
            unused, unused, unused, submit=unused, prompt_caches=unused, incoming=folder
        )
        files.incoming(0)
    finally:
        os.umask(before)
    assert open_to_others(tmp_path) == []
