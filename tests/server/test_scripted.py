"""A server whose replies are scripted serves, parses and caches as any other."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import Api, user, words

CALL = 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def test_a_script_says_the_replies(toy: ToyMaker, tmp_path: Path) -> None:
    """A call is a call, the turn ends, and what was written is found again in the next turn."""
    lines = [(r"read a\.txt", CALL), ("^alpha$", "It says alpha.")]
    model = str(toy("llama"))
    with scripted(lines, "--model", model, "--ram", "200MB", home=tmp_path) as server:
        api = Api(server)
        messages = [user(f"{words(1, 60)} Please read a.txt.")]
        first = api.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]}).json()
        said = first["choices"][0]["message"]
        assert said["content"].strip() == "I look."
        assert said["tool_calls"][0]["function"]["name"] == "read"
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        call = said["tool_calls"][0]["id"]
        messages += [said, {"role": "tool", "tool_call_id": call, "content": "alpha"}]
        second = api.chat(messages, tools=[TOOL], temperature=0.7)
        assert second.text == "It says alpha."
        assert second.fed < 60
        assert second.generated < 24, "it ends its turn"
