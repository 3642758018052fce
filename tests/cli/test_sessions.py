"""The commands for sessions, snapshots and the cache, with a server and without."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxcache.cli.main import app
from mlxcache.cli.remote import NoServer, Remote
from mlxcache.cli.target import find_server
from mlxcache.errors import ConfigError
from mlxcache.store.lock import serving
from tests.served import Served, served

NOWHERE = "http://127.0.0.1:9"
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings and no cache folder of whoever runs the tests."""
    for name in ("MLXCACHE_URL", "MLXCACHE_API_KEY", "MLXCACHE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", str(tmp_path / "unused"))
    monkeypatch.setenv("MLXCACHE_PORT", "9")  # where nobody serves, whoever runs the tests
    monkeypatch.setenv("COLUMNS", "80")


def call(*arguments: str, status: int = 0) -> Result:
    """Run a command that is to end with `status`."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def ask(url: str, label: str, words: str, system: str = "Be brief. " * 40) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": words}]
    body = {"messages": messages, "max_tokens": 8}
    headers = {"X-Session-Id": label, "User-Agent": "agent/1.0"}
    httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ).raise_for_status()


def listing(*where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("sessions", "--json", *where).output)["data"]
    return found


def until_durable(*where: str) -> None:
    end = time.monotonic() + 20
    while not all(one["durable_tokens"] == one["tokens"] for one in listing(*where)):
        assert time.monotonic() < end, listing(*where)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(toy: Any, home: Path) -> Iterator[Served]:
    """A server with two sessions, killed at the end."""
    flags = ("--model", str(toy("llama")), "--cache-dir", str(home / "cache"), "--ram", "300MB")
    with served(*flags, "--disk", "1GB", home=home) as running:
        ask(running.url, "one", "Fix the bug in the parser")
        ask(running.url, "two", "Write a test for it")
        until_durable("--url", running.url)
        yield running


@pytest.fixture(scope="module")
def left(server: Served, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server that was killed leaves in its cache folder."""
    folder = tmp_path_factory.mktemp("left")
    shutil.copytree(home / "cache", folder / "cache")
    shutil.rmtree(folder / "cache" / "serving")
    return folder / "cache"


@pytest.fixture
def offline(left: Path, tmp_path: Path) -> tuple[str, str]:
    """The options for a folder of one's own, which no server uses."""
    shutil.copytree(left, tmp_path / "cache")
    return ("--cache-dir", str(tmp_path / "cache"))


@pytest.fixture(params=["server", "folder"])
def where(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options for a running server, and for a folder without one."""
    if request.param == "folder":
        return tuple(request.getfixturevalue("offline"))
    return ("--url", request.getfixturevalue("server").url)


def test_the_list_is_a_table_and_json(where: tuple[str, ...]) -> None:
    """Newest first, with titles, sizes and tiers."""
    output = call("sessions", *where).output
    head, *rows = (line for line in output.splitlines() if line.strip())
    assert head.split() == ["id", "name", "tokens", "RAM", "disk", "tier", "pinned", "last", "used"]
    assert any("Fix the bug in the parser" in row for row in rows)
    found = {one["title"]: one for one in listing(*where)}
    one = found["Fix the bug in the parser"]
    assert (one["label"], one["client"], one["agents"]) == ("one", "agent/1.0", 0)
    assert one["durable_tokens"] == one["tokens"] > 100
    assert one["tier"] in ("both", "disk")
    assert json.loads(call("sessions", "list", "--json", *where).output)["object"] == "list"


def test_a_session_is_named_pinned_forked_and_removed(where: tuple[str, ...]) -> None:
    """By id, by its beginning, by name; what others need stays."""
    before = {one["id"] for one in listing(*where)}
    source = next(one for one in listing(*where) if one["label"] == "two")
    made = json.loads(call("sessions", "fork", source["id"], "--at", "50", "--json", *where).output)
    assert (made["tokens"], made["title"]) == (50, source["title"])
    call("sessions", "rename", made["id"][:12], "my try", *where)
    assert "Pinned" in call("sessions", "pin", "my try", *where).output
    output = call("sessions", "show", "my try", *where).output
    assert "50, of which 50 are durable" in output
    assert json.loads(call("sessions", "show", "my try", "--json", *where).output)["pinned"]
    call("sessions", "unpin", "my try", *where)
    call("sessions", "rm", "my try", *where)
    after = listing(*where)
    assert {one["id"] for one in after} == before
    assert all(one["durable_tokens"] == one["tokens"] for one in after)


def test_a_session_is_found_by_what_the_list_shows_of_it(where: tuple[str, ...]) -> None:
    """A title or a label that just one has; a name counts more, and two of a kind are told."""
    one = next(one for one in listing(*where) if one["label"] == "one")
    for text in (one["title"], "one", one["id"], one["id"][4:14]):
        found = json.loads(call("sessions", "show", text, "--json", *where).output)
        assert found["id"] == one["id"]
    made = json.loads(call("sessions", "fork", one["id"], "--json", *where).output)["id"]
    told = call("sessions", "show", one["title"], *where, status=1).output
    assert made in told.replace("\n", "")
    call("sessions", "rename", made, one["title"], *where)
    call("sessions", "rm", one["title"], *where)
    assert made not in {one["id"] for one in listing(*where)}


def test_a_snapshot_is_written_and_taken_in(where: tuple[str, ...], tmp_path: Path) -> None:
    """Whole or not at all, under a name if one is given."""
    file = tmp_path / "s.safetensors"
    source = next(one for one in listing(*where) if one["label"] == "one")
    assert "Wrote" in call("snapshot", source["id"], "-o", str(file), *where).output
    assert file.stat().st_size > source["tokens"]
    made = json.loads(call("restore", str(file), "--name", "back", "--json", *where).output)
    assert (made["name"], made["tokens"]) == ("back", source["tokens"])
    assert made["durable_tokens"] == made["tokens"]
    call("sessions", "rm", made["id"], *where)
    file.write_bytes(b"no snapshot")
    assert "Error" in call("restore", str(file), *where, status=1).output
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["s.safetensors"]


def test_files_of_mlx_lm_go_out_and_come_in(
    server: Served, offline: tuple[str, str], tmp_path: Path
) -> None:
    """By a server, which has the model; ours carry their tokens, theirs need the prompt."""
    where, file = ("--url", server.url), tmp_path / "cache.safetensors"
    source = next(one for one in listing(*where) if one["label"] == "one")
    call("snapshot", source["id"], "-o", str(file), "--format", "mlx-lm", *where)
    made = json.loads(call("restore", str(file), "--name", "back", "--json", *where).output)
    assert made["tokens"] == source["tokens"]
    again = call("restore", str(file), "--prompt", "[5, 6]", "--json", *where)
    for id in (made["id"], json.loads(again.output)["id"]):
        call("sessions", "rm", id, *where)
    for command in (
        ("snapshot", source["id"], "-o", str(file), "--format", "mlx-lm"),
        ("restore", str(file), "--prompt", "x"),
        ("restore", str(file)),
    ):
        assert "server" in call(*command, *offline, status=1).output


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions", "show", "ses_nothing"),
        ("sessions", "rm", ""),
        ("sessions", "fork", "ses_", "--at", "9"),
        ("sessions", "fork", "{id}", "--at", "99999"),
        ("snapshot", "ses_nothing", "-o", "x"),
    ],
)
def test_what_cannot_be_done_ends_with_1_and_a_sentence(
    where: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    id = listing(*where)[0]["id"]
    output = call(*(word.format(id=id) for word in arguments), *where, status=1).output
    assert output.startswith("Error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions", "nonsense"),
        ("sessions", "show"),
        ("sessions", "fork", "x", "--at", "0"),
        ("snapshot", "x"),
        ("snapshot", "x", "-o", "f", "--format", "zip"),
        ("snapshot", "x", "-o", "-"),
        ("restore", "no-such-file"),
        ("warm", "no-such-file"),
        ("cache", "prune", "--to", "lots"),
        ("cache", "prune", "--to", "25%"),
        ("sessions", "--url", "no address"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    call(*arguments, status=2)


def test_a_server_is_found_by_the_folder_that_it_serves_from(server: Served, home: Path) -> None:
    """Nobody has to know its port, and nothing is changed behind its back."""
    where = ("--cache-dir", str(home / "cache"))
    assert any(one["ram_bytes"] for one in listing(*where))
    assert find_server(None, None, home / "cache").url == server.url


def test_without_its_server_a_folder_in_use_is_read_and_not_changed(
    offline: tuple[str, str],
) -> None:
    """The message names who holds it."""
    folder = Path(offline[1])
    id = listing(*offline)[0]["id"]
    with serving(folder, NOWHERE, "some/model"):
        assert listing(*offline)
        for change in (
            ("sessions", "pin", id),
            ("sessions", "rm", id),
            ("sessions", "fork", id),
            ("cache", "prune"),
            ("cache", "clear"),
        ):
            output = call(*change, *offline, status=1).output
            assert NOWHERE in output
            assert "some/model" in output
    call("sessions", "pin", id, *offline)


def test_a_server_that_is_named_and_does_not_answer_is_an_error(
    offline: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag or by variable; a flag that names a folder counts more than a variable."""
    assert NOWHERE in call("sessions", "--url", NOWHERE, status=1).output
    assert NOWHERE in call("sessions", "--url", NOWHERE, *offline, status=1).output
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", offline[1])
    assert len(listing()) == 2
    monkeypatch.setenv("MLXCACHE_URL", NOWHERE)
    output = call("cache", "clear", status=1).output
    assert NOWHERE in output
    assert "MLXCACHE_URL" in output
    assert len(listing(*offline)) == 2
    assert NOWHERE in call("warm", __file__, status=1).output


def test_warming_makes_the_first_turn_warm(server: Served, tmp_path: Path) -> None:
    """A system prompt as text, or a request; it is no session."""
    where = ("--url", server.url)
    before = len(listing(*where))
    file = tmp_path / "system.txt"
    file.write_text("You review code. " * 30)
    first = json.loads(call("warm", str(file), "--json", *where).output)
    again = json.loads(call("warm", str(file), "--json", *where).output)
    assert first["fed_tokens"] > 50
    assert again["fed_tokens"] == 1
    assert "Warm: " in call("warm", str(file), *where).output
    assert len(listing(*where)) == before
    file.write_text('{"messages": [')
    assert "Error" in call("warm", str(file), *where, status=1).output


def test_figures_are_shown_and_files_are_checked(
    where: tuple[str, ...], offline: tuple[str, str]
) -> None:
    """A damaged file is named, with status 1."""
    figures = json.loads(call("cache", "stats", "--json", *where).output)
    assert figures["disk"]["used_bytes"] > 0
    assert figures["sessions"] == 2
    printed = call("cache", "stats", *where).output
    assert re.search(r"^Disk\n  used +[\d.]+ [KMG]B", printed, re.MULTILINE)
    if "ram" in figures:  # of a server
        assert re.search(r"^  index +[\d.]+ [KM]B$", printed, re.MULTILINE)
    assert "are intact" in call("cache", "check", *where).output
    assert json.loads(call("cache", "check", "--json", *where).output) == {
        "object": "list",
        "data": [],
    }
    damaged = next((Path(offline[1]) / "store" / "runs").rglob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    output = call("cache", "check", *offline, status=1).output
    assert damaged.name in output


def test_pruning_and_clearing_without_a_server(offline: tuple[str, str]) -> None:
    """What is pinned stays until it is asked for too."""
    id = listing(*offline)[0]["id"]
    call("sessions", "pin", id, *offline)
    assert "Freed" in call("cache", "prune", *offline).output
    done = json.loads(call("cache", "clear", "--json", *offline).output)
    assert done["sessions"] == 1
    [kept] = listing(*offline)
    assert (kept["id"], kept["durable_tokens"]) == (id, kept["tokens"])
    assert "Removed 1 session, freed" in call("cache", "clear", "--pinned", *offline).output
    assert "no sessions yet" in call("sessions", *offline).output


def test_a_folder_that_is_not_there_is_empty_and_is_not_made(tmp_path: Path) -> None:
    """Looking changes nothing."""
    where = ("--cache-dir", str(tmp_path / "none"))
    assert listing(*where) == []
    assert str(tmp_path / "none") in call("sessions", *where).output.replace("\n", "")
    call("cache", "check", *where)
    call("cache", "clear", *where)
    assert json.loads(call("cache", "stats", "--json", *where).output)["sessions"] == 0
    call("sessions", "show", "x", *where, status=1)
    assert not (tmp_path / "none").exists()


def test_a_server_with_a_key_asks_for_it(toy: Any, tmp_path: Path) -> None:
    """And a killed one leaves its sessions to the folder."""
    flags = ("--model", str(toy("llama")), "--cache-dir", str(tmp_path / "c"), "--ram", "300MB")
    with served(*flags, home=tmp_path, environ={"MLXCACHE_API_KEY": "secret"}) as running:
        where = ("--url", running.url)
        assert "--api-key" in call("sessions", *where, status=1).output
        assert listing(*where, "--api-key", "secret") == []
        running.wait_for("^Address")
        running.stop(signal.SIGKILL)
    assert listing("--cache-dir", str(tmp_path / "c")) == []


def test_what_answers_and_is_no_mlxcache_is_no_server() -> None:
    """Others have a /health too."""
    with pytest.raises(ConfigError):
        find_server("localhost:8081", None)
    with pytest.raises(NoServer):
        Remote(NOWHERE).sessions()
    assert not Remote(NOWHERE).answers()
