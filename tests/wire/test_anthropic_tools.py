"""Tools in the head, and deferred tools that a reference loads."""

import pytest

from mlxcache.wire.anthropic_request import Toolbox
from mlxcache.wire.anthropic_types import Tool

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def tool(name: str, *, deferred: bool | None = None) -> Tool:
    return Tool(name, description=f"Does {name}.", input_schema=SCHEMA, defer_loading=deferred)


def test_tools_keep_their_order_and_their_schema() -> None:
    box = Toolbox([tool("B"), tool("A")])
    assert [f["function"]["name"] for f in box.head] == ["B", "A"]
    assert box.head[0] == {
        "type": "function",
        "function": {"name": "B", "description": "Does B.", "parameters": SCHEMA},
    }


def test_a_reference_to_a_tool_of_the_head_does_not_describe_it_twice() -> None:
    text = Toolbox([tool("A", deferred=False)]).describe_loaded("A")
    assert "A can be called" in text
    assert "Does A." not in text


def test_a_reference_to_an_unknown_tool_says_so() -> None:
    assert "not available" in Toolbox([]).describe_loaded("Gone")


def test_a_removed_tool_may_not_be_called_until_it_is_added_again() -> None:
    """Also if a choice forces a call; the head stays."""
    box = Toolbox([tool("A"), tool("B")])
    assert "A can no longer be called" in box.remove("A")
    assert [f["function"]["name"] for f in box.callable()] == ["B"]
    assert [f["function"]["name"] for f in box.head] == ["A", "B"]
    assert "A can be called" in box.describe_loaded("A")
    assert [f["function"]["name"] for f in box.callable()] == ["A", "B"]
    box.remove("B")
    box.define(tool("B"), "messages[0]")
    assert "B" in [f["function"]["name"] for f in box.callable()]


@pytest.mark.parametrize(
    ("type", "name", "field"),
    [
        ("bash_20250124", "bash", "restart"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "old_str"),
        ("text_editor_20250124", "str_replace_editor", "view_range"),
        ("memory_20250818", "memory", "old_path"),
    ],
)
def test_a_client_tool_without_a_schema_gets_its_documented_one(
    type: str, name: str, field: str
) -> None:
    (function,) = Toolbox([Tool(name, type=type)]).head
    assert function["function"]["name"] == name
    assert field in function["function"]["parameters"]["properties"]


def test_examples_of_the_input_are_part_of_the_description() -> None:
    examples = [{"path": "a"}, {"path": "é"}]
    plain = Tool("A", description="Does A.", input_schema=SCHEMA)
    bare = Tool("A", input_schema=SCHEMA, input_examples=examples)
    both = Tool("A", description="Does A.", input_schema=SCHEMA, input_examples=examples)
    found = [f["function"]["description"] for f in Toolbox([plain, bare, both]).head]
    listed = 'Examples of the input:\n{"path": "a"}\n{"path": "é"}'
    assert found == ["Does A.", listed, f"Does A.\n\n{listed}"]


def test_the_longest_view_of_a_file_is_described() -> None:
    editor = Tool("e", type="text_editor_20250728", max_characters=900)
    (function,) = Toolbox([editor]).head
    assert "at most 900 characters" in function["function"]["description"]


@pytest.mark.parametrize("callers", [None, [], ["direct"], ["code_execution_20260120", "direct"]])
def test_a_tool_that_the_model_may_call_itself_is_taken(callers: list[str] | None) -> None:
    assert Toolbox([Tool("A", input_schema=SCHEMA, allowed_callers=callers)]).head
