"""Six clients on one server, as recorded: every view of their requests tells the same.

`six_clients.json` has three turns each of Claude Code 2.1.330, OpenCode 1.18.33, Qwen Code 0.24.4,
pi 0.87.1, llm 0.36 and aider 0.86.2.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxcache.cli.explain import explain_pair
from mlxcache.cli.main import app
from mlxcache.config import load_settings
from mlxcache.explain.compare import LEAST_LOSS
from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server import recording
from tests.server.api import Api

TITLES = {
    "claude-cli/2.1.330": "Say hello to the red project",
    "opencode/1.18.33": "Say hello to the blue project",
    "QwenCode/0.24.4": "Say hello to the green project",
    "pi": "Say hello to the yellow project",
    "OpenAI/Python 3.54.0": "Say hello to the violet project",  # llm
    "OpenAI/Python 2.20.0": "Say hello to the orange project",  # aider
}

SHORT = {"claude-cli": "claude", "QwenCode": "qwencode", "OpenAI": "openai"}
"""Names of clients in `top`, where they differ from the one that they send."""

CHANGING = {"QwenCode/0.24.4", "OpenAI/Python 2.20.0"}
"""They take text out of the message before: a reminder of the date, rules for edits."""


RECORDED = recording.read_recording("six_clients.json")


class Run(recording.Run):
    def get(self, path: str) -> Any:
        return self.api.http.get(path).json()

    @cached_property
    def sessions(self) -> dict[str, dict[str, Any]]:
        """By id and by label."""
        listed = self.get("/v1/sessions")["data"]
        return {key: one for one in listed for key in (one["id"], one["label"]) if key}

    @cached_property
    def live(self) -> dict[str, Any]:
        """What the dashboard shows: the first event of each part."""
        found: dict[str, Any] = {}
        with self.api.http.stream("GET", "/v1/live?parts=cache,requests,sessions") as response:
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                if line.startswith("data: "):
                    found.setdefault(name, json.loads(line.removeprefix("data: ")))
                if len(found) == 3:
                    return found
        raise AssertionError(f"the stream ended: {found}")

    def named(self, session: dict[str, Any]) -> str:
        """Return the name of `session` in `top`: its client and its title."""
        client = str(session["client"]).split("/")[0]
        return f"{SHORT.get(client, client)}: {session['title']}"

    def title_of(self, request: dict[str, Any]) -> str:
        return str(self.sessions[request["session"]]["title"])


@pytest.fixture(scope="module")
def model(toy: ToyMaker) -> Path:
    return toy("llama", layers=2)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    home = tmp_path_factory.mktemp("six")
    flags = ("--ram", "300MB", "--disk", "off", "--no-anticipate")
    with scripted(RECORDED["script"], "--model", str(model), *flags, home=home) as server:
        asked = ((one["path"], one["body"], one["headers"]) for one in RECORDED["requests"])
        yield Run(**vars(recording.play(Api(server), asked)))


def test_every_session_is_named_by_its_own_first_words(run: Run) -> None:
    """Of four of the six no request has a label."""
    assert {one["client"] for one in run.requests} == set(TITLES)
    for request in run.requests:
        assert run.title_of(request) == TITLES[request["client"]]
    listed = run.get("/v1/sessions")["data"]
    assert {one["title"] for one in listed} == set(TITLES.values())
    assert len(listed) == len(TITLES) + 1, "and that of Qwen Code's memory agent"


def test_a_turn_feeds_what_is_new_in_it(run: Run) -> None:
    grown = 0
    for request, one in zip(run.requests, RECORDED["requests"], strict=True):
        if "like" not in one or request["client"] in CHANGING:
            continue
        recording.check_turn(run.requests[one["like"]], request)
        grown += 1
    assert grown == 12


def test_no_loss_is_told_of_a_conversation_that_begins(run: Run) -> None:
    """And none is larger than what its request fed."""
    for request, one in zip(run.requests, RECORDED["requests"], strict=True):
        lost = request["lost"]
        if "like" not in one:
            assert lost is not None, request
            assert (lost["reason"], lost["lost_tokens"]) == ("first_seen", 0)
        if lost is not None:
            assert lost["lost_tokens"] <= request["fed_tokens"]
    lossy = [one["client"] for one in run.requests if one["lost"] and one["lost"]["lost_tokens"]]
    assert set(lossy) == {"QwenCode/0.24.4"}, "its reminder of the date, and its memory agent"
    reasons = {one["lost"]["reason"] for one in run.requests if one["lost"]}
    assert reasons == {"first_seen", "moved"}


def test_top_prints_the_requests_and_sessions_of_the_api(run: Run) -> None:
    """Names and tokens of the newest requests, and of the sessions, row by row."""
    ran = CliRunner().invoke(app, ["top", "--once", "--url", run.api.url], env={"COLUMNS": "120"})
    assert ran.exit_code == 0, ran.output
    lines = ran.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Recent requests"))
    for line, request in zip(lines[at + 2 : at + 12], reversed(run.requests), strict=False):
        found = re.fullmatch(r"\S+ +(.+?)((?: +[\d,-]+){4}) .*", line)
        assert found, line
        counts = [int(n.replace(",", "").replace("-", "0")) for n in found[2].split()]
        assert found[1] == run.named(run.sessions[request["session"]])
        restored, fed = request["restored_tokens"], request["fed_tokens"]
        ram = request["cached_tokens"] - restored
        assert counts == [ram, restored, fed, request["generated_tokens"]]
    at = next(i for i, line in enumerate(lines) if line.startswith("Sessions"))
    listed = run.get("/v1/sessions")["data"]
    for line, one in zip(lines[at + 2 :], listed, strict=False):
        assert line.startswith(run.named(one))
        assert f"{one['tokens']:,}" in line.split()
    total = f"{len(run.requests)} requests: "
    assert any(line.startswith(total) for line in lines)


def test_the_dashboard_gets_the_requests_and_sessions_of_the_api(run: Run) -> None:
    rows = {row["id"]: row for row in run.live["requests"]["data"]}
    assert rows == {row["id"]: row for row in run.requests}
    shown = {one["id"]: one for one in run.live["sessions"]["data"]}
    assert {id: (one["title"], one["tokens"], one["figures"]) for id, one in shown.items()} == {
        one["id"]: (one["title"], one["tokens"], one["figures"]) for one in run.sessions.values()
    }
    ran = CliRunner().invoke(app, ["top", "--json", "--url", run.api.url])
    told = json.loads(ran.output)
    assert {row["id"]: row for row in told["requests"]} == rows
    assert [one["id"] for one in told["sessions"]] == [*shown]


def test_the_figures_are_the_sums_of_the_requests(run: Run) -> None:
    sums = {
        name: sum(request[f"{name}_tokens"] for request in run.requests)
        for name in ("prompt", "cached", "restored", "fed", "generated")
    }
    assert sums["cached"] + sums["fed"] == sums["prompt"]
    tokens = run.live["cache"]["tokens"]
    assert {name: tokens[name] for name in sums} == sums
    figures = [one["figures"] for one in run.get("/v1/sessions")["data"]]
    assert {name: sum(one[f"{name}_tokens"] for one in figures) for name in sums} == sums
    assert sum(one["requests"] for one in figures) == len(run.requests)
    for kind in ("cold", "warm", "restored"):
        count = sum(request["reuse"] == kind for request in run.requests)
        assert run.live["cache"]["requests"][kind] == count

    text = run.api.http.get("/metrics").text
    samples = re.findall(r"^([^#\s]+(?:\{.*\})?) (\S+)$", text, re.M)
    metrics = {name: float(value) for name, value in samples}
    for name in ("prompt", "cached", "restored", "fed", "generated"):
        assert metrics[f"mlxcache_{name}_tokens_total"] == sums[name]
    lost: dict[str, int] = {}
    for request in run.requests:
        if request["lost"]:
            reason = request["lost"]["reason"]
            lost[reason] = lost.get(reason, 0) + request["lost"]["lost_tokens"]
    for reason, total in lost.items():
        assert metrics[f'mlxcache_prefix_lost_tokens_total{{reason="{reason}"}}'] == total


def test_explain_finds_what_the_server_lost(run: Run, model: Path) -> None:
    """For a request that extends another: the same cause, or nothing.

    The last such request of Claude Code and of aider, and those that lost something.
    """
    settings = load_settings({"model": str(model)}, os.environ)
    pairs = [n for n, one in enumerate(RECORDED["requests"]) if "like" in one]
    last = {run.requests[n]["client"]: n for n in pairs}
    lossy = [n for n in pairs if run.requests[n]["lost"]]
    assert lossy, "Qwen Code's requests lose tokens"
    for number in {last["claude-cli/2.1.330"], last["OpenAI/Python 2.20.0"], *lossy}:
        request, one = run.requests[number], RECORDED["requests"][number]
        before = RECORDED["requests"][one["like"]]["body"]
        found = explain_pair(before, one["body"], settings)
        assert found["prompt_tokens"]["second"] == request["prompt_tokens"]
        told, lost = found["lost"], request["lost"]
        if told is None or told["lost_tokens"] <= LEAST_LOSS:
            assert lost is None, (told, lost)
            assert request["cached_tokens"] >= found["shared_tokens"] - 1
        else:
            assert lost is not None, told
            assert (lost["reason"], lost["cause"]) == (told["reason"], told["cause"])
