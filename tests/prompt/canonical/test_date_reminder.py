"""A reminder of a date that the first message has is removed; every other one stays."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.types import Chat
from mlxcache.wire.chat_bodies import request_to_chat

Message = dict[str, Any]

DATE = "Sunday, November 22, 2026"
OTHER = "Monday, November 23, 2026"
TOOLS = "<system-reminder>\nThe following tools are reachable.\n</system-reminder>"


def started(date: str = DATE) -> str:
    """The start of Qwen Code's first message."""
    return (
        "<system-reminder>\nThe following skills are available.\n</system-reminder>"
        "<system-reminder>\nThis is the Qwen Code. We are setting up the context for our chat.\n"
        f"Today's date is {date}.\nMy operating system is: linux\n</system-reminder>{TOOLS}"
    )


def reminder(date: str = DATE) -> str:
    return (
        f"<system-reminder>\nThe current date is: {date}. Note: This is the authoritative current "
        'date — it may differ from the "Today\'s date" mentioned earlier in the conversation '
        "startup context.\n</system-reminder>"
    )


def conversation(*asked: str) -> list[Message]:
    """A system prompt, and messages of the user's with a reply after each but the last."""
    messages: list[Message] = [{"role": "system", "content": "You are an agent."}]
    for text in asked:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Fine."}]
    return messages[:-1]


def told(messages: list[Message], **rules: bool) -> tuple[list[str], tuple[str, ...]]:
    """What the user said, as it is rendered, and the rules that changed something."""
    made = Canonicaliser(rules).canonicalise(Chat(messages))
    return [m["content"] for m in made.chat.messages if m["role"] == "user"], made.rules


def test_a_turn_extends_the_one_before() -> None:
    """The client takes the reminder out of a message once it is not the newest."""
    first, _ = told(conversation(f"{started()}{reminder()}Hello"))
    second, rules = told(conversation(f"{started()}Hello", f"{reminder()}And now?"))
    third, _ = told(conversation(f"{started()}Hello", "And now?", f"{reminder()}\n\n Last "))
    assert first == [f"{started()}Hello"]
    assert second == [*first, "And now?"]
    assert third == [*second, "\n\n Last "], "not a character of the user's own"
    assert rules == ("date_reminder",)


def test_a_reminder_among_others_goes() -> None:
    said, _ = told(conversation(f"{started()}Hi", f"{TOOLS}\n{reminder()}{TOOLS}Hello"))
    assert said[1] == f"{TOOLS}\n{TOOLS}Hello"


@pytest.mark.parametrize(
    "text",
    [
        f"{reminder(OTHER)}Hello",
        reminder(),
        f"{reminder()}\n",
        f"Hello{reminder()}",
        f"\n{reminder()}Hello",
        f"What is this? {reminder()} It is in my log.",
        f"{reminder().replace('authoritative ', '')}Hello",
        f"{TOOLS}I ask: {reminder()}Hello",
    ],
)
def test_every_other_reminder_stays(text: str) -> None:
    said, rules = told(conversation(f"{started()}Hi", text))
    assert said == [f"{started()}Hi", text]
    assert rules == ()


@pytest.mark.parametrize("first", ["Hi", started(OTHER), f"Today's date is {DATE}."])
def test_a_date_that_the_first_message_does_not_have_stays(first: str) -> None:
    said, rules = told(conversation(first, f"{reminder()}Hello"))
    assert said == [first, f"{reminder()}Hello"]
    assert rules == ()


def test_results_and_replies_stay() -> None:
    """Only messages of the user begin with reminders of the client."""
    text = f"{reminder()}Hello"
    messages = [*conversation(f"{started()}Hi"), {"role": "assistant", "content": text}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": text}]
    made = Canonicaliser().canonicalise(Chat(messages))
    assert list(made.chat.messages) == messages


def sent(*messages: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """The same as `told`, of messages in parts, as the client sends them: users' and replies."""
    roles = ("user", "assistant")
    body = [
        {"role": roles[i % 2], "content": [{"type": "text", "text": part} for part in parts]}
        for i, parts in enumerate(messages)
    ]
    made = Canonicaliser().canonicalise(request_to_chat({"messages": body}))
    assert all(set(m) == {"role", "content"} for m in made.chat.messages)
    return [m["content"] for m in made.chat.messages], made.rules


def test_a_turn_without_a_reply_is_extended() -> None:
    """Its message and the next are one of three parts; a turn later, of two."""
    begun = (started(), "Hi"), ("Fine.",)
    stopped, rules = sent(*begun, ("Third", reminder(), "Fourth"))
    assert stopped == [f"{started()}Hi", "Fine.", "ThirdFourth"]
    assert rules == ("date_reminder",)
    later, _ = sent(*begun, ("Third", "Fourth"), ("Fine.",), (reminder(), "Fifth"))
    assert later == [*stopped, "Fine.", "Fifth"]


@pytest.mark.parametrize(
    "parts",
    [
        (f"Third{reminder()}Fourth",),
        ("Third", f"{reminder()}Fourth"),
        ("Third", f"In my log: {reminder()}", "Fourth"),
        ("Third", reminder()),
        ("Third", reminder(), "\n"),
        ("Third", reminder(OTHER), "Fourth"),
    ],
)
def test_a_reminder_in_a_text_of_the_user_stays(parts: tuple[str, ...]) -> None:
    said, rules = sent((started(), "Hi"), ("Fine.",), parts)
    assert said[-1] == "".join(parts)
    assert rules == ()
