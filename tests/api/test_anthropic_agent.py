"""A coding agent's session over HTTP: each turn's chat begins with the previous turn's."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from mlxcache.types import Chat, Thinking, ToolCall
from tests.api.conftest import FakeEngine, reply
from tests.wire.anthropic_bodies import MARK, result, text, tool, user

SESSION = "7d0c2f5e-4a0e-4a5e-9d2b-0f7f6a1c3b2d"
HEADERS = {
    "x-api-key": "dummy",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,unheard-of-2031-01-01",
    "x-claude-code-session-id": SESSION,
    "user-agent": "claude-cli/2.1.329 (external, cli)",
}
SYSTEM = [
    text("x-anthropic-billing-header: cc_version=2.1.329.abc; cc_entrypoint=cli;"),
    text("You are an interactive command line agent."),
    text("Long instructions.", **MARK),
]
SCRIPT = reply(
    Thinking("I should look at the file."),
    "Let me look.",
    ToolCall(0, "call_1", "Read", '{"path": "a.py", "limit": 20}'),
)


class Agent:
    """One conversation as a client keeps it, and the bodies that it sends."""

    def __init__(self, client: httpx.AsyncClient):
        self.client = client
        self.messages: list[dict[str, Any]] = []
        self.tools = [tool("Bash"), tool("Read"), tool("ToolSearch"), tool("Write")]

    def body(self) -> dict[str, Any]:
        """The texts of earlier turns as strings; the mark on the last block alone."""
        wire = [dict(m) for m in self.messages]
        for message in wire[:-1]:
            content = message["content"]
            if len(content) == 1 and content[0]["type"] == "text":
                message["content"] = content[0]["text"]
        *first, last = wire[-1]["content"]
        wire[-1]["content"] = [*first, last | MARK]
        return {
            "model": "claude-opus-4-8",
            "messages": wire,
            "system": SYSTEM,
            "tools": sorted(self.tools, key=lambda t: str(t["name"])),
            "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": SESSION})},
            "max_tokens": 32000,
            "temperature": 1,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "safeguards": {"level": "default"},
            "stream": True,
        }

    async def turn(self, *blocks: dict[str, Any] | str) -> None:
        self.messages.append(user(*blocks))
        await self.send()

    async def send(self) -> None:
        response = await self.client.post(
            "/v1/messages?beta=true", json=self.body(), headers=HEADERS
        )
        assert response.status_code == 200, response.text
        self.messages.append({"role": "assistant", "content": received(response.text)})


def received(stream: str) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    lines = [line for line in stream.splitlines() if line.startswith("data: ")]
    for event in (json.loads(line.removeprefix("data: ")) for line in lines):
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            partial = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    content[-1][key] += delta[key]
            partial += delta.get("partial_json", "")
            if partial:
                content[-1]["input"] = json.loads(partial)
    assert event["type"] == "message_stop"
    return content


@pytest.fixture
async def chats(client: httpx.AsyncClient, engine: FakeEngine) -> list[Chat]:
    """Five turns: a task, a result, a reminder, a tool that is searched for, and its use."""
    engine.script = SCRIPT
    agent = Agent(client)
    agent.messages.append(user("<system-reminder>\nRules.\n</system-reminder>", "Fix the bug."))
    agent.messages.append({"role": "system", "content": [text("# Environment\nLinux")]})
    await agent.send()
    await agent.turn(result([text("1\tprint()")], agent.messages[-1]["content"][-1]["id"]))
    agent.messages.append(user(result("ok", agent.messages[-1]["content"][-1]["id"])))
    agent.messages.append({"role": "system", "content": [text("Use the task tools.")]})
    await agent.send()
    agent.tools.append(tool("Memo", defer_loading=True))
    last = agent.messages[-1]["content"][-1]["id"]
    await agent.turn(result([{"type": "tool_reference", "tool_name": "Memo"}], last))
    await agent.turn(result("saved", agent.messages[-1]["content"][-1]["id"]), "Thanks.")
    return engine.chats


async def test_each_turn_begins_with_the_messages_of_the_one_before(chats: list[Chat]) -> None:
    assert len(chats) == 5
    for before, after in pairwise(chats):
        assert after.messages[: len(before.messages)] == before.messages
        assert len(after.messages) > len(before.messages)


async def test_the_head_stays_though_a_tool_was_loaded(
    chats: list[Chat], engine: FakeEngine
) -> None:
    assert all(chat.tools == chats[0].tools for chat in chats)
    assert [len(job.tools or ()) for job in engine.jobs] == [4, 4, 4, 5, 5]


async def test_replies_come_back_as_they_were_generated(chats: list[Chat]) -> None:
    assert chats[1].messages[3] == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "I should look at the file.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "Read", "arguments": {"path": "a.py", "limit": 20}},
            }
        ],
    }


async def test_the_mark_lies_on_the_last_message_of_every_turn(chats: list[Chat]) -> None:
    assert [chat.breakpoint for chat in chats] == [len(chat.messages) for chat in chats]


async def test_every_request_says_whose_it_is(chats: list[Chat], engine: FakeEngine) -> None:
    assert {job.session for job in engine.jobs} == {SESSION}
    assert {job.client for job in engine.jobs} == {"claude-cli/2.1.329"}
