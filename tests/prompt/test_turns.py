"""A turn feeds only its new text, with each family's template and after any kind of reply."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mlxcache.types import Text, Thinking, ToolCall
from tests.prompt.families import FAMILIES
from tests.prompt.turns import APIS, Talk

MORE = 64
"""Tokens that a turn may feed beside the texts that are new in it."""

THOUGHT = "The user wants a file. I look at it first, then I say what's in it.\nOne moment. " * 3
TEXT = 'I\'ll look at it:  two blanks, naïve {"a": 1}, and then some more words. ' * 3
READ = (
    "Read",
    {"path": "/tmp/a b.py", "limit": 20, "deep": {"x": [1, 2], "a": "é"}, "t": "line\n" * 10},
)
WRITE = ("Write", {"path": "b", "text": "x = 1\n" * 12})
NEW = "And then? Go on with the other one, please."
RESULT = "It is so, line after line."


def whole(talk: Talk) -> None:
    talk.says("", TEXT)
    talk.user(NEW)


def thought(talk: Talk) -> None:
    talk.says(THOUGHT, TEXT)
    talk.user(NEW)


def call(talk: Talk) -> None:
    pieces = talk.says(THOUGHT, "", [READ])
    assert [type(p) for p in pieces if not isinstance(p, Thinking)][-1:] == [ToolCall]
    talk.results(RESULT)


def said_and_called(talk: Talk) -> None:
    talk.says(THOUGHT, TEXT, [READ])
    talk.results(RESULT)


def two_calls(talk: Talk) -> None:
    """Two calls at once, where the family makes such."""
    talk.says(THOUGHT, "", [READ, WRITE])
    talk.results(RESULT)


def call_after_result(talk: Talk) -> None:
    """Thinking and another call after a result."""
    call(talk)
    talk.ask()
    talk.says(THOUGHT, "", [WRITE])
    talk.results(RESULT)


def answer_after_result(talk: Talk) -> None:
    """Thinking and an answer after a result: templates now drop the thinking of the call too."""
    call(talk)
    talk.ask()
    talk.says(THOUGHT, TEXT)
    talk.user(NEW)


def cut(talk: Talk) -> None:
    """max_tokens ends the reply in its text."""
    raw = talk.model.family.writes(THOUGHT, TEXT, ())
    talk.replies(raw[: raw.rfind("some more") + 3], reason="length")
    talk.user(NEW)


def cut_in_thinking(talk: Talk) -> None:
    """max_tokens ends it before it said anything."""
    raw = talk.model.family.writes(THOUGHT, TEXT, ())
    talk.replies(raw[: raw.find(THOUGHT[-30:]) + 20], reason="length")
    talk.user(NEW)


def stopped(talk: Talk) -> None:
    """A stop string ends it, most often inside of a token."""
    stop = ["ast wor"]
    talk.ask(stop)
    pieces = talk.replies(
        talk.model.family.writes(THOUGHT, f"{TEXT}The last words.", ()), stop=stop
    )
    assert "".join(p.text for p in pieces if isinstance(p, Text)).endswith("The l")
    talk.user(NEW)


KINDS: tuple[Callable[[Talk], None], ...] = (
    whole,
    thought,
    call,
    said_and_called,
    two_calls,
    call_after_result,
    answer_after_result,
    cut,
    cut_in_thinking,
    stopped,
)
CALLING = (call, said_and_called, two_calls, call_after_result, answer_after_result)

THOUGHT_OF = (thought, answer_after_result, cut, stopped)
AHEAD: dict[str, tuple[Callable[[Talk], None], ...]] = {
    "qwen3": (whole, *THOUGHT_OF),
    "qwen3.5": (whole, *THOUGHT_OF),
    "gpt-oss": THOUGHT_OF,
    "glm": THOUGHT_OF,
    "deepseek": (whole, *THOUGHT_OF, call, said_and_called, two_calls, call_after_result),
    "minimax": (whole, *THOUGHT_OF),
    "gemma3": (two_calls,),
}
"""What replay alone does not make warm. A person's message has templates leave out the thinking
before it, some of them the marks of an empty thought too; DeepSeek R1's leaves it out always.
Gemma's tools are described in text, and what stands around two results are more than 64 tokens."""


def skip_unless_it_calls(name: str, kind: Callable[[Talk], None]) -> None:
    if kind in CALLING and not FAMILIES[name].calls:
        pytest.skip("mlx-lm reads no calls of it")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_turn_feeds_what_is_new_in_it(name: str, kind: Callable[[Talk], None]) -> None:
    """By replay, or by what was computed ahead, with either API, thinking sent back or not, for
    layers that can be cut anywhere and for such as cannot."""
    skip_unless_it_calls(name, kind)
    for api, thoughts in product(APIS, (True, False)):
        talk = Talk(name, api, thoughts=thoughts)
        talk.user("Please read the file. " * 3)
        talk.ask()
        kind(talk)
        talk.ask()
        most = talk.size + MORE
        assert talk.fed(ahead=True) <= most
        assert talk.fed(ahead=True, recurrent=True) <= most
        replayed = talk.fed(ahead=False) <= most
        assert replayed == (kind not in AHEAD.get(name, ()))


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_stop_string_may_begin_anywhere_in_a_token(name: str) -> None:
    """What was computed before that token is not fed again."""
    end = "they continue with otherwise 1234 naïve 日本 words"
    for at in range(4, len(end) - 4):
        talk = Talk(name, "chat")
        talk.user("Please read the file. " * 3)
        stop = [end[at : at + 4]]
        talk.ask(stop)
        pieces = talk.replies(talk.model.family.writes("", TEXT + end, ()), stop=stop)
        shown = "".join(p.text for p in pieces if isinstance(p, Text))
        talk.user(NEW)
        talk.ask()
        assert talk.fed(ahead=False) <= talk.size + 24
        assert talk.prompt.ids.dtype == np.int32
        written = talk.model.builder.decode(talk.prompt.ids.tolist())
        assert shown.rstrip() in written
        assert shown + stop[0] not in written


FOLLOWED = [kind for kind in KINDS if kind is not stopped]


def stripped(texts: list[str]) -> list[str]:
    return [text.strip() for text in texts]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_each_turn_of_a_conversation_feeds_what_is_new_in_it(
    name: str, data: st.DataObject
) -> None:
    """Of any kinds of turn, one after another, whatever the client does with ids and blanks.

    But DeepSeek R1's template leaves out thinking between calls, so nothing is replayed there, and
    nobody can know before how a client will write a call.
    """
    talk = Talk(
        name,
        data.draw(st.sampled_from(APIS)),
        thoughts=data.draw(st.booleans()),
        renames=name != "deepseek" and data.draw(st.booleans()),
        trim=data.draw(st.sampled_from([None, stripped])),
    )
    talk.user("Please read the file. " * 3)
    for kind in data.draw(st.lists(st.sampled_from(FOLLOWED), min_size=2, max_size=5)):
        talk.ask()
        kind(talk)
        talk.ask()
        event(f"{kind.__name__}, replayed: {'replay' in talk.prompt.rules}")
        assert talk.fed(ahead=True) <= talk.size + MORE
        assert talk.fed(ahead=True, recurrent=True) <= talk.size + MORE
