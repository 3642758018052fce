"""Conversations with machine-made text: each turn extends the one before, and users' text stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.config.rules import RULES
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.canonical.remembered import CLEARED
from mlxcache.types import Chat
from tests.prompt import kinds, templates

SOURCES = {
    "chatml": templates.chatml(),
    "strict": templates.STRICT_SYSTEM,
    "llama3": templates.LLAMA3,
    "gemma": templates.GEMMA,
}
OWN = ("aaf15967-cfc7-4d52-bfda-e1edd9858ef9", "9d00f0c5-975e-4197-b36d-8f1eb6052b13")
CONVERSATION = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two {}"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "five"},
)


def noisy(messages: int, session: int) -> Chat:
    """The first so many messages with noise that no other request has."""
    own = OWN[session]
    n = 10 * session + 10 + messages
    head = (
        f"x-anthropic-billing-header: cc_version=2.1.329.{n}; cc_entrypoint=cli; cch={n:05x};\n\n"
        f"You are an agent.\n\nScratchpad: /tmp/claude-501/{own}/scratchpad\n\n"
        f"gitStatus: M file{n}.py"
    )
    said = [
        {"role": m["role"], "content": m["content"].format(f"in /tmp/claude-501/{own}")}
        for m in CONVERSATION[:messages]
    ]
    counter = f"<total_tokens>{99999 - n} tokens left</total_tokens>"
    tools = [{"role": "system", "content": head}, *said, {"role": "system", "content": counter}]
    return Chat(tools)


@pytest.mark.parametrize("name", SOURCES)
def test_each_turn_extends_the_one_before(name: str) -> None:
    made = PromptBuilder(kinds.tokenizer("byte_level", SOURCES[name]), rules={"git_status": True})
    before: list[int] = []
    for messages in (1, 3, 5):
        prompt = made.chat(noisy(messages, 0), "s")
        assert prompt.ids[: len(before)].tolist() == before
        before = prompt.ids[: prompt.marks[-1]].tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_another_session_begins_alike(name: str) -> None:
    """Up to the status, which stands behind the first question."""
    made = PromptBuilder(kinds.tokenizer("byte_level", SOURCES[name]), rules={"git_status": True})
    one, two = (made.chat(noisy(1, session), str(session)).ids.tolist() for session in (0, 1))
    text = kinds.tokenizer("byte_level", SOURCES[name])._tokenizer
    shared = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert text.decode(one[:shared]).endswith("gitStatus: M file")


NOISE = st.sampled_from(
    [
        "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5;",
        "<total_tokens>199000 tokens left</total_tokens>",
        f"/tmp/claude-501/{OWN[0]}/scratchpad",
        OWN[0],
        "gitStatus: M file1.py\nCurrent branch: main",
        CLEARED,
        "plain words",
        "",
    ]
)
TEXTS = st.lists(NOISE, min_size=1, max_size=3).flatmap(
    lambda parts: st.sampled_from(["\n", "\n\n", " "]).map(lambda between: between.join(parts))
)
MESSAGES = st.builds(
    lambda role, text: {"role": role, "content": text, "tool_call_id": "1"},
    st.sampled_from(["system", "user", "assistant", "tool", "user"]),
    TEXTS,
)


@pytest.mark.parametrize("rules", [{}, dict.fromkeys(RULES, True)], ids=["by themselves", "all on"])
@settings(deadline=None)
@given(messages=st.lists(MESSAGES, min_size=1, max_size=8), marked=st.integers(0, 8))
def test_no_message_of_a_person_is_changed_moved_or_dropped(
    rules: Mapping[str, bool], messages: list[dict[str, Any]], marked: int
) -> None:
    sent = [dict(message) for message in messages]
    chat = Chat(tuple(messages), breakpoint=min(marked, len(messages)))
    made = Canonicaliser(rules).canonicalise(chat, "s").chat
    assert messages == sent

    def spoken(chat: Chat) -> list[str]:
        return [m["role"] for m in chat.messages if m["role"] != "system"]

    assert [m for m in made.messages if m["role"] == "user"] == [
        m for m in sent if m["role"] == "user"
    ]
    assert spoken(made) == spoken(chat)
    assert made.breakpoint is not None
    covered = chat.messages[: chat.breakpoint]
    kept = [m for m in covered if m["role"] != "system"]
    now = [m for m in made.messages[: made.breakpoint] if m["role"] != "system"]
    assert [m["role"] for m in now] == [m["role"] for m in kept]
