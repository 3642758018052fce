"""A task of five turns each of Claude Code, OpenCode, Qwen Code and pi, as recorded.

`five_turns.json` has, for each client, the fields that all its requests share (`body`), and for
each request how many messages of the one before it repeats (`same`) and its further messages. Its
programs' texts are shortened, except those that rules of canonicalisation look for. `script`: see
`tests.scripted`. `tests/cli/launch/test_real_clients.py` runs the same task with the programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import Api, until

RECORDED = json.loads(Path(__file__).with_name("five_turns.json").read_text(encoding="utf-8"))
CLIENTS = RECORDED["clients"]


@pytest.fixture(scope="module")
def api(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flags = ("--model", str(toy("llama", layers=2)), "--ram", "200MB", "--disk", "off")
    with scripted(RECORDED["script"], *flags, home=tmp_path_factory.mktemp("five")) as server:
        yield Api(server)


def play(api: Api, name: str) -> list[dict[str, Any]]:
    """Send a client's requests in turn; return what `GET /v1/requests/{id}` has of them."""
    client, ids = CLIENTS[name], []
    messages: list[Any] = []
    for request in client["requests"]:
        messages = [*messages[: request["same"]], *request["messages"]]
        body = client["body"] | {"messages": messages}
        response = api.post(client["path"], body, **{"user-agent": client["client"]})
        assert response.status_code == 200, response.text
        ids.append(response.headers["x-mlxcache-request"])
    done: list[dict[str, Any]] = []
    for id in ids:
        until(partial(is_done, api, id), 10, lambda: "a request is over")
        done.append(api.http.get(f"/v1/requests/{id}").json())
    return done


def is_done(api: Api, id: str) -> bool:
    return bool(api.http.get(f"/v1/requests/{id}").json()["status"] == "done")


@pytest.mark.parametrize("name", list(CLIENTS))
def test_a_turn_feeds_what_is_new_in_it(api: Api, name: str) -> None:
    """Also where the client takes a reminder of the date out of its older messages."""
    done = play(api, name)
    assert len(done) == 8
    for before, now in pairwise(done):
        new = now["prompt_tokens"] - before["prompt_tokens"] - before["generated_tokens"]
        assert now["fed_tokens"] <= new + 64, now
        assert now["lost"] is None
    assert len({one["session"] for one in done}) == 1
    reminded = ["date_reminder" in one["canonicalised"] for one in done]
    assert reminded == [name == "qwen"] * 8
