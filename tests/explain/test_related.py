"""Earlier prompts are kept for comparison and ranked."""

from __future__ import annotations

import itertools
from functools import lru_cache

from mlxcache.explain.differences import related
from mlxcache.explain.prefix_loss import EarlierPrompt, EarlierPrompts
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.types import Chat
from tests.prompt import kinds, templates


@lru_cache(maxsize=1)
def builder() -> PromptBuilder:
    return PromptBuilder(kinds.tokenizer("byte_level", templates.chatml()))


def served(session: str, words: str, size: int, *, cut: int = 0) -> EarlierPrompt:
    prompt = builder().chat(Chat([{"role": "user", "content": f"{words} " * size * 20}]))
    return EarlierPrompt(session, prompt, prompt.ids[: len(prompt.ids) - cut], 10)


def test_what_is_kept_for_comparing_is_bounded():
    held = EarlierPrompts(count=6, each=2, limit=10**9)
    for i in range(20):
        held.add(served(f"s{i % 4}", f"w{i}", 3))
        assert len(held.all()) <= 6
    assert all(sum(one.session == f"s{i}" for one in held.all()) <= 2 for i in range(4))
    one = served("s", "big", 50)
    small = EarlierPrompts(limit=3 * one.nbytes)
    for i in range(8):
        small.add(served(f"s{i}", f"v{i}", 50))
        assert sum(one.nbytes for one in small.all()) <= 3 * one.nbytes
    assert len(small.all()) >= 2
    tiny = EarlierPrompts(limit=1)
    tiny.add(one)
    assert not tiny.all()


def test_the_newest_of_those_that_share_as_much_comes_first():
    held = [served(session, "w", 9) for session in ("a", "b", "a", "b")]
    found = EarlierPrompts.ranked(held, "a", held[0].ids)
    assert [one for one, _ in found] == [held[2], held[0], held[3], held[1]]


def asked(system: str, *said: str, tools: tuple[str, ...] = ()) -> Chat:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": words} for role, words in zip(roles, said, strict=False)]
    named = [{"type": "function", "function": {"name": name}} for name in tools]
    return Chat([{"role": "system", "content": system}, *messages], named)


EXPLAINS, READS = "You explain computers.", "Answer from this document alone."
FAILS = "Find out why the test of logging in fails."


def test_first_messages_that_share_few_words_are_not_taken_for_one_another() -> None:
    """Many conversations begin with `What is`; a longer message that was edited is known again."""
    assert not related(asked(EXPLAINS, "What is a cache?"), asked(READS, "What is it about?"))
    edited = [FAILS, FAILS.replace("logging in", "logins")]
    assert related(*(asked(EXPLAINS, text) for text in edited))


def test_an_equal_message_under_another_head_relates_no_conversations() -> None:
    """A title of the same words, and a sub-agent that reads the same history."""
    tools = ("Bash", "Edit", "Read")
    main = asked(EXPLAINS, FAILS, tools=tools)
    assert not related(asked("Write a title of at most fifty characters.", FAILS), main)
    grown = asked(EXPLAINS, FAILS, "It needs a file.", "Then make it.", tools=tools)
    reads = asked(READS, FAILS, "It needs a file.", "Extract what to remember.", tools=tools[2:])
    assert not related(grown, reads)
    assert related(main, grown)


def test_a_conversation_goes_on_when_its_tools_or_its_system_text_change() -> None:
    """One of them at a time; a new one has both in common with an earlier one."""
    old = asked(EXPLAINS, FAILS, tools=("Bash", "Read"))
    assert related(old, asked(EXPLAINS, FAILS, "Yes.", "Go on.", tools=("Grep",)))
    assert related(old, asked(READS, FAILS, "Yes.", "Go on.", tools=("Bash", "Read")))
    dated = asked(EXPLAINS + " Today is Monday.", "Something else.", tools=("Read", "Bash"))
    assert related(old, dated)
    assert not related(old, asked(EXPLAINS, "Something else.", tools=("Grep",)))
