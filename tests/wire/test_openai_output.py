"""OpenAI bodies ask for a format and for tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxcache.types import OutputFormat, ToolChoice
from mlxcache.wire.chat_parts import ToolUse
from mlxcache.wire.openai_request import read_format, read_tool_use, to_chat
from mlxcache.wire.openai_types import ChatRequest, TextRequest

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", 1.5]}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["x",1.5]}}}'
NAMED_SCHEMA = {"name": "thing", "schema": SCHEMA}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [function("read"), function("write", strict=True), function("list", strict=False)]


def chat_body(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return msgspec.convert(body, ChatRequest)


def tool_use(**fields: Any) -> ToolUse:
    body = chat_body(**fields)
    return read_tool_use(body, to_chat(body).tools)


@pytest.mark.parametrize(
    ("fields", "expected", "path"),
    [
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object"), ""),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            OutputFormat("json_schema", SCHEMA_TEXT),
            ".schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}},
            OutputFormat("json_schema", SCHEMA_TEXT),
            ".json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "strict": False, "description": "A thing."},
                }
            },
            OutputFormat("json_schema", SCHEMA_TEXT),
            ".json_schema.schema",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            OutputFormat("json_schema", SCHEMA_TEXT),
            ".json",
        ),
        (
            {"structured_outputs": {"json": SCHEMA_TEXT}},
            OutputFormat("json_schema", SCHEMA_TEXT),
            ".json",
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, OutputFormat("regex", "[ab]+"), ".regex"),
        (
            {"structured_outputs": {"choice": ["é", "no"]}},
            OutputFormat("choice", '["é","no"]'),
            ".choice",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            OutputFormat("grammar", 'start: "a"'),
            ".grammar",
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": None}},
            OutputFormat("json_object"),
            ".json_object",
        ),
        ({"guided_json": SCHEMA}, OutputFormat("json_schema", SCHEMA_TEXT), ""),
        ({"guided_regex": "a?"}, OutputFormat("regex", "a?"), ""),
        ({"guided_choice": ["a"]}, OutputFormat("choice", '["a"]'), ""),
        ({"guided_grammar": 'start: "a"'}, OutputFormat("grammar", 'start: "a"'), ""),
        ({"json_schema": {}}, OutputFormat("json_schema", "{}"), ""),
        ({"grammar": 'start: "a"'}, OutputFormat("grammar", 'start: "a"'), ""),
    ],
)
def test_each_field_names_a_format_in_both_endpoints(
    fields: dict[str, Any], expected: OutputFormat, path: str
) -> None:
    """And the path in the body, for errors."""
    for body in (chat_body(**fields), msgspec.convert({"prompt": "Hi", **fields}, TextRequest)):
        found = read_format(body)
        assert found == expected
        assert found.param == next(iter(fields)) + path


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        {"grammar": "", "guided_regex": ""},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_a_field_that_asks_for_nothing_leaves_the_text_free(fields: dict[str, Any]) -> None:
    assert read_format(chat_body(**fields)) is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ("required", ToolChoice(required=True)),
        ("any", ToolChoice(required=True)),
        (function("read"), ToolChoice(required=True, names=("read",))),
        ({"type": "function", "name": "read"}, ToolChoice(required=True, names=("read",))),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [function("list"), function("read"), function("list")],
                },
            },
            ToolChoice(names=("list", "read")),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [function("list")]},
            },
            ToolChoice(required=True, names=("list",)),
        ),
    ],
)
def test_a_choice_says_which_tools_may_and_must_be_called(
    choice: Any, expected: ToolChoice
) -> None:
    assert tool_use(tools=TOOLS, tool_choice=choice).choice == expected


def test_a_named_function_is_called_once_and_others_as_often_as_the_client_allows() -> None:
    named = tool_use(tools=TOOLS, tool_choice=function("read"))
    assert (named.named, named.parallel) == (True, False)
    several = tool_use(tools=TOOLS, tool_choice="required")
    assert (several.named, several.parallel) == (False, True)
    one = tool_use(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert (one.named, one.parallel) == (False, False)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
def test_without_tools_or_with_none_chosen_calls_are_text(fields: dict[str, Any]) -> None:
    assert tool_use(**fields) == ToolUse()


def test_only_what_may_be_called_says_strict_not_what_is_rendered() -> None:
    body = chat_body(tools=TOOLS)
    rendered = to_chat(body).tools
    found = read_tool_use(body, rendered).tools
    assert found is not None
    assert ["strict" in tool["function"] for tool in rendered] == [False] * 3
    assert [tool["function"].get("strict") for tool in found] == [None, True, None]
    assert [tool["function"]["name"] for tool in found] == ["read", "write", "list"]
