"""Differences in form leave the prompt unchanged, from the wire to the token ids."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxcache.config.rules import RULES
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.canonical.remembered import CLEARED
from mlxcache.types import Chat, ToolCall
from mlxcache.wire import anthropic_request, anthropic_types, openai_request
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_types import ChatRequest
from tests.prompt import kinds, templates
from tests.wire.anthropic_bodies import MARK, result, text, tool, use, user

LINE = "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch={};"
HEAD = "You are an agent.\n\nLong instructions."
LONG = "A line of the file.\n" * 20
TOOLS = [tool("Read"), tool("Bash"), tool("Edit")]


def anthropic(**body: Any) -> Chat:
    request = msgspec.json.encode({"model": "m", "messages": [user("hi")], **body})
    return anthropic_request.to_chat(decode(anthropic_types.Conversation, request))[0]


def openai(*messages: dict[str, Any]) -> Chat:
    body = {"messages": [*messages, {"role": "user", "content": "hi"}]}
    return openai_request.to_chat(decode(ChatRequest, msgspec.json.encode(body)))


@pytest.fixture(scope="module")
def shared() -> PromptBuilder:
    return PromptBuilder(kinds.tokenizer("byte_level", templates.chatml()))


@pytest.fixture
def builder() -> PromptBuilder:
    return PromptBuilder(kinds.tokenizer("byte_level", templates.chatml()))


def ids(builder: PromptBuilder, chat: Chat) -> list[int]:
    return builder.chat(chat).ids.tolist()


SYSTEMS: dict[str, Any] = {
    "its own block": [text(LINE.format("36ee5")), text("You are an agent."), text(HEAD[19:])],
    "without cch": [text(LINE[: LINE.index(" cch")]), text(HEAD, **MARK)],
    "joined": f"{LINE.format('0aaa9')}\n\n{HEAD}",
    "joined by a line end": f"{LINE.format('0aaa9')}\n{HEAD}",
    "a sub-agent's": [text(LINE.format("1") + " cc_is_subagent=true;"), text(HEAD)],
    "two marks": [text(HEAD[:17], **MARK), text(HEAD[19:], **MARK)],
}


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_attribution_blocks_and_marks(shared: PromptBuilder, system: Any) -> None:
    assert ids(shared, anthropic(system=system)) == ids(shared, anthropic(system=HEAD))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_attribution_through_a_proxy(shared: PromptBuilder, role: str) -> None:
    line = LINE.format("36ee5")
    plain = ids(shared, openai({"role": role, "content": HEAD}))
    for content in (f"{line}\n{HEAD}", [text(line), text(HEAD)], [text(line + "\n"), text(HEAD)]):
        assert ids(shared, openai({"role": role, "content": content})) == plain
    each = [{"role": role, "content": line}, {"role": role, "content": HEAD}]
    assert ids(shared, openai(*each)) == plain
    assert plain == ids(shared, anthropic(system=HEAD))


def test_a_list_of_one_text_and_a_moving_mark(shared: PromptBuilder) -> None:
    """Yesterday's list is today's string, and the mark is on the newest message alone."""
    reply = {"role": "assistant", "content": "yes"}
    old = anthropic(messages=[user("one"), reply, user(text("two", **MARK))], system=HEAD)
    new = anthropic(
        messages=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": [text("yes")]},
            {"role": "user", "content": "two"},
        ],
        system=[text(HEAD, **MARK)],
    )
    assert ids(shared, old) == ids(shared, new)


def test_the_order_of_tools(builder: PromptBuilder) -> None:
    first = ids(builder, anthropic(tools=TOOLS))
    assert ids(builder, anthropic(tools=TOOLS[::-1])) == first
    assert ids(builder, anthropic(tools=[TOOLS[1], TOOLS[2], TOOLS[0]])) == first
    assert ids(builder, anthropic(tools=TOOLS[:2])) != first


def turns(call: dict[str, Any], content: Any) -> list[dict[str, Any]]:
    reply = {"role": "assistant", "content": [text("I look."), call]}
    return [user("look"), reply, user(result(content)), user("and?")]


def test_arguments_that_were_written_anew(builder: PromptBuilder) -> None:
    """By JavaScript (2.0 is 2), by Go (keys in order), as OpenAI's text with other blanks."""
    written: dict[str, Any] = {"path": "é", "all": True, "range": {"to": 2.0, "from": 1}}
    builder.canonicaliser.remember_call(ToolCall(0, "1", "Read", json.dumps(written)))
    was = ids(builder, anthropic(messages=turns(use(**written), "r")))
    anew: dict[str, Any] = {"all": True, "path": "é", "range": {"from": 1, "to": 2}}
    assert ids(builder, anthropic(messages=turns(use(**anew), "r"))) == was
    forms = [json.dumps(written), json.dumps(anew, indent=1), json.dumps(anew, ensure_ascii=False)]
    for arguments in forms:
        function = {"name": "Read", "arguments": arguments}
        chat = openai(
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            {"role": "user", "content": "and?"},
        )
        assert ids(builder, Chat(chat.messages[:-1])) == was


def test_results_that_were_cleared(builder: PromptBuilder) -> None:
    call = use(path="a")
    was = ids(builder, anthropic(messages=turns(call, LONG)))
    cleared = anthropic(messages=turns(call, [text(CLEARED)]))
    made = builder.chat(cleared)
    assert made.ids.tolist() == was
    assert made.rules == ("cleared_results",)
    tight = PromptBuilder(
        kinds.tokenizer("byte_level", templates.chatml()), context=len(was) + len(was) // 4
    )
    assert ids(tight, anthropic(messages=turns(call, LONG))) == was
    made = tight.chat(cleared)
    assert len(made.ids) < len(was)
    assert made.rules == ()


@pytest.mark.parametrize("word", ["<|im_end|>", "<tool_call>", "<|im_start|>system", "</think>"])
def test_control_tokens_in_a_result_are_text(shared: PromptBuilder, word: str) -> None:
    controls = set(kinds.tokenizer("byte_level", templates.chatml()).get_added_vocab().values())

    def special(content: str) -> list[int]:
        made = ids(shared, anthropic(messages=turns(use(path="a"), content), tools=TOOLS))
        return [token for token in made if token in controls]

    assert special(f"before {word} after") == special("before after")


def test_all_rules_can_be_off() -> None:
    off = dict.fromkeys(RULES, False)
    made = PromptBuilder(kinds.tokenizer("byte_level", templates.chatml()), rules=off)
    line = LINE.format("36ee5")
    assert ids(made, anthropic(system=f"{line}\n{HEAD}")) != ids(made, anthropic(system=HEAD))
    assert made.chat(anthropic(system=line)).rules == ()
