"""Two people's keys on one server: neither learns of the other's conversations over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.served import Served
from tests.server.api import CHAT, Api, events, until, user, words

ALICE, BOB = "alice-key-1a2b", "bob-key-3c4d"
TEXT = words(7, 60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def server(toy: ToyMaker, home: Path) -> Iterator[Served]:
    file = home / "keys"
    file.write_text(f"# two people\nalice:{ALICE}\n{BOB}\n", encoding="utf-8")
    file.chmod(0o644)
    warm = home / "system.txt"
    warm.write_text("You help with trees. " * 20, encoding="utf-8")
    flags: tuple[str, ...] = (
        "--ram",
        "200MB",
        "--cache-dir",
        str(home / "cache"),
        "--record",
        str(home / "said"),
    )
    flags += ("--api-keys-file", str(file), "--warm", str(warm), "--log-level", "debug")
    with served("--model", str(toy("llama")), *flags, home=home) as found:
        until(lambda: found.output.count(" warmed: ") == 2, 120, lambda: found.output)
        yield found


def of(server: Served, key: str) -> Api:
    api = Api(server)
    api.http.headers["Authorization"] = f"Bearer {key}"
    return api


@pytest.fixture(scope="module")
def both(server: Served) -> tuple[Api, Api, str]:
    alice, bob = of(server, ALICE), of(server, BOB)
    first = alice.chat([user(TEXT)], prompt_cache_key="work")
    assert first.cached < 5, "no more than the template's first words, which were warmed"
    (session,) = alice.http.get("/v1/sessions").json()["data"]
    return alice, bob, session["id"]


def test_the_same_words_are_computed_anew(both: tuple[Api, Api, str]) -> None:
    """And warming tells nothing either: not by its counts, which are what its time depends on."""
    alice, bob, _ = both
    body = {"messages": [user(TEXT)]}
    probe = bob.post("/v1/cache/warm", body).json()
    assert probe["cached_tokens"] < 5
    assert bob.chat([user(TEXT)]).cached > 100, "it is bob's own now"
    assert alice.post("/v1/cache/warm", body).json()["cached_tokens"] > 100


def test_a_prompt_warmed_at_the_start_is_warm_for_each(both: tuple[Api, Api, str]) -> None:
    alice, bob, _ = both
    system = {"role": "system", "content": "You help with trees. " * 20}
    for api in (alice, bob):
        assert api.chat([system, user("Hi")], tokens=2).cached > 50


def test_another_persons_session_is_404_for_every_verb(both: tuple[Api, Api, str]) -> None:
    alice, bob, id = both
    before = alice.http.get(f"/v1/sessions/{id}").json()
    asked: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("GET", "/snapshot", None),
        ("GET", "/snapshot?format=mlx-lm", None),
        ("PATCH", "", {"name": "mine"}),
        ("PATCH", "", {"pinned": True}),
        ("POST", "/fork", {}),
        ("DELETE", "", None),
    ]
    for method, path, body in asked:
        answers = [
            bob.http.request(method, f"/v1/sessions/{one}{path}", json=body)
            for one in (id, "ses_000000000000")
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        said = [answer.json()["error"]["message"].replace(id, "ID") for answer in answers]
        assert said[0] == said[1].replace("ses_000000000000", "ID")
    assert id not in bob.http.get("/v1/sessions?limit=10000").text
    assert alice.http.get(f"/v1/sessions/{id}").json() == before


def test_another_persons_stored_item_is_as_unknown(both: tuple[Api, Api, str]) -> None:
    alice, bob, _ = both
    path, limits = "/v1/responses", {"max_output_tokens": 3}
    made = alice.post(path, {"input": "Hi", **limits}).json()
    own = made["id"].removeprefix("resp_")
    given = alice.http.get(f"{path}/{made['id']}/input_items").json()["first_id"]
    for id in (given, made["output"][0]["id"]):
        items = [user("x"), {"type": "item_reference", "id": id}]
        assert alice.post(path, {"input": items, **limits}).status_code == 200
        refused = bob.post(path, {"input": items, **limits})
        items[1]["id"] = id.replace(own, "0" * len(own))
        unknown = bob.post(path, {"input": items, **limits})
        assert refused.status_code == unknown.status_code == 400
        assert refused.text.replace(own, "0" * len(own)) == unknown.text


def test_requests_and_why_they_lost_are_each_persons_own(both: tuple[Api, Api, str]) -> None:
    alice, bob, _ = both
    answer = alice.chat([user(TEXT + " more")], tokens=2)
    assert alice.http.get(f"/v1/requests/{answer.id}").status_code == 200
    assert bob.http.get(f"/v1/requests/{answer.id}").status_code == 404
    assert answer.id not in bob.http.get("/v1/requests?limit=1000").text


def test_each_person_watches_what_is_its_own(both: tuple[Api, Api, str]) -> None:
    """Neither text nor ids nor counts of the other's: in the stream, and in the picture."""
    alice, bob, id = both

    def watched(api: Api) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with api.http.stream("GET", "/v1/live?parts=requests,sessions,tree") as response:
            for name, body in events(response):
                found[name] = body
                if {"requests", "sessions", "tree"} <= set(found):
                    return found
        raise AssertionError(found)

    def is_current() -> bool:
        return bool(watched(alice)["tree"] == alice.http.get("/v1/cache/tree").json())

    until(is_current, 60, lambda: "the tree changed between any two looks")
    own, other = watched(alice), watched(bob)
    assert id in {one["id"] for one in own["sessions"]["data"]}
    (node,) = [one for one in own["tree"]["nodes"] if id in one["sessions"] and one["parent"] == 0]
    assert "Story 7" in "".join(one["text"] for one in own["tree"]["nodes"])
    assert node["ram_tokens"] == node["tokens"]
    assert id not in json.dumps(other)
    assert id not in bob.http.get("/v1/cache/tree").text
    theirs = {one["id"] for one in other["requests"]["data"]}
    assert theirs
    assert not theirs & {one["id"] for one in own["requests"]["data"]}


def test_a_person_clears_what_is_the_persons(both: tuple[Api, Api, str]) -> None:
    """No key of an owner may check or prune the files, which belong to all."""
    alice, bob, id = both
    assert bob.http.request("DELETE", "/v1/cache?pinned=true").status_code == 200
    assert bob.http.get("/v1/sessions").json()["data"] == []
    assert alice.http.get(f"/v1/sessions/{id}").status_code == 200
    assert alice.chat([user(TEXT)]).cached > 100
    assert bob.http.get("/v1/cache/check").status_code == 403
    assert bob.http.post("/v1/cache/prune?limit_bytes=0").status_code == 403


def test_no_path_that_a_client_names_is_read_or_written(both, server):
    """An id is looked up in a table, a name is a text, and a file's name is the server's."""
    alice, _, id = both
    secret = "../../../../../../etc/passwd"
    for one in (secret, secret.replace("/", "%2f"), "%2e%2e%2fstore", "/etc/passwd", "a%00b"):
        for path in (f"/v1/sessions/{one}", f"/v1/sessions/{one}/snapshot", f"/v1/requests/{one}"):
            got = httpx.get(
                f"{server.url}{path}", headers={"x-api-key": ALICE}, follow_redirects=True
            )
            assert got.status_code == 404, path
            assert "root:" not in got.text
    taken = alice.http.get(f"/v1/sessions/{id}/snapshot").content
    made = alice.http.post("/v1/sessions", params={"name": secret}, content=taken).json()
    assert made["name"] == secret
    out = alice.http.get(f"/v1/sessions/{made['id']}/snapshot")
    assert out.headers["content-disposition"] == f'attachment; filename="{made["id"]}.safetensors"'
    label = alice.post(
        CHAT, {"messages": [user("Hi")], "max_tokens": 2}, **{"x-session-id": secret}
    )
    assert label.status_code == 200


def test_a_command_without_a_server_sees_all_and_no_key_is_anywhere(both, server, home):
    """It reads files that its user may read anyway."""
    _, bob, id = both
    bob.chat([user(TEXT)], prompt_cache_key="work")
    wrong = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "a-wrong-key-9z"})
    assert wrong.status_code == 401
    theirs = [one["id"] for one in bob.http.get("/v1/sessions").json()["data"]]
    assert theirs
    assert id not in theirs
    server.wait_for("refused with 401: 127.0.0.1")
    server.stop()
    command = [sys.executable, "-m", "mlxcache.cli.main", "sessions", "list", "--json"]
    command += ["--cache-dir", str(home / "cache")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {id, *theirs} <= {word.strip('",') for word in listed.split()}
    assert "chmod 600" in server.output
    assert "2 API keys read, each with its own sessions; named keys: alice" in server.output
    files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    recorded = list((home / "said").iterdir())
    assert recorded
    for key in (ALICE, BOB, "a-wrong-key-9z"):
        assert key not in server.output
        holding = [data for data in files if key.encode() in data]
        assert len(holding) == (key != "a-wrong-key-9z"), "the file of keys alone"
