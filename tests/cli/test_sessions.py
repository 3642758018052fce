"""The commands for sessions, snapshots and the cache, with a server and without."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mlxcache.cli import output
from mlxcache.cli.main import app
from mlxcache.cli.options import find_server
from mlxcache.cli.remote import NoServer, Remote
from mlxcache.cli.sessions import find_session
from mlxcache.errors import NotFound
from mlxcache.store.lock import serving
from tests.cli.conftest import call
from tests.forked import served
from tests.served import Served

NOWHERE = "http://127.0.0.1:9"


pytestmark = pytest.mark.usefixtures("no_server")


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
def copied_folder(server: Served, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the running server's cache folder, as a killed server leaves it."""
    return Path(shutil.copytree(home / "cache", tmp_path_factory.mktemp("left") / "cache"))


@pytest.fixture
def offline(copied_folder: Path, tmp_path: Path) -> tuple[str, str]:
    """Options that name a copy of the folder, which no server uses."""
    shutil.copytree(copied_folder, tmp_path / "cache")
    return ("--cache-dir", str(tmp_path / "cache"))


@pytest.fixture(params=["server", "folder"])
def where(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Options that name the running server, or a folder without a server."""
    if request.param == "folder":
        return tuple(request.getfixturevalue("offline"))
    return ("--url", request.getfixturevalue("server").url)


def test_the_list_is_a_table_and_json(where: tuple[str, ...]) -> None:
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
    """Commands find it by the start of its id and by its name; other sessions keep their tokens."""
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
    call("sessions", "rm", "my try", "--yes", *where)
    after = listing(*where)
    assert {one["id"] for one in after} == before
    assert all(one["durable_tokens"] == one["tokens"] for one in after)


def test_a_session_is_found_by_title_label_and_id(where: tuple[str, ...]) -> None:
    """A name wins over a title; a title of two sessions is an error that lists both."""
    one = next(one for one in listing(*where) if one["label"] == "one")
    for text in (one["title"], "one", one["id"], one["id"][4:14], one["id"][-8:]):
        found = json.loads(call("sessions", "show", text, "--json", *where).output)
        assert found["id"] == one["id"]
    made = json.loads(call("sessions", "fork", one["id"], "--json", *where).output)["id"]
    output = call("sessions", "show", one["title"], *where, status=1).output
    assert made in output.replace("\n", "")
    call("sessions", "rename", made, one["title"], *where)
    call("sessions", "rm", one["title"], "--yes", *where)
    assert made not in {one["id"] for one in listing(*where)}


def test_a_session_is_found_by_the_end_of_its_label() -> None:
    """At least 8 characters, of one session only; whole names come first."""
    labels = ("a1b2c3d4-50242adf", "other-50242adf", "other-1234567z", None)
    sessions = [
        {"id": f"ses_{at}", "name": "1234567z" if label is None else None, "title": None,
         "label": label, "model": "m"} for at, label in enumerate(labels)
    ]  # fmt: skip
    assert find_session(sessions, "4-50242adf") == sessions[0]
    assert find_session(sessions[:1], "50242adf") == sessions[0]
    assert find_session(sessions, "1234567z") == sessions[3]
    forked = {**sessions[3], "id": "ses_0123456789abc"}
    assert find_session([*sessions, forked], "56789abc") == forked
    with pytest.raises(NotFound, match="several sessions: ses_0, ses_1"):
        find_session(sessions, "50242adf")
    of_two = [sessions[0], {**sessions[1], "model": "other"}]
    with pytest.raises(NotFound, match=r"several sessions: ses_0 \(m\), ses_1 \(other\)"):
        find_session(of_two, "50242adf")
    with pytest.raises(NotFound, match="No session has"):
        find_session(sessions, "0242adf")


def test_a_snapshot_is_written_and_imported(
    where: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not a snapshot is refused, and no partial file is left."""
    file = tmp_path / "s.safetensors"
    source = next(one for one in listing(*where) if one["label"] == "one")
    monkeypatch.chdir(tmp_path)
    named = f"{source['id']}.safetensors"
    assert f"Wrote {named}: " in call("snapshot", source["id"], *where).output
    Path(named).rename(file)
    assert file.stat().st_size > source["tokens"]
    made = json.loads(call("restore", str(file), "--name", "back", "--json", *where).output)
    assert (made["name"], made["tokens"]) == ("back", source["tokens"])
    assert made["durable_tokens"] == made["tokens"]
    call("sessions", "rm", made["id"], "-y", *where)
    file.write_bytes(b"no snapshot")
    assert "Error" in call("restore", str(file), *where, status=1).output
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["s.safetensors"]


def test_prompt_caches_of_mlx_lm_are_exported_and_imported(
    server: Served, offline: tuple[str, str], tmp_path: Path
) -> None:
    """Only a server does it; files by mlxcache carry their tokens, others need the prompt."""
    where, file = ("--url", server.url), tmp_path / "cache.safetensors"
    source = next(one for one in listing(*where) if one["label"] == "one")
    call("snapshot", source["id"], "-o", str(file), "--format", "mlx-lm", *where)
    made = json.loads(call("restore", str(file), "--name", "back", "--json", *where).output)
    assert made["tokens"] == source["tokens"]
    again = call("restore", str(file), "--prompt", "[5, 6]", "--json", *where)
    for id in (made["id"], json.loads(again.output)["id"]):
        call("sessions", "rm", id, "--yes", *where)
    for command in (
        ("snapshot", source["id"], "-o", str(file), "--format", "mlx-lm", "--yes"),
        ("restore", str(file), "--prompt", "x"),
        ("restore", str(file)),
    ):
        assert "server" in call(*command, *offline, status=1).output


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions", "show", "ses_nothing"),
        ("sessions", "rm", "", "--yes"),
        ("sessions", "fork", "ses_", "--at", "9"),
        ("sessions", "fork", "{id}", "--at", "99999"),
        ("snapshot", "ses_nothing", "-o", "x"),
    ],
)
def test_a_failure_is_status_1_and_an_error_message(
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
        ("snapshot",),
        ("snapshot", "x", "-o", "f", "--format", "zip"),
        ("snapshot", "x", "-o", "-"),
        ("restore", "no-such-file"),
        ("warm", "no-such-file"),
        ("explain", "no-such-file"),
        ("cache", "prune", "--to", "lots"),
        ("cache", "prune", "--to", "25%"),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    call(*arguments, status=2)


def test_a_server_is_found_by_the_folder_that_it_serves_from(
    server: Served, home: Path, tmp_path: Path
) -> None:
    """The port need not be given, and the folder is not opened beside the server."""
    where = ("--cache-dir", str(home / "cache"))
    assert any(one["ram_bytes"] for one in listing(*where))
    (tmp_path / "link").symlink_to(home / "cache")
    for folder in (home / "cache", tmp_path / "link"):
        assert find_server(None, None, folder).url == server.url
        assert find_server(server.url, None, folder).url == server.url


def kept(*where: str) -> list[tuple[object, ...]]:
    """What the changing commands change of each session."""
    return [(one["id"], one["name"], one["pinned"], one["tokens"]) for one in listing(*where)]


@pytest.mark.parametrize("noted", ["copied", "locked", "configured"])
def test_a_command_on_a_copy_of_the_folder_changes_nothing_of_the_server(
    server: Served,
    offline: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: str,
) -> None:
    """Even if the copy names the server's address, or the settings do."""
    before = kept("--url", server.url)
    id = str(before[0][0])
    where: tuple[str, ...] = () if noted == "configured" else offline
    status = 1 if noted == "locked" else 0
    if noted == "configured":
        monkeypatch.setenv("MLXCACHE_CACHE_DIR", offline[1])
        monkeypatch.setenv("MLXCACHE_PORT", server.url.rpartition(":")[2])
    with serving(Path(offline[1]), server.url, "m") if noted == "locked" else nullcontext():
        call("snapshot", id, "-o", str(tmp_path / "file"), *where)
        for command in (
            ("sessions", "pin", id),
            ("sessions", "rename", id, "new"),
            ("sessions", "fork", id),
            ("restore", str(tmp_path / "file")),
            ("sessions", "rm", id, "--yes"),
            ("cache", "prune", "--to", "1KB"),
            ("cache", "clear", "--pinned", "--yes"),
        ):
            call(*command, *where, status=status)
            assert kept("--url", server.url) == before
        call("cache", "clear", "--yes", "--url", server.url, *offline, status=1)
    assert len(listing(*offline)) == (2 if noted == "locked" else 0)
    assert kept("--url", server.url) == before


def test_a_folder_of_hard_links_to_the_server_s_files_is_not_changed(
    server: Served, home: Path, tmp_path: Path
) -> None:
    """Its lock is the server's, but the folder is not."""
    shutil.copytree(home / "cache", tmp_path / "links", copy_function=os.link)
    before = kept("--url", server.url)
    where = ("--cache-dir", str(tmp_path / "links"))
    assert "uses" in call("cache", "clear", "--yes", *where, status=1).output
    assert kept("--url", server.url) == before


def test_a_folder_in_use_by_an_unreachable_server_is_read_only(
    offline: tuple[str, str],
) -> None:
    folder = Path(offline[1])
    id = listing(*offline)[0]["id"]
    with serving(folder, NOWHERE, "some/model"):
        assert listing(*offline)
        for change in (
            ("sessions", "pin", id),
            ("sessions", "rm", id, "--yes"),
            ("sessions", "fork", id),
            ("cache", "prune"),
            ("cache", "clear", "--yes"),
        ):
            output = call(*change, *offline, status=1).output
            assert NOWHERE in output
            assert "some/model" in output
    call("sessions", "pin", id, *offline)


def test_a_given_address_that_does_not_answer_is_an_error(
    offline: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag and variable both count; --cache-dir wins over the variable."""
    assert NOWHERE in call("sessions", "--url", NOWHERE, status=1).output
    assert NOWHERE in call("sessions", "--url", NOWHERE, *offline, status=1).output
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", offline[1])
    assert len(listing()) == 2
    monkeypatch.setenv("MLXCACHE_URL", NOWHERE)
    output = call("cache", "clear", "--yes", status=1).output
    assert NOWHERE in output
    assert "MLXCACHE_URL" in output
    assert len(listing(*offline)) == 2
    assert NOWHERE in call("warm", __file__, status=1).output


def test_warming_makes_the_first_turn_warm(server: Served, tmp_path: Path) -> None:
    """The file is a system prompt as text; warming makes no session."""
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
    figures = json.loads(call("cache", "stats", "--json", *where).output)
    assert figures["disk"]["used_bytes"] > 0
    assert figures["sessions"] == 2
    printed = call("cache", "stats", *where).output
    assert re.search(r"^In short\n(  .*\n)*?  disk +[\d.]+ [KMG]B", printed)
    if "ram" in figures:  # of a server
        assert re.search(r"^  index +[\d.]+ [KM]B  ", printed, re.MULTILINE)
    figures_with_words = printed.partition("Requests canonicalised")[0].splitlines()
    for heading in "\n".join(figures_with_words).split("\n\n"):
        labels = [re.split("  +", line.strip())[0] for line in heading.splitlines()[1:]]
        assert len(labels) == len(set(labels)), heading
    for line in figures_with_words:
        assert len(line) <= 80, line
        assert not line.startswith(" ") or len(re.split("  +", line.strip())) == 3, line
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
    id = listing(*offline)[0]["id"]
    call("sessions", "pin", id, *offline)
    assert "Freed" in call("cache", "prune", *offline).output
    done = json.loads(call("cache", "clear", "--json", "--yes", *offline).output)
    assert done["sessions"] == 1
    [kept] = listing(*offline)
    assert (kept["id"], kept["durable_tokens"]) == (id, kept["tokens"])
    assert (
        "Removed 1 session, freed" in call("cache", "clear", "--pinned", "--yes", *offline).output
    )
    assert "no sessions yet" in call("sessions", *offline).output


def test_a_missing_folder_is_empty_and_is_not_made(tmp_path: Path) -> None:
    where = ("--cache-dir", str(tmp_path / "none"))
    assert listing(*where) == []
    assert str(tmp_path / "none") in call("sessions", *where).output.replace("\n", "")
    call("cache", "check", *where)
    call("cache", "clear", "--yes", *where)
    assert json.loads(call("cache", "stats", "--json", *where).output)["sessions"] == 0
    call("sessions", "show", "x", *where, status=1)
    assert not (tmp_path / "none").exists()


def test_a_server_with_a_key_refuses_requests_without_it(toy: Any, tmp_path: Path) -> None:
    """The error names the option; after a kill the folder is read directly."""
    flags = ("--model", str(toy("llama")), "--cache-dir", str(tmp_path / "c"), "--ram", "300MB")
    with served(*flags, home=tmp_path, environ={"MLXCACHE_API_KEY": "secret"}) as running:
        where = ("--url", running.url)
        assert "--api-key" in call("sessions", *where, status=1).output
        assert listing(*where, "--api-key", "secret") == []
        running.wait_for("^Address")
        running.stop(signal.SIGKILL)
    assert listing("--cache-dir", str(tmp_path / "c")) == []


def test_an_address_without_an_mlxcache_server_is_refused() -> None:
    with pytest.raises(NoServer, match=f"answers at {NOWHERE}"):
        find_server(NOWHERE.removeprefix("http://"), None)
    with pytest.raises(NoServer):
        Remote(NOWHERE).sessions()
    assert Remote(NOWHERE).health() is None


REMOVING = (
    ("sessions", "rm", "one"),
    ("cache", "clear"),
    ("snapshot", "one", "-o", "{file}"),
)


@pytest.mark.parametrize("command", REMOVING, ids=lambda one: " ".join(one[:2]))
def test_what_removes_or_replaces_asks_first(
    offline: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """Off a terminal it wants --yes; at one it changes nothing for a no."""
    file = tmp_path / "kept"
    file.write_bytes(b"precious")
    words = [word.format(file=file) for word in command]
    refused = call(*words, *offline, status=2).output
    assert "--yes" in refused
    monkeypatch.setattr(output, "can_ask", lambda: True)
    for answer in ("n\n", "\n"):
        result = CliRunner().invoke(app, [*words, *offline], input=answer)
        assert result.exit_code == 1
        assert "? [y/N]" in result.output
        assert "Nothing was changed." in result.output
    assert len(listing(*offline)) == 2
    assert file.read_bytes() == b"precious"
    result = CliRunner().invoke(app, [*words, *offline], input="y\n")
    assert result.exit_code == 0, result.output
    left = {"rm": 1, "clear": 0, "one": 2}[words[1]]
    assert len(listing(*offline)) == left
    assert (file.read_bytes() == b"precious") is (words[0] != "snapshot")


def test_the_question_names_what_would_go(
    where: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "can_ask", lambda: True)
    one = next(one for one in listing(*where) if one["label"] == "one")

    def ask_and_refuse(*words: str) -> str:
        return " ".join(CliRunner().invoke(app, [*words, *where], input="n\n").output.split())

    removing = ask_and_refuse("sessions", "rm", one["id"])
    assert f"Remove {one['id']}, 'Fix the bug in the parser' ({one['tokens']} tokens)?" in removing
    assert re.search(
        r"Remove 2 sessions and all cached tokens .+, [\d.]+ [KM]B on disk\?",
        ask_and_refuse("cache", "clear"),
    )
    (tmp_path / "old").write_bytes(b"x" * 1500)
    replacing = ask_and_refuse("snapshot", one["id"], "-o", str(tmp_path / "old"))
    assert "old exists (1.5 KB). Replace it?" in replacing
    assert len(listing(*where)) == 2


def test_a_snapshot_replaces_no_device(offline: tuple[str, str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = call("snapshot", "one", "-o", str(pipe), "--yes", *offline, status=2).output
    assert "must be a regular file" in refused
    assert pipe.is_fifo()


def test_a_name_that_the_server_refuses_is_refused_everywhere(
    where: tuple[str, ...], tmp_path: Path
) -> None:
    """By `rename`, `fork` and `restore`, with a server and without; none is cut."""
    file = tmp_path / "s.safetensors"
    call("snapshot", "one", "-o", str(file), *where)
    long = "x" * 201
    for words in (
        ("sessions", "rename", "one", long),
        ("sessions", "fork", "one", "--name", long),
        ("restore", str(file), "--name", long),
    ):
        assert "at most 200 characters" in call(*words, *where, status=1).output
    assert len(listing(*where)) == 2
    made = json.loads(call("restore", str(file), "--name", " a\x1b b", "--json", *where).output)
    call("sessions", "rm", made["id"], "--yes", *where)
    assert made["name"] == "a b"


def test_the_question_is_asked_at_a_real_terminal(offline: tuple[str, str]) -> None:
    """On standard error, so that the output can go to a file."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mlxcache.cli.main", "cache", "clear", "--json", *offline]
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE) as asked:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 1000)
        os.write(ours, b"y\n")
        assert asked.stdout is not None
        assert json.loads(asked.stdout.read())["sessions"] == 2
    os.close(ours)
    assert asked.returncode == 0
