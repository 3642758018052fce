"""`mlxcache uninstall`: all that a server leaves is removed, and nothing of anybody else's."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import platformdirs
import pytest
from typer.testing import CliRunner, Result

from mlxcache.cli import confirm
from mlxcache.cli.main import app
from mlxcache.kernels import kernel_folder
from tests.served import served


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, with the cache folder in `cache` and config.toml in `config`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MLXCACHE_CONFIG", raising=False)
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_: tmp_path / "config")
    return tmp_path


def run(*arguments: str, status: int = 0, answer: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["uninstall", *arguments], input=answer)
    assert result.exit_code == status, result.output
    return result


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_all_that_a_server_leaves_is_removed(home: Path) -> None:
    """Not while it runs, also where nobody can be asked. What it left is listed with its size."""
    cache, config = home / "cache", home / "config" / "config.toml"
    flags = ("--ram", "200MB", "--disk", "1GB", "--cache-dir", str(cache))
    with served(*flags, home=home) as running:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        for answers in (("--yes",), ()):
            refused = run(*answers, status=1).output.replace("\n", " ")
            assert running.url in refused
            assert "stop it" in refused
        running.stop()
    (cache / "passes.json").write_text("{}")  # as with --speculate auto
    (cache / "unclean-starts").write_text(".")  # as a service
    config.parent.mkdir()
    config.write_text("port = 8081\n")
    completion = home / ".zfunc" / "_mlxcache"
    completion.parent.mkdir()
    completion.write_text("#compdef mlxcache")
    assert {"demo", "store"} <= {one.name for one in cache.iterdir()}
    removed = json.loads(run("--yes", "--json").output)["removed"]
    assert {one["path"] for one in removed} == {
        *(str(cache), str(cache / "store"), str(config), str(completion))
    }
    assert all(one["bytes"] > 0 for one in removed)
    assert files(home) == []
    assert not cache.exists()
    assert not config.parent.exists()


def furnished(cache: Path) -> None:
    (cache / "store" / "runs").mkdir(parents=True)
    (cache / "store" / "runs" / "a.safetensors").write_bytes(b"x" * 5000)


def test_it_asks_and_removes_nothing_for_a_no(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off a terminal it wants --yes."""
    cache = home / "cache"
    furnished(cache)
    assert "--yes" in run(status=2).output
    monkeypatch.setattr(confirm, "can_ask", lambda: True)
    asked = run(status=1, answer="n\n").output
    assert str(cache / "store") in asked.replace("\n", "")
    assert "Remove all of it (8.2 KB)?" in asked
    assert files(cache) == ["store/runs/a.safetensors"]
    assert "Removed." in run(answer="y\n").output
    assert not cache.exists()


def test_kernels_are_removed_from_the_default_folder(home: Path) -> None:
    """They are those of all servers of the user, whatever their cache folders."""
    kernel = kernel_folder() / "mlx" / "1.0" / "cpu" / "libx.so"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert "kernels" in run("--yes").output
    assert not kernel_folder().exists()


def test_what_others_put_into_the_folder_stays(home: Path) -> None:
    """A folder named by mistake, such as the home folder, loses nothing else."""
    furnished(home)
    (home / "diary.txt").write_text("mine")
    (home / "logbook").mkdir()
    theirs = ["demo/song.mid", "incoming/mail", "log/diary.log", "serving/menu.json"]
    theirs += ["store/books.db", "store/checkpoints/net.pt", "store/runs/marathon.csv"]
    for name in theirs:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    (home / "log" / "serve-8081.log").write_text("ready")
    run("--yes", "--cache-dir", str(home))
    assert files(home) == sorted(["diary.txt", *theirs])
    assert (home / "logbook").is_dir()


def test_folders_that_are_only_named_alike_are_not_listed(home: Path) -> None:
    (home / "log").mkdir()
    (home / "log" / "diary.log").write_text("mine")
    (home / "store").mkdir()
    removed = json.loads(run("--yes", "--json", "--cache-dir", str(home)).output)["removed"]
    assert removed == []
    assert (home / "store").is_dir()


def test_what_others_keep_behind_a_link_stays(home: Path) -> None:
    cache, other = home / "cache", home / "other"
    furnished(other)
    (other / "store" / "photo.jpg").write_bytes(b"x")
    cache.mkdir()
    (cache / "store").symlink_to(other / "store")
    run("--yes")
    assert files(home) == ["other/store/photo.jpg"]


def test_what_is_left_is_named_with_its_command(home: Path) -> None:
    """The service, models of the Hub, completion of bash, and the program."""
    unit = home / ".config" / "systemd" / "user" / "mlxcache.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]")
    bash = home / ".bash_completions" / "mlxcache.sh"
    bash.parent.mkdir()
    bash.write_text("complete")
    shown = run("--yes").output
    assert "Nothing was found." in shown
    assert "systemctl --user disable --now mlxcache; rm " in shown
    assert "~/.bashrc" in shown
    assert "the program" in shown
    assert "rm -rf " in shown
    assert unit.exists()


def test_a_store_behind_a_link_is_removed_with_the_link(home: Path) -> None:
    """As on a Mac whose older folder was on another disk."""
    cache, other = home / "cache", home / "other"
    furnished(other)
    cache.mkdir(parents=True)
    (cache / "store").symlink_to(other / "store")
    run("--yes")
    assert not (other / "store").exists()
    assert not cache.exists()
