"""An agent's noise costs nothing: each turn feeds what is new, each session starts on the head."""

from __future__ import annotations

import json
import uuid
from itertools import pairwise
from typing import Any

import pytest

from tests.conftest import ToyMaker
from tests.server.api import Answer, Api, words
from tests.server.conftest import Start

NEW = 64
"""Tokens beside what is new that a turn may feed."""
RULES = {
    "none": "attribution",
    "counter": "counter",
    "uuid": "uuid",
    "git": "git_status",
    "tools": "tool_order",
    "environment": "environment",
    "lists": "environment",
}
"""What is noisy, and the rule that shows in the last request's record."""
ENVIRONMENT = (
    "# Environment\nYou have been invoked in the following environment: \n - Platform: linux\n\n"
    f"{words(11, 120)}\n\nToday's date is 2026-11-21."
)
TOLD = {
    "environment": ENVIRONMENT,
    "lists": f"Available agent types for the Agent tool:\n- look: {words(12, 120)}",
}


@pytest.fixture(scope="module")
def api(start: Start, toy: ToyMaker) -> Api:
    """A server on which the rule for git is on, too."""
    return start("noise", toy("llama"), "--canonicalise", "git_status=on", "--disk", "off")


class Agent:
    """A conversation as Claude Code keeps it, with one kind of noise beside the attribution."""

    def __init__(self, api: Api, noise: str, number: int):
        self.api, self.noise, self.number = api, noise, number
        self.session = str(uuid.UUID(int=(number + 1) * 0x1234567890ABCDEF1234567890ABCDEF >> 3))
        self.messages: list[dict[str, Any]] = []

    def system(self, turn: int) -> list[dict[str, Any]]:
        body = f"You are an agent.\n{words(7, 120)}"
        if self.noise == "uuid":
            body = f"Scratchpad directory: /tmp/claude-501/-me/{self.session}/scratchpad\n{body}"
        if self.noise == "git":
            body += f"\n\ngitStatus: M file{self.number}-{turn}.py"
        line = (
            f"x-anthropic-billing-header: cc_version=2.1.329.{self.number}; cch={turn:05x}; "
            "cc_entrypoint=cli;"
        )
        mark = {"cache_control": {"type": "ephemeral"}}
        return [{"type": "text", "text": line}, {"type": "text", "text": body, **mark}]

    def tools(self, turn: int) -> list[dict[str, Any]]:
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        tools = [{"name": n, "description": words(9, 9), "input_schema": schema} for n in "ABCD"]
        at = (self.number + turn) % 4 if self.noise == "tools" else 0
        return tools[at:] + tools[:at]

    def turn(self, turn: int) -> Answer:
        text = words(1000 * self.number + turn, 12)
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
        sent = list(self.messages)
        if self.noise == "counter":
            left = f"<total_tokens>{200000 - 999 * turn} tokens left</total_tokens>"
            sent.append({"role": "system", "content": left})
        if self.noise in TOLD:
            sent.insert(1, {"role": "system", "content": TOLD[self.noise]})
        answer = self.api.message(
            sent,
            8,
            system=self.system(turn),
            tools=self.tools(turn),
            metadata={"user_id": json.dumps({"session_id": self.session})},
        )
        self.messages.append({"role": "assistant", "content": answer.text or "."})
        return answer


@pytest.mark.parametrize("noise", RULES)
def test_an_agent_s_turns_are_warm_whatever_the_noise(api: Api, noise: str) -> None:
    """And the first turn of a second session reuses all of the head."""
    first = Agent(api, noise, 0)
    answers = [first.turn(turn) for turn in range(3)]
    for before, now in pairwise(answers):
        assert now.fed <= now.prompt - before.prompt + NEW
    record = api.record(answers[-1].id)
    assert RULES[noise] in record["canonicalised"]
    assert api.http.get("/v1/cache").json()["canonicalised"][RULES[noise]] > 0
    second = Agent(api, noise, 1).turn(0)
    own = api.count(messages=[{"role": "user", "content": words(1000, 12)}])
    assert second.cached >= 0.95 * (second.prompt - own)
    if noise == "git":
        assert second.cached > 0.8 * second.prompt


def test_what_a_person_wrote_reaches_the_model(api: Api) -> None:
    """Noise in a user's message counts as any text, and two such messages are two prompts."""
    lines = [f"x-anthropic-billing-header: cc_version=2.1.1.a; cch={n:05x};" for n in range(2)]
    plain = api.count(messages=[{"role": "user", "content": "x"}])
    for text in (*lines, "<total_tokens>5 tokens left</total_tokens>"):
        assert api.count(messages=[{"role": "user", "content": f"x\n{text}"}]) > plain + 8
    answers = [api.message([{"role": "user", "content": line}]) for line in lines]
    assert [api.record(answer.id)["canonicalised"] for answer in answers] == [[], []]
    assert answers[0].text != answers[1].text
