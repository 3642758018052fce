"""Four clients of chat completions on one server, three turns each with a call of a tool.

`chat_clients.json` has the bodies of Continue 1.5.47 and Open WebUI 0.12.4 as recorded, those of
the AI SDK with the changes that anyclaude makes to them, and for Zed bodies that were written after
its source.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import Api
from tests.server.recording import Run, check_turn, play, read_recording

CONTINUE, OPEN_WEBUI, ZED, AI_SDK = (
    "ls/JS 5.23.2",
    "Python/3.11",
    "Zed/stable",
    "ai-sdk/openai/2.0.131",
)
RECORDED = read_recording("chat_clients.json")


@pytest.fixture(scope="module")
def run(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    home = tmp_path_factory.mktemp("chat")
    flags = ("--ram", "300MB", "--disk", "off", "--no-anticipate")
    with scripted(
        RECORDED["script"], "--model", str(toy("llama", layers=2)), *flags, home=home
    ) as server:
        asked = ((one["path"], one["body"], one["headers"]) for one in RECORDED["requests"])
        yield play(Api(server), asked)


def test_a_turn_feeds_what_is_new_in_it(run: Run) -> None:
    grown: dict[str, int] = {}
    for request, one in zip(run.requests, RECORDED["requests"], strict=True):
        if "like" not in one:
            continue
        check_turn(run.requests[one["like"]], request)
        grown[request["client"]] = grown.get(request["client"], 0) + 1
    assert grown == {CONTINUE: 3, OPEN_WEBUI: 3, ZED: 3, AI_SDK: 3}


def test_no_loss_is_told(run: Run) -> None:
    for request, one in zip(run.requests, RECORDED["requests"], strict=True):
        lost = request["lost"]
        assert lost is None or (lost["reason"], lost["lost_tokens"]) == ("first_seen", 0), request
        assert lost is None or "like" not in one
    side = [one for one in RECORDED["requests"] if "tools" not in one["body"]]
    assert len(side) == 7


def test_a_session_has_the_side_requests_of_its_label_and_the_first_words_as_its_title(run):
    """Open WebUI and Zed can send a label; the other two have none."""
    listed = run.api.http.get("/v1/sessions").json()["data"]
    titles = {one["title"]: one for one in listed}
    wanted = {"amber": (4, 0), "ivory": (9, 5), "teal": (5, 1), "olive": (4, 0)}
    for project, (turns, agents) in wanted.items():
        session = titles[f"Say hello to the {project} project"]
        assert (session["turns"], session["agents"]) == (turns, agents), session
    assert len(listed) == len(wanted) + 1, "and the title of Continue's, which has no label"


def test_the_checksum_in_a_prompt_of_one_line_is_removed(run: Run) -> None:
    """anyclaude makes one line of Claude Code's system prompt, in which the checksum changes."""
    sent = [one for one in RECORDED["requests"] if one["headers"]["user-agent"].startswith(AI_SDK)]
    heads = {one["body"]["messages"][0]["content"] for one in sent}
    assert len(heads) == len(sent) == 4
    ran = [one for one in run.requests if one["client"] == AI_SDK]
    assert all("attribution" in one["canonicalised"] for one in ran), ran
