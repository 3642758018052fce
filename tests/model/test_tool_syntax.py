"""Syntaxes of tool calls: where values end, their types, and where a block ends."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest

from mlxcache.model.output import OutputParser
from mlxcache.model.tool_syntax import families
from mlxcache.model.tool_syntax.arguments import Tool, Tools
from mlxcache.model.tool_syntax.reading import Call, Malformed
from mlxcache.types import FinishReason, Piece, Text, ToolCall
from tests.model.test_output import run as parsed
from tests.model.tool_families import FAMILIES, Pieced, qwen3_coder


def tool(properties: Mapping[str, Any], *, name: str = "write", **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


END = "\n</parameter>\n</function>\n</tool_call>"
STRING = {"type": "string"}
WRITE = tool({"path": STRING, "content": STRING}, required=["path", "content"])
EDIT = tool({"old": STRING, "new": STRING}, name="edit", required=["old", "new"])


def run(text: str, *tools: Mapping[str, Any], reason: FinishReason = "stop") -> list[Piece]:
    family = FAMILIES["qwen3_coder"]
    tokenizer = Pieced(family, single=True)
    ids = tokenizer.tokens(tokenizer.cut(text, range(len(text))))
    return parsed(tokenizer, ids, reason, tools=tools or (WRITE, EDIT))[0]


def read(family: str, text: str) -> list[Call]:
    return families.FAMILIES[family].reader.read(text, Tools([WRITE]))


def calls(pieces: list[Piece]) -> list[tuple[str, Any]]:
    return [(p.name, json.loads(p.arguments)) for p in pieces if isinstance(p, ToolCall)]


def said(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces if isinstance(p, Text))


def written(content: str) -> str:
    return qwen3_coder([("write", {"path": "a", "content": content})])


@pytest.mark.parametrize(
    "content",
    [
        "ends with </parameter> here.",
        "\n  two blanks  \n\n",
        "</parameter>\n</function>\n</tool_call>",
        "a\n</parameter>\n</function>\n</tool_call>\nb",
        f"<tool_call>\n<function=write>\n<parameter=content>\nx{END}",
        "</parameter>\n<parameter=path>\nx",
        "null",
        "[1, 2",
    ],
)
def test_a_value_ends_where_the_block_can_be_read(content: str) -> None:
    assert calls(run(written(content))) == [("write", {"path": "a", "content": content})]


def test_a_parameter_that_begins_twice_is_text_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two readings remain, and a wrong one would change a file."""
    block = qwen3_coder([("edit", {"old": "a\n</parameter>\n<parameter=new>\nb", "new": "c"})])
    with caplog.at_level(logging.WARNING):
        pieces = run(block)
    assert (calls(pieces), said(pieces)) == ([], block)
    assert "returned as text" in caplog.text
    assert "two ways" in caplog.text


def test_of_two_readings_the_one_that_fits_the_schema_counts() -> None:
    """`new` must be one of the values listed, and the example in `old` gives another."""
    listed = tool({"old": STRING, "new": {"enum": ["c", "d"]}}, name="edit")
    arguments = {"old": "a\n</parameter>\n<parameter=new>\nb", "new": "c"}
    assert calls(run(qwen3_coder([("edit", arguments)]), listed)) == [("edit", arguments)]


def test_a_quoted_example_of_the_same_tool_is_part_of_the_value() -> None:
    example = "<parameter=old>\n1\n</parameter>\n<parameter=new>\n2\n</parameter>"
    arguments = {"old": f"see\n{example}", "new": "c"}
    assert calls(run(qwen3_coder([("edit", arguments)]))) == [("edit", arguments)]


def test_a_parameter_that_the_model_made_up_is_passed_on() -> None:
    """The client tells the model; where the schema forbids others the text is the value's own."""
    arguments = {"path": "a", "content": "b", "reason": "c"}
    assert calls(run(qwen3_coder([("write", arguments)]))) == [("write", arguments)]
    closed = tool({"path": STRING, "content": STRING}, additionalProperties=False)
    whole = {"path": "a", "content": "b\n</parameter>\n<parameter=reason>\nc"}
    assert calls(run(qwen3_coder([("write", arguments)]), closed)) == [("write", whole)]


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        (STRING, "17", "17"),
        (STRING, '{"a": 1}', '{"a": 1}'),
        ({"type": "integer"}, "17", 17),
        ({"type": "integer"}, "2.0", 2),
        ({"type": "integer"}, "many", "many"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nil", "nil"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [STRING, {"type": "integer"}]}, "17", 17),
        ({"anyOf": [STRING, {"type": "integer"}]}, "17a", "17a"),
        ({"anyOf": [STRING, {"type": "integer"}]}, '"17"', '"17"'),
        ({"$ref": "#/$defs/size"}, "17", 17),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"allOf": [{"type": ["string", "integer"]}, STRING]}, "17", "17"),
        ({"type": "object"}, "{'a': 'it\\'s', 'b': [None, (1,)]}", {"a": "it's", "b": [None, [1]]}),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
        ({}, "17", 17),
        ({}, "seventeen", "seventeen"),
    ],
)
def test_types_follow_the_schema(schema: Any, raw: str, value: Any) -> None:
    defs: dict[str, Any] = {"$defs": {"size": {"type": "integer"}}}
    found, _ = Tool(tool({"x": schema}, **defs)["function"]).parse("x", raw)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("digits", ["1.10", "1e400", "9007199254740993", "9" * 5000, "-0.0", "1E5"])
def test_numbers_keep_their_digits(digits: str) -> None:
    number = tool({"n": {"type": "number"}}, name="count")
    nested = tool({"n": {"type": "array"}}, name="count")
    for definition, raw in ((number, digits), (nested, f'[{digits}, "é"]')):
        text = f"<tool_call>\n<function=count>\n<parameter=n>\n{raw}{END}"
        (found,) = run(text, definition)
        assert isinstance(found, ToolCall)
        assert found.arguments == f'{{"n": {raw}}}'


def test_a_key_twice_is_no_silent_loss() -> None:
    """JSON parsers drop the first."""
    block = '{"name": "write", "arguments": {"path": "a", "path": "b"}}'
    with pytest.raises(ValueError, match="twice"):
        read("json_tools", block)


def test_calls_in_json_are_read_in_every_family_of_tags() -> None:
    body = '{"name": "write", "arguments": {"path": "</tool_call>"}}'
    expected = [("write", {"path": "</tool_call>"})]
    assert calls(run(f"<tool_call>\n{body}\n</tool_call>")) == expected
    assert read("glm47", 'write\n{"path": "a"}') == [{"name": "write", "arguments": {"path": "a"}}]
    assert read("glm47", "write") == [{"name": "write", "arguments": {}}]
    with pytest.raises(Malformed):
        read("glm47", "prose")
    xtml = (
        '<|open|>call tool="write" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"path": "<|close|>json<|sep|>"}<|close|>json<|sep|><|close|>call<|sep|>'
    )
    assert read("kimi_k3", xtml) == [
        {"name": "write", "arguments": {"path": "<|close|>json<|sep|>"}}
    ]


def test_text_after_a_call_does_not_lose_the_call() -> None:
    one = written("x")
    for more in ("\n<tool_response>ok</tool_response>\nDone.", f"\nThen:\n{written('y')}"):
        assert calls(run(one + more)) == [("write", {"path": "a", "content": "x"})]


def test_a_long_text_after_a_call_ends_the_reply() -> None:
    text = written("x") + " la" * 4_000
    family = FAMILIES["qwen3_coder"]
    tokenizer = Pieced(family, single=True)
    parser = OutputParser(tokenizer, tools=(WRITE,))
    pieces: list[Piece] = []
    for token in tokenizer.tokens(tokenizer.cut(text, range(0, len(text), 3))):
        pieces += parser.feed(token)
        if parser.done:
            break
    assert parser.done == "tool_calls"
    assert calls(pieces) == [("write", {"path": "a", "content": "x"})]


def test_a_call_followed_by_another_is_sent_at_once() -> None:
    text = f"{written('x')}\n<tool_call>\n<func"
    family = FAMILIES["qwen3_coder"]
    tokenizer = Pieced(family, single=True)
    parser = OutputParser(tokenizer, tools=(WRITE,))
    ids = tokenizer.tokens(tokenizer.cut(text, ()))
    assert len(calls([p for token in ids for p in parser.feed(token)])) == 1


def test_a_reply_cut_off_in_an_argument_is_text() -> None:
    block = written(f"x{END}\nand more")
    cut = block[: block.index("more") + 2]
    pieces = run(cut, reason="length")
    assert (calls(pieces), said(pieces)) == ([], cut)
    assert calls(run(written("x"), reason="length")) == [("write", {"path": "a", "content": "x"})]


def test_a_call_after_a_malformed_one_is_read() -> None:
    broken = "<tool_call>\n<function=write>\n<parameter=path>\na</tool_call>"
    pieces = run(f"{broken}\nSorry.\n{written('x')}")
    assert said(pieces) == f"{broken}\nSorry."
    assert calls(pieces) == [("write", {"path": "a", "content": "x"})]


def test_many_blocks_that_are_no_calls_end_in_time() -> None:
    broken = "<tool_call>\n<function=write>\n<parameter=path>\na</tool_call>\n"
    pieces = run(broken * 400)
    assert (calls(pieces), said(pieces)) == ([], broken * 400)


def test_a_call_with_a_damaged_header_is_not_lost() -> None:
    """gpt-oss's header has no end here."""
    family = FAMILIES["harmony"]
    text = '<|channel|>commentary to=functions.write <|constrain|>json{"path": "a"}'
    parser = OutputParser(tokenizer := Pieced(family, single=True), tools=(WRITE,))
    pieces = [p for t in tokenizer.tokens(tokenizer.cut(text, ())) for p in parser.feed(t)]
    assert said([*pieces, *parser.finish("stop")]) == text


def test_a_parser_that_is_not_known_keeps_its_own_reading() -> None:
    """A syntax that a newer mlx-lm brings."""
    family = FAMILIES["json_tools"]
    tokenizer = Pieced(family, single=True)
    tokenizer.tool_parser = lambda text, tools: {"name": tools[0]["function"]["name"] + text}
    parser = OutputParser(tokenizer, tools=(WRITE,))
    ids = tokenizer.tokens(tokenizer.cut("<tool_call>r</tool_call>", ()))
    assert calls([p for token in ids for p in parser.feed(token)]) == [("writer", {})]


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_references_that_branch_take_no_exponential_time(word: str) -> None:
    """2 ** 30 paths lead through this schema; without a bound they would hold every request."""
    steps: dict[str, Any] = {
        f"s{i}": {word: [{"$ref": f"#/$defs/s{i + 1}"}] * 2} for i in range(30)
    }
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/s0"}, "b": {"type": "integer"}},
        "$defs": steps | {"s30": {"type": "integer"}},
    }
    function = {"name": "w", "parameters": schema}
    tool = Tools([{"type": "function", "function": function}])["w"]
    began = time.perf_counter()
    assert tool.parse("a", "12")[0] == 12
    tool.fits("a", ["x"] * 10)
    assert time.perf_counter() - began < 5
    assert tool.parse("b", "7")[0] == 7
