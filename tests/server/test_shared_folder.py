"""Two servers, each a process, on one cache folder at once."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxcache.store.recovery import MISSING_S
from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import Api, until, user, words

Begin = Callable[[str, str], Api]
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def begin(toy: ToyMaker, home: Path) -> Iterator[Begin]:
    """`begin(name, family)` is the server of that name on the folder, started unless it runs."""
    running: dict[str, Api] = {}
    with ExitStack() as stack:

        def get(name: str, family: str) -> Api:
            if name not in running or running[name].served.process.poll() is not None:
                where = ("--model", str(toy(family)), "--cache-dir", str(home / "cache"))
                flags = (*where, "--ram", "200MB", "--disk", "1GB", "--prefill-chunk", "256")
                running[name] = Api(stack.enter_context(served(*flags, home=home)))
            return running[name]

        yield get


def turn(api: Api, label: str, before: Messages, text: str) -> tuple[Messages, dict[str, Any]]:
    """One more turn of a session: its messages now, and what the request did."""
    messages = [*before, user(text)]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    response = api.post("/v1/chat/completions", body, **{"X-Session-Id": label})
    assert response.status_code == 200, response.text
    reply = response.json()["choices"][0]["message"]["content"]
    record = api.record(response.headers["x-mlxcache-request"])
    return [*messages, {"role": "assistant", "content": reply}], record


def listed(api: Api) -> dict[str, dict[str, Any]]:
    """The sessions by their labels."""
    return {one["label"]: one for one in api.http.get("/v1/sessions").json()["data"]}


def until_durable(api: Api, *labels: str, turns: int = 1) -> None:
    """Wait until all of these sessions is on disk, the last of so many turns included."""

    def there() -> bool:
        found = listed(api)
        return all(
            label in found
            and found[label]["turns"] >= turns
            and found[label]["durable_tokens"] == found[label]["tokens"]
            for label in labels
        )

    until(there, 60, lambda: f"{listed(api)}\n{api.served.output[-3000:]}")


def assert_sound(api: Api) -> None:
    assert api.http.get("/v1/cache/check").json()["data"] == []


def test_each_finds_what_the_other_committed(begin: Begin) -> None:
    """A conversation goes to and fro between two servers of one model, and a third has another."""
    one, two, other = begin("one", "llama"), begin("two", "llama"), begin("other", "qwen3_5")
    messages: Messages = []
    for number, api in enumerate((one, two, one, two)):
        messages, record = turn(api, "talk", messages, words(number, 60))
        until_durable(api, "talk", turns=number + 1)
        if number:
            assert record["cached_tokens"] >= record["prompt_tokens"] - 64 - 4 * 60
            assert record["restored_tokens"] > 0
    turn(other, "else", [], words(9, 60))
    until_durable(other, "else")
    for api in (one, two, other):
        found = listed(api)
        assert (found["talk"]["turns"], found["else"]["turns"]) == (4, 1)
        assert found["talk"]["durable_tokens"] == found["talk"]["tokens"]
    assert_sound(one)


def test_a_reply_of_one_is_replayed_by_the_others(begin: Begin) -> None:
    """A server that runs meanwhile learns it with the next prompt, a new one at its start.

    A toy's tokens are never those that its text would be encoded to.
    """
    one = begin("one", "llama")
    begin("two", "llama")
    messages, _ = turn(one, "replay", [], words(70, 60))
    until_durable(one, "replay")
    for number, name in enumerate(("two", "new")):
        _, record = turn(begin(name, "llama"), "replay", messages, words(71 + number, 9))
        assert "replay" in record["canonicalised"]


def test_a_server_that_is_killed_leaves_the_other_its_work(begin: Begin) -> None:
    """What it was writing is neither found nor in the way."""
    one, two = begin("one", "llama"), begin("two", "llama")
    talking = threading.Event()

    def talk() -> None:
        for number in range(100):
            try:
                turn(one, f"killed {number}", [], words(number, 150))
            except httpx.HTTPError:
                return
            talking.set()

    thread = threading.Thread(target=talk)
    thread.start()
    messages: Messages = []
    for number in range(4):
        messages, _ = turn(two, "lives", messages, words(50 + number, 150))
        if number == 1:
            assert talking.wait(60)
            one.served.stop(signal.SIGKILL)
    thread.join(60)
    messages, _ = turn(two, "killed 0", [], words(0, 150))
    until_durable(two, "lives", "killed 0")
    third = begin("third", "llama")
    assert_sound(third)
    _, record = turn(third, "lives", messages[:0], words(50, 150))
    assert record["restored_tokens"] >= record["prompt_tokens"] - 64


@pytest.mark.slow
def test_what_one_removes_the_other_goes_on_with(begin: Begin, home: Path) -> None:
    """By session, all at once, and by hand with rm: the next turn is right, and on disk again."""
    one, two = begin("two", "llama"), begin("other", "qwen3_5")
    labels = {one: "one", two: "two"}
    apart = {api: turn(api, label, [], words(1, 150))[0] for api, label in labels.items()}

    def remove_session() -> None:
        for session in two.http.get("/v1/sessions").json()["data"]:
            assert two.http.delete(f"/v1/sessions/{session['id']}").status_code == 200

    def clear() -> None:
        command = [sys.executable, "-m", "mlxcache.cli.main", "cache", "clear", "--yes"]
        where = ["--json", "--cache-dir", str(home / "cache")]
        done = subprocess.run([*command, *where], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["sessions"] == 2

    def remove_folder() -> None:
        while (home / "cache").exists():  # something may just be written
            shutil.rmtree(home / "cache", ignore_errors=True)
        for api in (one, two):
            assert api.http.get("/v1/cache").status_code == 200
        time.sleep(2 * MISSING_S)

    for api, label in labels.items():
        until_durable(api, label)
    for number, remove in enumerate((remove_session, clear, remove_folder)):
        remove()
        for api, label in labels.items():
            apart[api], record = turn(api, label, apart[api], words(20 + number, 40))
            assert record["status"] == "done"
            until_durable(api, label)
    until_durable(two, "one", "two")
    assert_sound(two)
