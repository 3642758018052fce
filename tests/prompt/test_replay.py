"""Replies that a client sends back enter the prompt as they were generated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mlxcache.prompt.replies import GeneratedReply, Replies, ReplyContent, ReplyReader
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.session_rows import Turn
from mlxcache.store.sessions import Sessions
from mlxcache.types import Chat, FinishReason, token_ids
from tests.prompt.chats import TOOLS
from tests.prompt.families import FAMILIES
from tests.prompt.replaying import (
    Message,
    Served,
    fed,
    results,
    thinking_as_text,
    user,
    without_thinking,
)

THOUGHT = "The user wants a file. I look at it first, then I say what's in it.\nOne moment."
TEXT = 'I\'ll look at it:  two blanks, naïve {"a": 1}, and then some more words. '
CALL: tuple[str, dict[str, Any]] = (
    "Read",
    {"path": "/tmp/a b.py", "limit": 20, "deep": {"x": [1, 2], "a": "é"}},
)
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    name: [CALL, ("Write", dict[str, Any](path="b"))][: 1 + f.several]
    for name, f in FAMILIES.items()
}
CALLING = [name for name, family in FAMILIES.items() if family.calls]
START = [user("Please read the file. " * 3)]
OWN = 64
"""Tokens with which a template closes a turn and opens the next, at most."""


def size(served: Served, message: Message) -> int:
    return len(served.tokenizer.encode(message["content"], add_special_tokens=False))


def called(served: Served, name: str, messages: list[Message]) -> tuple[Message, Any]:
    text = TEXT if name != "gpt-oss" else ""
    return served.reply(served.asked(messages), served.writes(THOUGHT, text, CALLS[name]))


SENT: dict[str, Callable[[Message], Message]] = {
    "thinking sent": lambda reply: reply,
    "thinking left out": without_thinking,
    "thinking as text": thinking_as_text,
}


@pytest.mark.parametrize("sends", SENT)
@pytest.mark.parametrize("name", CALLING)
def test_after_a_call_only_its_results_are_fed(name: str, sends: str) -> None:
    served = Served(name)
    messages = list(START)
    for turn in range(3):
        reply, held = called(served, name, messages)
        assert [c["function"]["name"] for c in reply["tool_calls"]] == [c[0] for c in CALLS[name]]
        new = results(reply, f"Result {turn}")
        messages += [SENT[sends](reply), *new]
        again = served.asked(messages)
        bound = sum(size(served, result) for result in new) + OWN
        if name == "deepseek":  # its template keeps no thinking at all
            assert fed(again, held) > bound
            assert not again.tokenised.splices
        else:
            assert fed(again, held) <= bound
            assert again.ids[: len(held) - 1].tolist() == held[:-1].tolist()
            assert "replay" in again.rules
            assert ("thinking" in again.rules) == (
                FAMILIES[name].thinks and sends != "thinking sent"
            )


@pytest.mark.parametrize("name", CALLING)
def test_a_template_that_leaves_out_thinking_is_followed(name: str) -> None:
    """After a new user message the prompt is that of a builder without memory, with the calls as
    the client sends them or as the model wrote them."""
    if not FAMILIES[name].thinks:
        pytest.skip("does not think")
    served = Served(name)
    reply, _ = called(served, name, START)
    messages = [*START, reply, *results(reply)]
    answer, _ = served.reply(served.asked(messages), served.writes("Hm.", "Done.", []))
    messages += [answer, user("Thanks.")]
    last = served.asked(messages)
    written = copy.deepcopy(messages)
    for call, (_, arguments) in zip(written[1]["tool_calls"], CALLS[name], strict=True):
        call["function"]["arguments"] = arguments
    fresh = [Served(name).asked(sent).ids.tolist() for sent in (messages, written)]
    assert last.ids.tolist() in fresh or name == "gpt-oss"
    assert THOUGHT not in served.tokenizer.decode(last.ids.tolist())


def _edits(reply: Message) -> list[tuple[str, Message]]:
    def changed(**fields: Any) -> Message:
        return {**copy.deepcopy(reply), **fields}

    one, *rest = reply["tool_calls"]
    function = one["function"]

    def other(**fields: Any) -> list[Any]:
        return [{**one, "function": {**function, **fields}}, *rest]

    arguments = function["arguments"]
    made = [
        ("text", changed(content=reply["content"].replace("two", "too") + "!")),
        ("thinking", changed(reasoning_content="Another thought.")),
        ("name", changed(tool_calls=other(name="Edit"))),
        ("value", changed(tool_calls=other(arguments={**arguments, "limit": 21}))),
        ("type", changed(tool_calls=other(arguments={**arguments, "limit": True}))),
        ("more", changed(tool_calls=other(arguments={**arguments, "all": "1"}))),
        ("no calls", changed(tool_calls=[])),
        ("twice", changed(tool_calls=[*reply["tool_calls"], one])),
    ]
    if rest:
        made.append(("order", changed(tool_calls=[*rest, one])))
        made.append(("fewer", changed(tool_calls=[one])))
    return made


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm", "minimax", "mistral"])
def test_a_near_miss_is_tokenised_as_it_is(name: str) -> None:
    served, fresh = Served(name), Served(name, {"replay": False, "thinking": False})
    reply, _ = called(served, name, START)
    for what, edited in _edits(reply):
        if what == "thinking" and not FAMILIES[name].thinks:
            continue
        messages = [*START, edited, *results(edited), user("Go on.")][: 3 + len(results(edited))]
        messages = messages[:-1] if results(edited) else messages
        found = served.asked(messages)
        assert "replay" not in found.rules, what
        assert found.ids.tolist() == fresh.asked(messages).ids.tolist(), what


WORDS = st.text(st.sampled_from('ab \n\t"{}<>é🦀,1.|'), min_size=1, max_size=24)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["path", "old", "new", "n"]), st.one_of(WORDS, st.integers(-9, 99)), max_size=3
)


@cache
def one_of(name: str, **rules: bool) -> Served:
    return Served(name, rules)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "mistral"])
@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(
        st.tuples(WORDS, WORDS, st.lists(ARGUMENTS, min_size=1, max_size=2)), min_size=1, max_size=4
    )
)
def test_a_prompt_begins_with_all_that_was_generated(
    name: str, turns: list[tuple[str, str, list[dict[str, Any]]]]
) -> None:
    """Prompt and reply, whatever the model wrote and however the client wrote it anew, unless that
    came back as something else: then it is tokenised as without this."""
    served, fresh = one_of(name), one_of(name, replay=False)
    messages = list(START)
    clear = True
    for thinking, text, given_arguments in turns:
        made = [("Read", a) for a in given_arguments][: 1 + FAMILIES[name].several]
        shown = text if name != "gpt-oss" else ""
        prompt = served.asked(messages)
        reply, held = served.reply(prompt, served.writes(thinking, shown, made))
        said = ReplyContent.of_message(reply)
        assert said is not None
        thought = thinking.strip() if FAMILIES[name].thinks else ""
        # An empty thought's marks are left out by templates, and by what is put in.
        clear = clear and bool(thought or not FAMILIES[name].thinks)
        clear = clear and said.same(ReplyContent((shown,), (thought,), tuple(made)))
        messages = [*messages, reply, *(results(reply) or [user("And?")])]
        again = served.asked(messages)
        if clear:
            event("every reply put in")
            assert again.ids[: len(held) - 1].tolist() == held[:-1].tolist()
        if not again.tokenised.splices:
            rewritten = again.chat.messages
            assert again.ids.tolist() == fresh.asked(rewritten).ids.tolist()


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "glm"])
def test_a_reply_that_does_not_come_back_is_read_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each turn of a long conversation would parse all replies without thinking."""
    served = Served(name)
    messages = list(START)
    read: list[int] = []
    said = ReplyReader.read_content

    def counted(self: ReplyReader, ids: Any, *more: Any) -> ReplyContent | None:
        read.append(len(ids))
        return said(self, ids, *more)

    monkeypatch.setattr(ReplyReader, "read_content", counted)
    for turn in range(4):
        reply, _ = served.reply(served.asked(messages), served.writes(THOUGHT, TEXT, []))
        messages += [reply, user(f"{turn} And then?")]
    served.asked(messages)
    assert len(read) <= 3 * 4  # as it was written, and as it may stand in a prompt
    count = len(read)
    for turn in range(3):
        served.asked([*messages, {"role": "assistant", "content": "Yes."}, user(f"Go on. {turn}")])
    assert len(read) == count


def test_of_several_replies_the_one_that_comes_back_is_put_in() -> None:
    served = Served("mistral")
    prompt = served.asked(START)
    kept = [served.reply(prompt, served.ids(f"{word} indeed.</s>")) for word in ("Yes", "No", "So")]
    for reply, held in kept:
        again = served.asked([*START, reply, user("And?")])
        assert again.ids[: len(held)].tolist() == held.tolist()


STRAY: list[tuple[str, str, FinishReason]] = [
    ("qwen3", "<think>\nHm.\n</think>\n\nSo</tool_response>, and</think> then.<|im_end|>", "stop"),
    ("qwen3", "<think>\nHm<|im_start|>user\n.\n</think>\n\nSo.<|im_end|>", "stop"),
    ("qwen3", "<think>\nHm.\n</think>\n\n<tool_call>\n{broken\n</tool_call><|im_end|>", "stop"),
    ("qwen3", "<think>\nHm.\n</think>\n\nSo</tool_response>", "length"),
    ("qwen3.5", "Hm.\n</think>\n\nSo</tool_response>, or<|im_start|>user\nno.<|im_end|>", "stop"),
    ("gpt-oss", "<|channel|>final<|message|>So<|message|>user<|constrain|>.<|return|>", "stop"),
    ("glm", "\n<think>Hm.</think>\nSo<|system|>and</arg_key>.<|observation|>", "stop"),
    ("minimax", "Hm.\n</think>\n\nSo]~b]user\nand.[e~[", "stop"),
    ("mistral", "So[INST]and[/INST].</s>", "stop"),
    ("mistral", '[TOOL_CALLS]Write[ARGS]{"path": "a[INST]b", "n": 1}</s>', "stop"),
]
"""Replies with control tokens that are passed on as text, and why each reply ended."""
RESULT = results({"tool_calls": [{"id": "x"}]})


@pytest.mark.parametrize(("name", "raw", "reason"), STRAY)
def test_control_tokens_passed_on_as_text_come_back_as_generated(
    name: str, raw: str, reason: FinishReason
) -> None:
    served = Served(name)
    reply, held = served.reply(served.asked(START), served.ids(raw), reason=reason)
    again = served.asked([*START, reply, *RESULT])
    generated = held if reason == "length" else held[:-1]
    assert again.ids[: len(generated)].tolist() == generated.tolist()


@pytest.mark.parametrize(("name", "raw", "reason"), STRAY)
def test_only_a_reply_of_this_server_at_its_place_holds_control_tokens(
    name: str, raw: str, reason: FinishReason
) -> None:
    """Not the same text from a user, an edited copy of the reply, or a copy elsewhere."""
    served, fresh = Served(name), Served(name, {"replay": False})
    reply, _ = served.reply(served.asked(START), served.ids(raw), reason=reason)
    text = reply["content"] or "a[INST]b"
    for messages in (
        [*START, {**reply, "content": text + "!"}, *RESULT],
        [user(text), reply, *RESULT],
        [*START, {"role": "assistant", "content": "Yes."}, user(text)],
    ):
        found = served.asked(messages)
        assert found.ids.tolist() == fresh.asked(messages).ids.tolist()


def test_a_session_label_is_not_needed_and_changes_nothing() -> None:
    served = Served("glm")
    reply, _ = called(served, "glm", START)
    messages = [*START, reply, *results(reply)]
    prompts = [served.builder.chat(Chat(messages, TOOLS), label) for label in (None, "a", "s")]
    assert all("replay" in prompt.rules for prompt in prompts)
    assert len({tuple(prompt.ids.tolist()) for prompt in prompts}) == 1


def test_each_rule_has_its_switch() -> None:
    reply, _ = called(served := Served("qwen3"), "qwen3", START)
    messages = [*START, without_thinking(reply), *results(reply)]
    assert served.asked(messages).rules == ("thinking", "replay")
    for rules in ({"replay": False}, {"thinking": False}, {"replay": False, "thinking": False}):
        other = Served("qwen3", rules)
        again, _ = called(other, "qwen3", START)
        for send in (without_thinking, thinking_as_text):
            sent = [*START, send(again), *results(again)]
            found = other.asked(sent).rules
            assert not set(found) & set(rules)
        if "thinking" in rules:
            assert THOUGHT in other.tokenizer.decode(other.asked(sent).ids.tolist())


def test_a_text_that_only_begins_like_the_thinking_stays() -> None:
    """As a client that edits a reply sends it."""
    served = Served("qwen3")
    reply, _ = called(served, "qwen3", START)
    for text in (THOUGHT, f"{THOUGHT}!\n\n{TEXT}", f"{TEXT}\n\n{THOUGHT}"):
        edited = {**without_thinking(reply), "content": text}
        assert "thinking" not in served.asked([*START, edited, *results(reply)]).rules


def test_what_is_remembered_is_bounded_in_bytes() -> None:
    replies = Replies(limit=40_000)
    made = [
        GeneratedReply(
            ReplyRow(
                bytes([n]),
                n,
                "",
                bytes([n]),
                token_ids(range(n, n + 200)),
                True,
                False,
                False,
                None,
            )
        )
        for n in range(20)
    ]
    for one in made:
        replies.add(one)
        assert made[0] in replies.find(bytes([0]))
    assert (
        replies.nbytes == sum(m.nbytes for m in made if m in replies.find(m.row.digest)) <= 40_000
    )
    assert not replies.find(bytes([1]))
    assert not replies.find_by_history(bytes([1]))
    assert replies.find_by_history(bytes([0])) == (made[0],)


def test_what_was_written_before_a_restart_is_put_in() -> None:
    served = Served("qwen3")
    start = [user("What is <|im_end|>? And this: <|im_end|>")]
    reply, held = called(served, "qwen3", start)
    sessions = Sessions(TemporaryDatabase())
    assert served.last is not None
    turn = Turn("ns", "m", held, 10, 0, 0, 1.0, reply=served.last.row)
    sessions.record_turn(turn)
    messages = [*start, without_thinking(reply), *results(reply)]
    other = Served("qwen3")
    assert other.asked(messages).rules == ()
    assert sessions.replies("another")[0] == {}
    found, last = sessions.replies("ns")
    assert sessions.replies("ns", last) == ({}, last)
    other.replies.learn(found[None])
    assert other.asked(messages).ids.tolist() == served.asked(messages).ids.tolist()
    assert other.asked(messages).rules == ("thinking", "replay")
    sessions.clear()
    assert sessions.replies("ns")[0] == {}
