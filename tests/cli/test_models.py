"""The commands `mlxcache models`, with a server of two models, without one, and with a Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from typer.testing import CliRunner

from mlxcache.cli import output
from mlxcache.cli.main import app
from mlxcache.cli.models import complete_downloaded
from mlxcache.model import hub as hub_module
from tests.cli import conftest
from tests.fake_hub import LARGE, MODEL, FakeHub
from tests.forked import served
from tests.served import Served

DOWNLOADED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def clean(no_server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


call = partial(conftest.call, "models")


def listed(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call(*arguments, "--json").output)["data"]
    return found


# -- a running server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two models, `large` and `small`."""
    home = tmp_path_factory.mktemp("home")
    config = home / "c.toml"
    config.write_text(
        f'[models.large]\npath = "{toy("llama")}"\naliases = ["planner"]\n'
        f'[models.small]\npath = "{toy("llama", seed=2)}"\ncontext = 2048\n'
    )
    flags = ("--config", str(config), "--cache-dir", str(home / "cache"), "--ram", "300MB")
    with served(*flags, "--disk", "1GB", "--no-loop-guard", home=home) as running:
        yield running


def state_of(name: str, where: tuple[str, str]) -> str:
    return next(one["state"] for one in listed(*where) if one["id"] == name)


def test_models_are_listed_loaded_and_unloaded(server: Served) -> None:
    """A second model is loaded before it was named, by its alias or its name."""
    where = ("--url", server.url)
    assert state_of("small", where) == "never"
    assert re.search(r"not loaded yet +1\.\d MB +- ", call(*where).output)
    assert call("load", "SMALL", *where).output.startswith("Loaded: small, ")
    assert call("unload", "planner", *where).output.startswith("Unloaded: large, ")
    large, small = listed("list", *where)
    assert (large["state"], large["default"], large["aliases"]) == ("unloaded", True, ["planner"])
    assert (small["state"], small["default"], small["context_length"]) == ("loaded", False, 2048)
    heading, *rows = call("list", *where).output.splitlines()
    for word in (
        "name",
        "default",
        "state",
        "weights",
        "reserved to compute",
        "context",
        "aliases",
    ):
        assert word in heading
    assert rows[0].split()[:3] == ["large", "yes", "unloaded"]
    assert rows[0].rstrip().endswith("on request")
    assert rows[1].split()[:2] == ["small", "loaded"]
    found = json.loads(call("load", "large", "--json", *where).output)
    assert (found["id"], found["state"], found["loads"]) == ("large", "loaded", 1)


def test_a_name_that_the_server_does_not_know(server: Served) -> None:
    """It is an error that lists the names; no other model is loaded or unloaded."""
    for command in ("load", "unload"):
        output = call(command, "huge", "--url", server.url, status=1).output
        assert "There is no model 'huge'; the models are large, small" in output


def test_a_model_with_running_requests_is_not_unloaded(server: Served) -> None:
    """The command says so, and can be repeated when they have ended."""
    body = {
        "model": "large",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3000,
        "stream": True,
        "logit_bias": {"50": 100},  # so that it does not end
    }
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        lines = reply.iter_lines()  # kept: at its end, it would cancel the request
        assert any('"content"' in line for line in lines)
        output = call("unload", "large", "--url", server.url, status=1).output
        assert "Requests of this model are running" in output


def test_commands_of_a_server_need_one() -> None:
    """One line says how to start it."""
    for command in ("load", "unload"):
        assert "No server runs" in call(command, "x", status=1).output
    output = call("list", "--url", "http://127.0.0.1:9", status=1).output
    assert "No mlxcache server answers" in output


class Slow:
    """A server whose model passes through `states`."""

    def __init__(self, *states: str):
        self.states = [{"id": "m", "state": one, "loads": 0, "size_bytes": 5} for one in states]

    def load_model(self, _: str) -> dict[str, Any]:
        return self.states[0]

    def models(self) -> list[dict[str, Any]]:
        return [self.states.pop(0) if len(self.states) > 1 else self.states[0]]


@pytest.mark.parametrize(
    ("states", "status", "text"),
    [
        (("unloaded", "loading", "loaded"), 0, "Loaded: m"),
        (("unloaded", "loading", "unloaded"), 1, "m could not be loaded: the server's log"),
        (("unloaded",), 0, "Waiting for memory: m is loaded as soon as"),
    ],
)
def test_the_end_of_a_load(
    states: tuple[str, ...], status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded, it failed, or busy models hold the memory."""
    monkeypatch.setattr("mlxcache.cli.models._POLL_S", 0.001)
    if "loading" not in states:
        monkeypatch.setattr("mlxcache.cli.models._WAIT_S", 0.01)
    fake = Slow(*states)
    for name in ("load_model", "models"):
        method = getattr(fake, name)
        monkeypatch.setattr(
            f"mlxcache.cli.remote.Remote.{name}", lambda _, *a, call=method: call(*a)
        )
    monkeypatch.setattr("mlxcache.cli.remote.Remote.health", lambda _: {})
    assert text in call("load", "m", "--url", "http://127.0.0.1:9", status=status).output


CODE = "import sys; sys.argv[0] = 'mlxcache'; from mlxcache.cli.main import main; main()"


def test_names_are_completed(server: Served) -> None:
    """Those of the running server, with aliases; no server is asked."""
    words = "mlxcache models load pl"
    variables = {
        "_MLXCACHE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": "3",
        "MLXCACHE_CACHE_DIR": str(server.home / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    assert done.stdout.split() == ["planner"]


# -- the Hub -----------------------------------------------------------------------------------


@pytest.fixture
def hub(local_hub: FakeHub, toy: Any) -> FakeHub:
    """A Hub whose model is a tiny one."""
    folder: Path = toy("llama")
    local_hub.files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
    return local_hub


def test_a_model_is_downloaded_once_and_serves_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is printed, and is found again with HF_HUB_OFFLINE=1."""
    first = call("pull", MODEL).output
    assert "Complete: owner/name" in first
    assert "It serves offline" in first
    hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = json.loads(call("pull", MODEL, "--json").output)
    path = Path(found["path"])
    assert path.name == found["revision"] == hub.sha
    for name in DOWNLOADED:
        if name in hub.files:
            assert (path / name).read_bytes() == hub.files[name]
    from mlxcache.model.load import ModelSpec
    from mlxcache.model.load import load as load_model

    assert load_model(ModelSpec(MODEL)).info.id == MODEL
    (one,) = listed()
    assert (one["id"], one["path"], one["configured"]) == (MODEL, str(path), False)
    assert one["disk_bytes"] >= len(hub.files["model.safetensors"])
    assert call().output.splitlines()[1].startswith("owner/name")
    assert complete_downloaded("own") == [MODEL]
    assert complete_downloaded("x") == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client writes small parts, and does not wait before it tries again."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    fake = SimpleNamespace(sleep=lambda _: None)
    monkeypatch.setattr("huggingface_hub.file_download.time", fake)


def test_an_interrupted_download_is_continued(hub: FakeHub, impatient: None) -> None:
    """Files that are complete are not asked for again."""
    hub.break_after = len(hub.files["model.safetensors"]) // 2
    output = call("pull", MODEL, status=1).output
    assert "Error: The download of owner/name was interrupted" in output
    assert not listed()
    hub.break_after = None
    hub.fetched.clear()
    call("pull", MODEL)
    assert hub.fetched == ["model.safetensors"]
    assert [one["id"] for one in listed()] == [MODEL]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_large_file_is_continued_inside(
    hub: FakeHub, impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: bool
) -> None:
    """By another process too, as this one may have been killed; what is wrong is not kept."""
    monkeypatch.setattr(hub_module, "LEAST_BYTES", LARGE)
    weights = hub.files["model.safetensors"]
    half = hub.break_after = len(weights) // 2
    output = call("pull", MODEL, status=1).output
    assert "Error: The download of owner/name was interrupted" in output
    (part,) = (tmp_path / "hub").rglob("*.mlxcache-part")
    kept = part.read_bytes()
    assert weights.startswith(kept)
    assert half - 4096 < len(kept) <= half
    hub.break_after = None
    hub.fetched.clear()
    hub.ranges.clear()
    if damaged:
        part.write_bytes(b"x" * len(kept))
        assert "was damaged on its way" in call("pull", MODEL, status=1).output
        assert not part.exists()
    call("pull", MODEL)
    assert hub.ranges[0] == len(kept)
    assert hub.fetched.count("model.safetensors") == 1 + damaged
    assert not list((tmp_path / "hub").rglob("*-part"))
    hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = Path(json.loads(call("pull", MODEL, "--json").output)["path"])
    assert (path / "model.safetensors").read_bytes() == weights


def test_a_part_that_another_process_completed_before_the_lock_leaves_nothing(
    hub: FakeHub, impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lock is that of the Hub's own client, so this may be any program."""
    monkeypatch.setattr(hub_module, "LEAST_BYTES", LARGE)
    completed: list[Path] = []

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        blobs = tmp_path / "hub" / path.parent.name / "blobs"
        (blobs / f"{path.stem}.mlxcache-part").write_bytes(b"half")
        (blobs / path.stem).write_bytes(hub.files["model.safetensors"])
        completed.append(path)
        with WeakFileLock(path):
            yield

    monkeypatch.setattr(hub_module, "WeakFileLock", locked)
    call("pull", MODEL)
    assert completed
    assert "model.safetensors" not in hub.fetched
    assert not list((tmp_path / "hub").rglob("*-part"))
    path = Path(json.loads(call("pull", MODEL, "--json").output)["path"])
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        ((404, "RepoNotFound"), "There is no model owner/name on the Hub"),
        ((403, "GatedRepo"), "owner/name is gated: accept its terms"),
        ((404, "RevisionNotFound"), "owner/name has no revision v9"),
    ],
)
def test_what_the_hub_refuses(hub: FakeHub, refusal: tuple[int, str], text: str) -> None:
    """It is one line, and nothing is downloaded."""
    hub.refusal = refusal
    output = call("pull", MODEL, "--revision", "v9", status=1).output
    assert output.startswith(f"Error: {text}")
    assert output.count("\n") == 1


def test_what_keeps_a_model_from_being_downloaded(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is known before the weights are downloaded: a full disk, a model that mlx-lm lacks."""
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: usage(10, 10, 5))
        assert "The disk is too full for owner/name" in call("pull", MODEL, status=1).output
    own = dict(hub.files)
    hub.files = {**own, "config.json": b'{"model_type": "unheard_of"}'}
    assert "of type unheard_of" in call("pull", MODEL, status=1).output
    hub.files = {"config.json": own["config.json"], "model.gguf": b"x" * 9}
    assert "has no weights in safetensors" in call("pull", MODEL, status=1).output
    assert "takes a Hub id" in call("pull", ".", status=2).output
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL).mkdir(parents=True)
    assert "is a folder here" in call("pull", MODEL, status=2).output
    (tmp_path / MODEL).rmdir()
    hub.stop()
    assert "the Hub cannot be reached" in call("pull", MODEL, status=1).output


def test_files_that_do_not_belong_together_are_reported(hub: FakeHub) -> None:
    """A weight file that is cut, an index that lists what is not there."""
    own = hub.files["model.safetensors"]
    hub.files = {**hub.files, "model.safetensors": own[:-8]}
    output = call("pull", MODEL, status=1).output
    assert "model.safetensors is damaged or incomplete" in output
    assert f"mlxcache models rm {MODEL}" in output
    call("rm", MODEL, "--yes")
    index = {"weight_map": {"absent.weight": "model.safetensors"}}
    hub.files = {
        **hub.files,
        "model.safetensors": own,
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    assert "absent.weight, which model.safetensors lacks" in call("pull", MODEL, status=1).output


def test_a_model_is_removed_after_asking(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off a terminal --yes is needed; the bytes are those of the files."""
    call("pull", MODEL)
    assert "add --yes" in call("rm", MODEL, status=2).output
    monkeypatch.setattr(output, "can_ask", lambda: True)
    result = CliRunner().invoke(app, ["models", "rm", MODEL], input="n\n")
    assert "Remove owner/name, " in result.output
    assert "Nothing was changed" in result.output
    assert listed()
    before = sum(one.stat().st_size for one in (tmp_path / "hub").rglob("blobs/*"))
    found = json.loads(call("rm", MODEL, "--yes", "--json").output)
    assert 0 <= found["freed_bytes"] - before < 1000  # and the list of its files
    assert not list((tmp_path / "hub").glob("models--*"))
    assert "is not in the Hub's cache" in call("rm", MODEL, "--yes", status=1).output


def test_only_a_hub_id_can_be_removed(tmp_path: Path) -> None:
    """A folder or a table's name is named as wrong, before anything is asked for."""
    for name in (str(tmp_path), "./model", "small", "a/b/c"):
        assert f"models rm takes a Hub id such as org/name, not '{name}'" in " ".join(
            call("rm", name, status=2).output.split()
        )
    assert "is not in the Hub's cache" in call("rm", "a b/c", "--yes", status=1).output


def test_a_part_of_a_download_is_removed(hub: FakeHub, tmp_path: Path, impatient: None) -> None:
    """Without any weight file."""
    hub.break_after = 100
    call("pull", MODEL, status=1)
    call("rm", MODEL, "--yes")
    assert not list((tmp_path / "hub").glob("models--*"))


@pytest.mark.parametrize("known", [True, False])
def test_a_served_model_is_not_removed(hub: FakeHub, tmp_path: Path, known: bool) -> None:
    """By a server on this cache folder or another one; as a draft model too."""
    call("pull", MODEL)
    folder = tmp_path / ("unused" if known else "other")
    code = (
        "import sys, pathlib; from mlxcache.store.lock import serving\n"
        "with serving(pathlib.Path(sys.argv[1]), 'http://h:1', 'a', ['a', sys.argv[2]]):\n"
        "    print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder), MODEL]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        output = call("rm", MODEL, "--yes", status=1).output
        assert f"The server at http://h:1 (process {process.pid}) serves {MODEL}" in output
        process.communicate("")
    call("rm", MODEL, "--yes")


# -- without a server --------------------------------------------------------------------------


def test_the_models_of_the_settings_are_listed(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their size, or why they cannot be served."""
    half = tmp_path / "half"
    shutil.copytree(toy("llama"), half)
    (half / "model.safetensors").write_bytes(b"")
    config = tmp_path / "c.toml"
    config.write_text(
        f'[models.a]\npath = "{toy("llama")}"\naliases = "b"\ncontext = 4096\n'
        f'[models.h]\npath = "{half}"\n[models.away]\npath = "owner/away"\n'
    )
    monkeypatch.setenv("MLXCACHE_CONFIG", str(config))
    a, h, away = listed()
    assert (a["id"], a["default"], a["aliases"], a["context_length"]) == ("a", True, ["b"], 4096)
    assert a["path"] == str(toy("llama"))
    assert a["disk_bytes"] > 0
    assert a["problem"] is None
    assert "is damaged or incomplete" in h["problem"]
    assert (away["path"], away["problem"]) == (None, None)
    output = call("list").output
    assert "not downloaded" in output
    assert "h: " in output


def test_nothing_to_list() -> None:
    """The command to download one is printed."""
    assert listed() == []
    assert "models pull HUB_ID" in call().output
