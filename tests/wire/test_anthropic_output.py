"""Anthropic bodies ask for a format and for tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxcache.types import OutputFormat, ToolChoice
from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_request import (
    read_effort,
    read_format,
    read_thinking_budget,
    read_tool_choice,
)
from tests.wire.anthropic_bodies import (
    FORMAT,
    assistant,
    convert,
    read,
    rendered,
    result,
    tool,
    use,
    user,
)

EXPECTED = OutputFormat("json_schema", '{"type":"object"}')


def body(**fields: Any) -> wire.Conversation:
    request = {"model": "m", "messages": [user("hi")], **fields}
    return msgspec.convert(request, wire.Conversation)


def choice(tools: list[dict[str, Any]], **fields: Any) -> ToolChoice | None:
    asked = body(tools=tools, tool_choice=fields or None)
    return read_tool_choice(asked, [{"function": {"name": tool["name"]}} for tool in tools])


def test_both_names_of_the_format_are_read() -> None:
    newer = read_format(body(output_config={"format": FORMAT, "effort": "low"}))
    older = read_format(body(output_format=FORMAT))
    assert newer == older == EXPECTED
    assert newer.param == "output_config.format.schema"
    assert older.param == "output_format.schema"


@pytest.mark.parametrize("fields", [{}, {"output_config": {"effort": "low", "format": None}}])
def test_no_format_leaves_the_text_free(fields: dict[str, Any]) -> None:
    assert read_format(body(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(required=True)),
        ({"type": "tool", "name": "B"}, ToolChoice(required=True, names=("B",))),
        ({"type": "none"}, None),
    ],
)
def test_a_choice_says_which_tools_may_and_must_be_called(
    fields: dict[str, Any], expected: ToolChoice | None
) -> None:
    assert choice([tool("A"), tool("B")], **fields) == expected


def test_without_tools_calls_are_text() -> None:
    assert choice([]) is None


def test_only_what_may_be_called_says_strict_not_what_is_rendered() -> None:
    """Also of a tool that is loaded later."""
    plain = [tool("A"), tool("B", defer_loading=True)]
    strict = [tool("A", strict=True), tool("B", strict=True, defer_loading=True)]
    assert rendered(read(tools=strict)) == rendered(read(tools=plain))
    _, found = convert({"model": "m", "messages": [user("hi")], "tools": [*strict, tool("C")]})
    assert [t["function"].get("strict") for t in found] == [True, True, None]


ENABLED = {"type": "enabled", "budget_tokens": 2048}


@pytest.mark.parametrize(
    ("effort", "thinking", "budget"),
    [
        ("low", None, 1024),
        ("medium", {"type": "adaptive"}, 8192),
        ("high", {"type": "adaptive"}, None),
        ("max", None, None),
        ("low", ENABLED, 2048),
        ("low", {"type": "enabled"}, 1024),
        ("low", {"type": "disabled"}, 0),
        ("low", {"type": "between_tools"}, None),
        (None, ENABLED, 2048),
        (None, None, None),
    ],
)
def test_an_effort_is_a_budget_unless_the_template_takes_it(
    effort: str | None, thinking: Any, budget: int | None
) -> None:
    """High is the API's default; a stated budget comes before any effort."""
    fields = {"model": "m", "max_tokens": 9, "messages": [user("hi")], "thinking": thinking}
    asked = msgspec.convert(fields | {"output_config": {"effort": effort}}, wire.Request)
    assert read_thinking_budget(asked, takes_effort=False) == budget
    stated = budget if thinking in (ENABLED, {"type": "disabled"}) else None
    assert read_thinking_budget(asked, takes_effort=True) == stated


@pytest.mark.parametrize(("effort", "argument"), [("low", "low"), ("max", "high"), (None, None)])
def test_an_effort_is_an_argument_of_the_template(effort: str | None, argument: str | None) -> None:
    args = read(output_config={"effort": effort}).template_args
    assert args == ({} if argument is None else {"reasoning_effort": argument})


LOW: dict[str, Any] = {"role": "system", "content": [], "output_config": {"effort": "low"}}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("a"), LOW], "low"),
        ([user("a"), {"role": "system", "content": "note"}, LOW], "low"),
        ([user("a"), assistant("b"), LOW, user("c")], "low"),
        ([user("a"), assistant(use()), LOW, user(result())], "max"),
        ([user("a"), assistant(use()), user(result()), LOW], "max"),
        ([user("a"), assistant(use()), user(result()), LOW, user("c")], "low"),
        ([user("a"), assistant(use()), LOW, user(result(), "c")], "low"),
        ([user("a"), LOW, assistant("b"), user("c")], "low"),
        ([user("a"), LOW, LOW | {"output_config": {"effort": "medium"}}, user("c")], "medium"),
        ([user("a"), LOW, LOW | {"output_config": {}}, user("c")], "low"),
    ],
)
def test_a_system_message_changes_the_effort_from_the_users_next_input_on(
    messages: list[dict[str, Any]], expected: str
) -> None:
    """Results of tools are none. The message itself is not rendered."""
    asked = body(messages=messages, output_config={"effort": "max"})
    assert read_effort(asked) == expected
    plain = [m for m in messages if not m.get("output_config") and m["content"]]
    assert read(*messages).messages == read(*plain).messages
