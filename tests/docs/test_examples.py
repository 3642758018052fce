"""The programs in examples/ run and show what they say; the settings there lead to the server."""

from __future__ import annotations

import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.conftest import ToyMaker
from tests.docs.blocks import ROOT, for_server
from tests.docs.clients import CLIENTS
from tests.docs.test_shapes import send
from tests.forked import served
from tests.served import Served

EXAMPLES = ROOT / "examples"
CACHED = re.compile(r"(\d+) of (\d+) prompt tokens cached")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`run(name, *arguments)` is what an example prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def counts(printed: str) -> list[tuple[int, int]]:
    """What was cached, and of how many prompt tokens, for each request that is printed."""
    return [(int(cached), int(prompt)) for cached, prompt in CACHED.findall(printed)]


@pytest.mark.parametrize("name", ["openai_chat.py", "anthropic_chat.py"])
def test_a_conversation_is_warm_from_its_second_turn(name, run, server: Served):
    """All of the last prompt but its last token is there, and the new message is fed."""
    turns = counts(run(name, "--base-url", server.url))
    assert len(turns) == 3
    for before, now in pairwise(turns):
        assert now[0] >= before[1] - 1


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *(
            (name, "openai")
            for name in ("openai_chat.py", "fork_and_compare.py", "move_session.py")
        ),
        *((name, "openai") for name in ("shared_document.py", "warm_system_prompt.py")),
        ("anthropic_chat.py", "anthropic"),
    ],
)
def test_an_example_without_its_sdk_says_how_to_install_it(name, package, run, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"{sys.executable} -m pip install {package}$"):
        run(name)


def test_a_document_that_many_sessions_ask_about_is_computed_once(run, server: Served):
    """The first question is cold; of all others the document is cached, and it is held once."""
    printed = run("shared_document.py", "--base-url", server.url)
    first, *rest = counts(printed)
    assert first[0] < first[1] // 2
    assert len(rest) == 3
    assert all(cached > 0.9 * prompt for cached, prompt in rest)


def test_a_fork_goes_on_from_what_both_share(run, server: Served):
    """Both second turns are warm: the one of the session, and the one of its fork."""
    first, *ways = counts(run("fork_and_compare.py", "--base-url", server.url))
    assert len(ways) == 2
    assert all(cached >= first[1] - 1 for cached, _ in ways)


def test_the_first_turn_behind_a_warmed_system_prompt_is_warm(run, server: Served):
    """All that was warmed is cached in it."""
    printed = run("warm_system_prompt.py", "--base-url", server.url)
    warmed = re.search(r"warmed (\d+) tokens, of which (\d+) were fed", printed)
    assert warmed
    assert int(warmed[2]) > 0.9 * int(warmed[1])
    assert counts(printed)[0][0] >= int(warmed[1]) - 1


def test_a_session_moves_to_another_server(run, server: Served, toy: ToyMaker, tmp_path: Path):
    """The other one has never seen it, and its next turn there is warm."""
    model = toy("llama", emits={"<|im_end|>": 30})
    with served("--model", str(model), home=tmp_path) as other:
        printed = run("move_session.py", "--from", server.url, "--to", other.url)
    (_, first), (cached, _) = counts(printed)
    assert cached >= first - 1


def test_an_embedded_engine_is_warm_in_the_next_turn_and_the_next_process(
    run, toy: ToyMaker, tmp_path: Path
):
    """Within one run from memory, and in the next run from disk."""
    model = toy("llama", emits={"<|im_end|>": 30})
    arguments = ("--model", str(model), "--cache-dir", str(tmp_path / "cache"))
    first, second = counts(printed := run("embedded.py", *arguments))
    assert first[0] == 0, printed
    assert second[0] >= first[1] - 1
    printed = run("embedded.py", *arguments)
    assert counts(printed)[0][0] >= first[1] - 1
    assert re.search(r"turn 1: (\d+) of \d+ prompt tokens cached, \1 of them from disk", printed)


def environ(text: str) -> dict[str, str]:
    """What an env file sets."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


SETTINGS = {"Continue": "continue.yaml", "Open WebUI": "open-webui.env"}


@pytest.mark.parametrize("client", SETTINGS)
def test_settings_lead_to_the_server(client: str, server: Served):
    """By what the client of these settings sends."""
    path = EXAMPLES / SETTINGS[client]
    text = for_server(path.read_text(encoding="utf-8"), server.url)
    settings = yaml.safe_load(text) if path.suffix == ".yaml" else environ(text)
    for sent in CLIENTS[client](settings):
        assert sent.url.startswith(f"{server.url}/")
        send(sent)


def test_every_example_is_run():
    """A new program needs a test here."""
    named = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= named
