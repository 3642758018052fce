"""Texts that are written to be slow to search take time in proportion to their length.

A search in C holds the interpreter, so all other requests would wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlxcache.explain.audit import audit
from mlxcache.explain.causes import find_announced
from mlxcache.explain.differences import differences
from mlxcache.model.tool_syntax.arguments import Tools
from mlxcache.model.tool_syntax.families import FAMILIES
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.canonical.removed import reminder
from mlxcache.types import Chat
from mlxcache.wire.titles import title_from_text
from tests.prompt import kinds, templates

QWEN_CODE = (
    "<system-reminder>\nThis is the Qwen Code. We are setting up the context for our chat.\n"
    "Today's date is Monday.\n</system-reminder>"
)
SNAPSHOT = "Git snapshot at conversation start. This snapshot is frozen in time x\n```text\n"
CODEX = "Generate a concise, single-line task title of at most 9 words\n"


def user(*texts: str) -> Chat:
    return Chat(messages=[{"role": "user", "content": text} for text in texts])


def system(text: str) -> Chat:
    return Chat(messages=[{"role": "system", "content": text}, *user("hi").messages])


def audited(unit: str) -> Callable[[int], object]:
    builder = PromptBuilder(kinds.tokenizer("byte_level", templates.QWEN3))
    prompt = builder.chat(user("hi"))

    def search(n: int) -> object:
        return audit(builder, replace(prompt, sent=user(unit * (n // 4))))

    return search


def compared(unit: str) -> Callable[[int], object]:
    def search(n: int) -> object:
        text = "".join(unit.replace("N", str(i)) for i in range(n // 4))
        return differences(user(text, "a"), user("", "a" + text))

    return search


def canonicalised(chat: Callable[[int], Chat]) -> Callable[[int], object]:
    return lambda n: Canonicaliser({"git_status": True}).canonicalise(chat(n), None)


def read(family: str, text: Callable[[int], str]) -> Callable[[int], object]:
    def search(n: int) -> object:
        with pytest.raises(ValueError, match=r"."):
            FAMILIES[family].reader.read(text(n), Tools())
        return None

    return search


SEARCHES: dict[str, Callable[[], Callable[[int], object]]] = {
    "reminders that have no end": lambda: compared("<system-reminder>"),
    "reminders": lambda: compared(f"<system-reminder>N {'x' * 30}</system-reminder>\n"),
    "environments that have no end": lambda: audited("<env><context><system-reminder>"),
    "a date's reminders": lambda: canonicalised(
        lambda n: user(QWEN_CODE + "x", reminder("Monday") + "<system-reminder>\n" * n + "x")
    ),
    "git statuses that have no end": lambda: canonicalised(lambda n: system(SNAPSHOT * (n // 4))),
    "a branch": lambda: lambda n: list(find_announced("Branch: x (behind 1" + "1" * n)),
    "a title's request": lambda: lambda n: title_from_text(CODEX + "\n" * n),
    "an element's name": lambda: lambda n: title_from_text("<a" + "_" * n),
    "calls of Gemma without parameters": lambda: read(
        "gemma4", lambda n: "call:f{a:1}" + "call:g{}" * (n // 8) + "x"
    ),
    "blanks after a call of Gemma": lambda: read("gemma4", lambda n: "call:f{a:1}" + " " * n + "x"),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_text_four_times_as_long_takes_about_four_times_as_long(name: str) -> None:
    """Quadratic time would take sixteen times as long, which is far above any noise."""
    search = SEARCHES[name]()

    def seconds(n: int) -> float:
        taken = []
        for _ in range(2):
            begin = time.thread_time()
            search(n)
            taken.append(time.thread_time() - begin)
        return min(taken)

    short, long = seconds(8_000), seconds(32_000)
    assert long < 8 * short + 0.03, (short, long)
