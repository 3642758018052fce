"""A reminder of a date that the first message has is removed; every other one stays."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.types import Chat

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
