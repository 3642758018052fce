"""A reply is known again whatever blanks a client strips or adds at the ends of its texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mlxcache.wire.chat_bodies import request_to_chat
from tests.prompt.families import FAMILIES
from tests.prompt.replaying import Served
from tests.prompt.turns import APIS, Talk, Trim, trimmed

MORE = 64
"""Tokens that a turn may feed beside the texts that are new in it."""

THOUGHT = " I look at the file first, then I say what is in it.\nOne moment. " * 2
TEXT = "\n\n  I look at it:  two blanks, naïve.\n\n    def f():\n\treturn 1\n\nAnd more words. " * 2
READ = ("Read", {"path": " a b.py\n", "limit": 20, "deep": {"x": [1, 2], "a": "é"}})
NEW = "And then? Go on with the other one, please."


def _split(texts: list[str]) -> list[str]:
    return [part for text in texts for part in text.partition("two ")]


def each(change: Callable[[str], str]) -> Trim:
    return lambda texts: [change(text) for text in texts]


TRIMS: dict[str, Trim] = {
    "both ends": each(str.strip),
    "the start": each(str.lstrip),
    "the end": each(str.rstrip),
    "a newline at the start": each(lambda text: text.removeprefix("\n")),
    "a newline at the end": each(lambda text: text.rstrip(" ").removesuffix("\n")),
    "more blanks": each(lambda text: f" {text}\n\n"),
    "joined": lambda texts: ["".join(texts)],
    "stripped and joined": lambda texts: ["".join(text.strip() for text in texts)],
    "joined by a newline": lambda texts: ["\n".join(texts)],
    "joined by a blank line": lambda texts: ["\n\n".join(text.strip() for text in texts)],
    "split": _split,
    "split and stripped": lambda texts: [part.strip() for part in _split(texts)],
    "empty ones added": lambda texts: ["", *texts, " \n"],
    "empty ones dropped": lambda texts: [text for text in texts if text.strip()],
}

# -- replies -----------------------------------------------------------------------------------


def answer(talk: Talk) -> None:
    talk.says(THOUGHT, TEXT)
    talk.user(NEW)


def said_and_called(talk: Talk) -> None:
    talk.says(THOUGHT, TEXT, [READ])
    talk.results(NEW)


def cut(talk: Talk) -> None:
    """max_tokens ends the reply in its text, after a blank; the client asks for the rest."""
    raw = talk.model.family.writes(THOUGHT, TEXT, ())
    talk.replies(raw[: raw.rfind("more words")], reason="length")
    talk.user("continue")


def between(talk: Talk) -> None:
    """Text before, between and after two thoughts."""
    raw = talk.model.family.writes(THOUGHT, f"{TEXT}<think>{THOUGHT}</think>\n\n{TEXT}", ())
    talk.replies(raw)
    talk.user(NEW)


def between_with_call(talk: Talk) -> None:
    raw = talk.model.family.writes(THOUGHT, f"{TEXT}<think>{THOUGHT}</think>\n\n{TEXT}", [READ])
    talk.replies(raw)
    talk.results(NEW)


KINDS = (answer, said_and_called, cut, between, between_with_call)
INTERLEAVED = ("qwen3", "qwen3.5", "glm", "minimax", "deepseek")
CALLING = (said_and_called, between_with_call)
CASES = [
    (name, kind)
    for name, kind in product(FAMILIES, KINDS)
    if (kind not in (between, between_with_call) or name in INTERLEAVED)
    and (kind not in CALLING or FAMILIES[name].calls)
]


IDS = [f"{name}, {kind.__name__}" for name, kind in CASES]
CLIENTS = tuple(product(APIS, (True, False)))


def feeds_what_is_new(
    name: str, kind: Callable[[Talk], None], trim: Trim, api: str, *, thoughts: bool
) -> None:
    """Neither what the model wrote, nor what was computed ahead where the template changes it."""
    talk = Talk(name, api, trim=trim, thoughts=thoughts)
    talk.user("Please read the file. " * 3)
    talk.ask()
    kind(talk)
    talk.ask()
    assert talk.fed(ahead=True) <= talk.size + MORE


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_a_trimmed_reply_is_not_fed_again(number: int) -> None:
    """Every trim, and every family with every kind of reply; all pairs are a slow test."""
    trim = TRIMS[list(TRIMS)[number % len(TRIMS)]]
    api, thoughts = CLIENTS[number % len(CLIENTS)]
    feeds_what_is_new(*CASES[number], trim, api, thoughts=thoughts)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES, ids=IDS)
def test_no_trim_has_any_reply_fed_again(name: str, kind: Callable[[Talk], None]) -> None:
    for trim, (api, thoughts) in product(TRIMS.values(), CLIENTS):
        feeds_what_is_new(name, kind, trim, api, thoughts=thoughts)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "glm", "mistral"])
def test_a_reply_that_is_trimmed_later_changes_nothing_behind_it(name: str, api: str) -> None:
    talk = Talk(name, api)
    talk.user("Please read the file. " * 3)
    for _ in range(3):
        talk.ask()
        said_and_called(talk)
    messages = talk.body["messages"]
    for trim in TRIMS.values():
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                messages[at] = trimmed(message, trim)
        talk.ask()
        assert talk.fed(ahead=False) <= talk.size + MORE


def test_a_reply_to_be_continued_ends_where_the_client_ends_it() -> None:
    """The client appends the rest to its own text, so no blank may come between."""
    talk = Talk("mistral", "messages", trim=TRIMS["both ends"])
    talk.user("Please read the file. " * 3)
    talk.ask()
    talk.replies(f"{TEXT}\n", reason="length")
    prompt = talk.ask()
    assert talk.model.builder.decode(prompt.ids.tolist()).endswith(TEXT.strip())


# -- edits -------------------------------------------------------------------------------------


@cache
def model_with(name: str, **rules: bool) -> Served:
    """A family's model with calls rendered as they are sent."""
    return Served(name, {"argument_order": False, **rules})


WORD = st.text(st.sampled_from("abé🦀.{"), min_size=1, max_size=4)
BLANK = st.text(st.sampled_from(" \n\t"), min_size=1, max_size=3)


@st.composite
def texts_and_edits(draw: st.DrawFn) -> tuple[str, str, bool]:
    """A text, what a client makes of it, and whether only blanks at its ends differ."""
    words = draw(st.lists(WORD, min_size=1, max_size=6))
    gaps = [draw(BLANK) for _ in words[1:]]
    ends = [draw(st.just("") | BLANK) for _ in range(4)]
    text = "".join(part for pair in zip(words, [*gaps, ""], strict=True) for part in pair)
    edit = draw(st.sampled_from(["trim", "trim", "gap", "word", "drop", "add"]))
    other, others = list(words), list(gaps)
    at = draw(st.integers(0, len(words) - 1))
    if edit == "gap" and gaps:
        others[at - 1 if at else 0] = draw(st.just("") | BLANK)
    elif edit == "word":
        other[at] = draw(WORD)
    elif edit == "drop":
        other[at] = ""
    elif edit == "add":
        other[at] += draw(WORD)
    edited = "".join(part for pair in zip(other, [*others, ""], strict=True) for part in pair)
    return f"{ends[0]}{text}{ends[1]}", f"{ends[2]}{edited}{ends[3]}", edited.strip() == text


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
@settings(max_examples=25, deadline=None)
@given(case=texts_and_edits())
def test_only_a_reply_with_other_blanks_at_its_ends_is_replaced(
    name: str, case: tuple[str, str, bool]
) -> None:
    text, edited, same = case
    talk = Talk(name, "chat", model=model_with(name))
    talk.user(f"Please read this: {text!r} {edited!r}")
    talk.ask()
    talk.says(THOUGHT, text, [READ])
    talk.results(NEW)
    message = talk.body["messages"][-2]
    talk.body["messages"][-2] = {**message, "content": edited}
    found = talk.ask()
    event("the same" if same else "edited")
    assert ("replay" in found.rules) == same
    if same:
        assert talk.fed(ahead=False) <= talk.size + MORE
    else:
        plain = model_with(name, replay=False)
        as_sent = plain.builder.chat(request_to_chat(talk.body), "s")
        assert found.ids.tolist() == as_sent.ids.tolist()
