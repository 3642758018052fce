"""A task of Codex 0.169.0 on one server, as recorded: five prompts, two calls of its shell.

`codex.json` has the fields that all seven requests share (`body`), and for each request how many
items of the one before it repeats (`same`) and its further items. Long texts are shortened.
`script`: see `tests.scripted`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import Api, until

RECORDED = json.loads(Path(__file__).with_name("codex.json").read_text(encoding="utf-8"))
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def bodies() -> Iterator[dict[str, Any]]:
    """The whole body of each request."""
    items: list[Any] = []
    for request in RECORDED["requests"]:
        items = [*items[: request["same"]], *request["input"]]
        yield RECORDED["body"] | {"input": items}


@pytest.fixture(scope="module")
def run(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, list[Any]]]:
    """The server, and the events of each reply."""
    flags = ("--model", str(toy("llama", layers=2)), "--ram", "200MB", "--disk", "off")
    home = tmp_path_factory.mktemp("codex")
    with scripted(RECORDED["script"], *flags, home=home) as server:
        api = Api(server)
        replies = [events(api, body) for body in bodies()]
        until(lambda: len(records(api)) == len(replies), 10, lambda: "requests are over")
        yield api, replies


def events(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = api.post("/v1/responses", body, **{"user-agent": "codex_exec/0.169.0"})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in found:
        EVENT.validate_python(event)
    return found


def records(api: Api) -> list[dict[str, Any]]:
    """The requests that are over, oldest first."""
    found: list[dict[str, Any]] = api.http.get("/v1/requests").json()["data"]
    return [one for one in found if one["status"] == "done"][::-1]


def test_a_turn_feeds_what_is_new_in_it(run: tuple[Api, list[Any]]) -> None:
    api, _ = run
    done = records(api)
    assert len(done) == 7
    for before, now in pairwise(done):
        new = now["prompt_tokens"] - before["prompt_tokens"] - before["generated_tokens"]
        assert now["fed_tokens"] <= new + 64, now
        assert now["lost"] is None


def test_the_task_is_one_session_named_by_its_first_words(run: tuple[Api, list[Any]]) -> None:
    api, _ = run
    (session,) = api.http.get("/v1/sessions").json()["data"]
    assert session["title"] == "list the files"
    assert session["label"] == RECORDED["body"]["prompt_cache_key"]
    assert session["turns"] == 7


def test_calls_arrive_as_the_client_named_its_tools(run: tuple[Api, list[Any]]) -> None:
    _, replies = run
    outputs = [reply[-1]["response"]["output"] for reply in replies]
    kinds = [[item["type"] for item in output] for output in outputs]
    assert kinds.count(["function_call"]) == 2
    assert kinds.count(["message"]) == 5
    assert outputs[0][0]["name"] == "exec_command"
    left_out = {reply[-1]["response"]["metadata"]["mlxcache_left_out_tools"] for reply in replies}
    assert left_out == {"web_search"}
