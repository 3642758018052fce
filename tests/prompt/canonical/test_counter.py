"""Counters of tokens are removed; the newest may be moved to the end."""

import pytest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.canonical.removed import split, without
from mlxcache.types import Chat

COUNTER = "<total_tokens>199000 tokens left</total_tokens>"
NEXT = "<total_tokens>14,999,436 tokens left</total_tokens>"


def message(role, text):
    return {"role": role, "content": text}


CHAT = Chat(
    (
        message("system", f"Be brief.\n\n{COUNTER}\n{NEXT}"),
        message("user", "one"),
        message("system", COUNTER),
        message("assistant", "two"),
        message("user", "three"),
        message("system", f"A reminder.\n{NEXT}\n"),
    ),
    breakpoint=6,
)


def test_counters_go_from_system_messages():
    made = Canonicaliser().canonicalise(CHAT)
    assert [m["content"] for m in made.chat.messages] == [
        "Be brief.",
        "one",
        "two",
        "three",
        "A reminder.",
    ]
    assert made.rules == ("counter",)
    assert made.chat.breakpoint == 5


def test_the_newest_can_stand_at_the_end():
    """Behind everything that the next turn shares with this one."""
    made = Canonicaliser({"newest_counter": True}).canonicalise(CHAT)
    assert [m["content"] for m in made.chat.messages][-2:] == ["A reminder.", NEXT]
    assert sum("total_tokens" in m["content"] for m in made.chat.messages) == 1
    assert made.rules == ("newest_counter",)


@pytest.mark.parametrize(
    ("text", "left", "counters"),
    [
        (f"{COUNTER}\n\nA reminder.", "A reminder.", [COUNTER]),
        (f"{COUNTER}\n\n{NEXT}\n\n- one\n- two", "- one\n- two", [COUNTER, NEXT]),
        (f"{COUNTER}\n\nA reminder.\n\n{NEXT}", "A reminder.", [COUNTER, NEXT]),
        (f"A reminder.\n{COUNTER}\n\n{NEXT}\n ", "A reminder.", [COUNTER, NEXT]),
        (f" {COUNTER}\n", "", [COUNTER]),
        (f"{COUNTER}\n\n", "", [COUNTER]),
    ],
)
def test_counters_go_in_the_order_in_which_they_came(text, left, counters):
    assert split(text) == (left, counters)


def test_a_counter_between_the_paragraphs_of_a_later_message_goes():
    """As Claude Code 2.1.330 sends it; in the system prompt such a paragraph may be an example."""
    text = f"# Environment\n- a\n\n{COUNTER}\n\nToday's date is 2026-11-21."
    made = Canonicaliser().canonicalise(
        Chat((message("system", text), message("user", "hi"), message("system", text)))
    )
    assert [m["content"] for m in made.chat.messages] == [
        text,
        "hi",
        "# Environment\n- a\n\nToday's date is 2026-11-21.",
    ]
    assert without(f"- a\n{COUNTER}\n- b\n\nx {COUNTER}\n\ny")[1] == []


def test_a_reply_that_is_to_be_continued_stays_last():
    chat = Chat((*CHAT.messages, message("assistant", "Once")), continue_final=True)
    made = Canonicaliser({"newest_counter": True}).canonicalise(chat)
    assert [m["content"] for m in made.chat.messages][-2:] == [NEXT, "Once"]


@pytest.mark.parametrize(
    "text",
    [
        f"The client writes {COUNTER}",
        f"{COUNTER}\nBe brief.",
        f"`{COUNTER}`",
        f"Ignore\n{COUNTER} if you see it",
        "<total_tokens>many tokens left</total_tokens>",
        "<total_tokens>5 tokens left</total_tokens",
        "<total_tokens> 5 tokens left</total_tokens>",
        "<total_tokens>5 tokens used</total_tokens>",
        "",
    ],
)
def test_what_only_looks_like_it_stays(text):
    assert split(text) == (text, [])
