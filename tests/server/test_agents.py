"""A task of each of seven agents, as recorded, stays warm from turn to turn.

`five_turns.json` is of Claude Code, OpenCode, Qwen Code and pi, `cline.json` of Cline 3.0.65 in a
terminal, `copilot.json` of Copilot CLI 1.0.102 with `-p` and `--continue` (and the first request of
a further session at its end), `codex.json` of Codex 0.169.0. Texts are shortened, except those that
rules of canonicalisation look for. `tests/cli/launch/test_real_clients.py` runs the programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import CHAT, Api, events
from tests.server.recording import Run, check_turn, play, read_json, talk_of

FIVE, CLINE, COPILOT, CODEX = map(
    read_json, ("five_turns.json", "cline.json", "copilot.json", "codex.json")
)
TWO = {
    "cline": CLINE | {"path": CHAT, "client": "ai-sdk/openai-compatible/3.0.37"},
    "copilot": COPILOT | {"path": CHAT, "client": "OpenAI/JS 5.20.1"},
}
ONE = {"codex": CODEX | {"path": "/v1/responses", "client": "codex_exec/0.169.0"}}
BOTH_SCRIPTS = [line for one in (CLINE, COPILOT) for line in one["script"] if line[0]]
SERVERS: list[tuple[Any, dict[str, Any]]] = [
    (FIVE["script"], FIVE["clients"]),
    (BOTH_SCRIPTS, TWO),
    (CODEX["script"], ONE),
]
TURNS = dict.fromkeys(FIVE["clients"], 8) | {"cline": 7, "copilot": 7, "codex": 7}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def runs(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Each recording, played once; those of one script on one server."""
    flags = ("--model", str(toy("llama", layers=2)), "--ram", "200MB", "--disk", "off")
    with ExitStack() as stack:
        found: dict[str, Run] = {}
        for script, clients in SERVERS:
            home = tmp_path_factory.mktemp("agents")
            api = Api(stack.enter_context(scripted(script, *flags, home=home)))
            found |= {name: play(api, talk_of(client)) for name, client in clients.items()}
        yield found


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_feeds_what_is_new_in_it(runs: dict[str, Run], name: str) -> None:
    """Also where the client takes a reminder of the date out of its older messages, or writes older
    calls and results in another form."""
    done = runs[name].requests[: TURNS[name]]
    assert len(done) == TURNS[name]
    for before, now in pairwise(done):
        check_turn(before, now)
        assert now["lost"] is None
    assert len({one["session"] for one in done}) == 1
    reminded = {"date_reminder" in one["canonicalised"] for one in done}
    assert reminded == {name == "qwen"}


def test_each_session_is_named_by_its_first_words(runs: dict[str, Run]) -> None:
    """Cline and Copilot CLI send no label, and Copilot CLI writes the time before the words."""
    listed = runs["copilot"].api.http.get("/v1/sessions").json()["data"]
    colours = ("green", "red", "blue")
    assert {one["title"] for one in listed} == {f"Say hello to the {c} project" for c in colours}
    (session,) = runs["codex"].api.http.get("/v1/sessions").json()["data"]
    assert (session["title"], session["turns"]) == ("list the files", 7)
    assert session["label"] == CODEX["body"]["prompt_cache_key"]


def test_a_further_session_of_copilot_feeds_its_own_words(runs: dict[str, Run]) -> None:
    """The path of its folder, with its id, is before the tools in the prompt."""
    further = runs["copilot"].requests[7]
    assert further["fed_tokens"] <= 96, further
    assert further["canonicalised"] == ["uuid"]
    assert further["lost"] is None


@pytest.mark.parametrize(
    ("name", "tools"), [("cline", ["run_commands", "read_files"]), ("copilot", ["bash", "view"])]
)
def test_the_client_called_its_tools(runs: dict[str, Run], name: str, tools: list[str]) -> None:
    called = [one.text for one in runs[name].replies if '"tool_calls"' in one.text]
    found = [re.findall(r'"name": ?"(\w+)"', reply) for reply in called]
    assert found == [[tool] for tool in tools]


def test_calls_arrive_as_codex_named_its_tools(runs: dict[str, Run]) -> None:
    """In events of the shapes that OpenAI's SDK has."""
    ends = []
    for reply in runs["codex"].replies:
        for _, event in events(reply):
            EVENT.validate_python(event)
        ends.append(event["response"])
    kinds = [[item["type"] for item in end["output"]] for end in ends]
    assert kinds.count(["function_call"]) == 2
    assert kinds.count(["message"]) == 5
    assert ends[0]["output"][0]["name"] == "exec_command"
    assert {end["metadata"]["mlxcache_left_out_tools"] for end in ends} == {"web_search"}
