"""Five turns each of Cline 3.0.65 and Copilot CLI 1.0.102, as recorded: two of them call a tool.

`cline.json` is of a run in a terminal, `copilot.json` of `copilot -p` and `--continue`, with the
first request of a further session at its end. Each has the fields that its requests share (`body`),
and for each request how many messages of the one before it repeats (`same`) and its further ones.
Long texts are shortened, the paths are another machine's. `script`: see `tests.scripted`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import Api, until

AGENTS = {"cline": "ai-sdk/openai-compatible/3.0.37", "copilot": "OpenAI/JS 5.20.1"}
"""`User-Agent` of each client."""

CALLS = {
    "cline": ["run_commands", "read_files"],
    "copilot": ["bash", "view"],
}


@dataclass
class Run:
    """Both recordings, played once on one server."""

    requests: dict[str, list[dict[str, Any]]]
    replies: dict[str, list[str]]
    titles: set[str]


def bodies(recorded: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The whole body of each request."""
    messages: list[Any] = []
    for request in recorded["requests"]:
        messages = [*messages[: request["same"]], *request["messages"]]
        yield recorded["body"] | {"messages": messages}


@pytest.fixture(scope="module")
def run(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    here = Path(__file__)
    texts = {name: here.with_name(f"{name}.json").read_text(encoding="utf-8") for name in AGENTS}
    recorded = {name: json.loads(text) for name, text in texts.items()}
    script = [line for one in recorded.values() for line in one["script"] if line[0]]
    flags = ("--model", str(toy("llama", layers=2)), "--ram", "200MB", "--disk", "off")
    with scripted(script, *flags, home=tmp_path_factory.mktemp("two")) as server:
        api = Api(server)
        replies: dict[str, list[str]] = {name: [] for name in AGENTS}
        for name, agent in AGENTS.items():
            for body in bodies(recorded[name]):
                response = api.post("/v1/chat/completions", body, **{"user-agent": agent})
                assert response.status_code == 200, response.text
                replies[name].append(response.text)
        get = lambda what: api.http.get(f"/v1/{what}").json()["data"]  # noqa: E731
        done = lambda: [one for one in get("requests") if one["status"] == "done"]  # noqa: E731
        count = sum(map(len, replies.values()))
        until(lambda: len(done()) == count, 10, lambda: "requests are over")
        requests = {
            name: [one for one in done()[::-1] if one["client"] == agent]
            for name, agent in AGENTS.items()
        }
        yield Run(requests, replies, {one["title"] for one in get("sessions")})


@pytest.mark.parametrize("name", AGENTS)
def test_a_turn_feeds_what_is_new_in_it(run: Run, name: str) -> None:
    """At most 64 tokens more. Copilot CLI writes older calls and results in another form."""
    conversation = run.requests[name][:7]
    assert conversation[0]["fed_tokens"] > 1000
    for before, now in pairwise(conversation):
        new = now["prompt_tokens"] - before["prompt_tokens"] - before["generated_tokens"]
        assert now["fed_tokens"] <= new + 64, now
        assert now["lost"] is None


@pytest.mark.parametrize("name", AGENTS)
def test_the_client_called_its_tools(run: Run, name: str) -> None:
    called = [reply for reply in run.replies[name] if '"tool_calls"' in reply]
    found = [re.findall(r'"name": ?"(\w+)"', reply) for reply in called]
    assert found == [[tool] for tool in CALLS[name]]


def test_each_session_is_named_by_its_first_words(run: Run) -> None:
    """Neither client sends a label, and Copilot CLI writes the time before the words."""
    assert run.titles == {
        f"Say hello to the {colour} project" for colour in ("green", "red", "blue")
    }


def test_a_further_session_of_copilot_feeds_its_own_words(run: Run) -> None:
    """The path of its folder, with its id, is before the tools in the prompt."""
    further = run.requests["copilot"][7]
    assert further["fed_tokens"] <= 96, further
    assert further["canonicalised"] == ["uuid"]
    assert further["lost"] is None
