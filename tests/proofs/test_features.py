"""Random conversations with random features, each reply beside the cold one and mlx-lm's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.features.arena import MODELS, opened, simplest
from tests.proofs.features.plan import FEATURES, Conversation, Step, draw_conversation
from tests.proofs.features.play import Difference, Pair, play
from tests.proofs.features.servers import Client
from tests.toys.configs import FAMILIES


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("demo", range(4)),
        ("llama+thinking", range(100, 103)),
        ("gemma3", range(200, 203)),
        ("qwen3_5+thinking", range(300, 303)),
        pytest.param("mamba2", range(400, 420), marks=pytest.mark.slow),
        pytest.param("gpt_oss", range(500, 520), marks=pytest.mark.slow),
    ],
)
def test_replies_with_random_features_are_the_cold_ones(tmp_path, name, seeds):
    """In conversations that go on, are edited, regenerated and forked, also after a restart."""
    with opened(name, tmp_path) as pair:
        for seed in seeds:
            play(draw_conversation(seed), pair)
        assert pair.counts.events["warm"]


GUIDED: tuple[dict[str, Any], ...] = (
    {"format": "schema", "temperature": (1.0, 7), "top_p": 0.95},
    {"format": "regex"},
    {"call": "required", "temperature": (1.0, 7)},
    {"call": "named", "temperature": (0.8, 8), "repetition": (1.1, 64)},
)
"""A format or a forced call for each reply, with room for its end."""


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MODELS])
def test_every_familys_replies_are_the_cold_ones(tmp_path: Path, family: str) -> None:
    steps = [Step("turn", 0.0, one | {"tokens": 200, "words": 60}) for one in GUIDED]
    steps += [replace(one.without("words"), move="again") for one in steps]
    steps.append(Step("turn", 0.0, GUIDED[2] | {"tokens": 200, "restart": True}))
    with opened(family, tmp_path) as pair:
        play(Conversation(1, "chat", 60, tools=True, thoughts=False, steps=tuple(steps)), pair)
        assert pair.counts.events["calls"] > 1
        for seed in range(700, 702):
            play(draw_conversation(seed), pair)


@pytest.mark.slow
def test_servers_that_are_killed_reply_as_cold_ones(tmp_path: Path) -> None:
    restart = Step("turn", 0.0, {"restart": True, "words": 150})
    with opened("llama", tmp_path, outside=True) as pair:
        for seed in range(600, 604):
            drawn = draw_conversation(seed)
            play(replace(drawn, steps=(restart, *drawn.steps, restart)), pair)


def test_a_number_makes_the_same_conversation() -> None:
    many = [draw_conversation(seed) for seed in range(300)]
    assert many == [draw_conversation(seed) for seed in range(300)]
    drawn = {name for one in many for step in one.steps for name in step.features}
    assert drawn == set(FEATURES)
    assert {one.api for one in many} == {"chat", "completions", "messages", "responses"}


def test_a_failure_is_found_and_made_simple(tmp_path, monkeypatch):
    """A server that loses the last letter of replies with a stop string, among other features."""
    ask = Client.ask

    def wrong(client: Client, api: Any, body: Any, **options: Any) -> Any:
        reply = ask(client, api, body, **options)
        if "stop" in body and client is servers.warm:
            for said in reply.choices:
                said.text = said.text[:-1]
        return reply

    monkeypatch.setattr(Client, "ask", wrong)
    stop = {"stop": [("word", "xyzzy")]}
    steps = (Step("turn", 0.3, {}), Step("turn", 0.3, stop | {"top_k": 3}))
    with opened("gemma3", tmp_path) as servers:
        whole = Conversation(7, "chat", system=0, tools=True, thoughts=True, steps=steps)
        simple = simplest(whole, lambda one: fails(one, servers))
    assert simple == replace(whole, tools=False, steps=(Step("turn", 0.3, stop),))


def fails(conversation: Conversation, pair: Pair) -> bool:
    try:
        play(conversation, pair)
    except Difference:
        return True
    return False
