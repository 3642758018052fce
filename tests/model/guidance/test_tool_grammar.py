"""Forced tool calls, in every family's syntax: random tokens write valid calls, and only those."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.model.guidance.grammar import grammar_text, is_constrained
from mlxcache.types import Job, OutputFormat, Piece, Prompt, ToolCall, ToolChoice, token_ids
from tests.model.guided import VOCABULARIES, Writer, bare, detokenizer_of
from tests.model.schemas import DEFS, FORMATS, PATTERNS
from tests.model.test_output import FAMILIES as WELL_FORMED
from tests.model.test_output import run

TOOLSETS = int(os.environ.get("MLXCACHE_SCHEMAS", "0")) // 5
"""Sets of random tools for each family; `MLXCACHE_SCHEMAS=500` makes it 100, else it is 2."""

MARKERS: dict[str, tuple[str, ...]] = {
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm47": (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "json_tools": ("<tool_call>", "</tool_call>"),
    "kimi_k2": tuple(
        f"<|tool_call{part}|>"
        for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "laguna": ("<tool_call>", "</tool_call>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "minicpm5": (),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "muse_spark": ("<|message|>", "<|eom|>", "<|start|>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
    "generic": (),
}
"""Control tokens of each family's calls."""


@lru_cache
def tokenizer_of(
    family: str, vocabulary: str = "bytes", *, spelled: bool = False
) -> tuple[TokenizerWrapper, Writer]:
    """A family's tokenizer; `spelled`: it has no tokens for the markers."""
    options: dict[str, Any] = {}
    if family not in ("harmony", "generic"):
        module = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
        options["tool_parser"] = module.parse_tool_call
        options["tool_call_start"] = module.tool_call_start
        options["tool_call_end"] = module.tool_call_end
    if family == "muse_spark":
        options["response_format"] = importlib.import_module(
            "mlx_lm.chat_templates.muse_spark"
        ).RESPONSE_FORMAT
    tokenizer = bare(vocabulary, () if spelled else MARKERS[family])
    wrapped = TokenizerWrapper(tokenizer, detokenizer_of(vocabulary), **options)
    return wrapped, Writer(tokenizer)


Tool = dict[str, Any]


def tool(name: str, schema: Any, *, strict: bool | None = None) -> Tool:
    function = {"name": name, "parameters": schema}
    return {
        "type": "function",
        "function": function | ({} if strict is None else {"strict": strict}),
    }


def job_of(family: str, tools: Sequence[Tool], **options: Any) -> Job:
    choice = options.pop("tool_choice", ToolChoice(required=True))
    prompt = Prompt(token_ids([1]), generic_tools=family == "generic")
    return Job("x", prompt, tools=tuple(tools), tool_choice=choice, **options)


def compiled(family: str, tools: Sequence[Tool], *, spelled: bool = False, **options: Any) -> str:
    job = job_of(family, tools, **options)
    text = grammar_text(job, tokenizer_of(family, spelled=spelled)[0])
    assert text is not None
    return text


def read(
    family: str, ids: Sequence[int], tools: Sequence[Tool], wrapped: TokenizerWrapper, **how: Any
) -> list[Piece]:
    return run(wrapped, ids, tools=tools, generic_tools=family == "generic", **how)[0]


WORDS = ("city", "days", "path", "text", "where", "limit")


def _value(strings: bool = True) -> st.SearchStrategy[Any]:
    bound = st.integers(-9, 99)
    scalars = [
        st.just({"type": "integer"}),
        st.just({"type": "number"}),
        st.builds(
            lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, bound, bound
        ),
        st.builds(lambda low: {"type": "number", "minimum": low}, bound),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"enum": [1, True, None]}),
    ]
    texts = [
        st.just({"type": "string"}),
        st.builds(
            lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n},
            *[st.integers(0, 5)] * 2,
        ),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(FORMATS).map(lambda form: {"type": "string", "format": form}),
        st.just({"enum": ["red", "dark green", "12", "null"]}),
        st.just({"$ref": "#/$defs/word"}),
    ]
    return st.one_of(*scalars, *texts, *texts)


VALUES = st.recursive(
    _value(),
    lambda inner: st.one_of(
        inner.map(lambda one: {"type": "array", "items": one, "maxItems": 3}),
        inner.map(lambda one: {"anyOf": [one, {"type": "null"}]}),
        st.dictionaries(st.sampled_from(WORDS), inner, min_size=1, max_size=3).map(
            lambda named: {"type": "object", "properties": named, "additionalProperties": False}
        ),
        st.just({"$ref": "#/$defs/tree"}),
        st.just({"type": ["string", "null"]}),
        st.just({"type": ["string", "integer"]}),
    ),
    max_leaves=3,
)


@st.composite
def toolsets(draw: st.DrawFn) -> list[Tool]:
    names = draw(
        st.lists(
            st.sampled_from(["look", "look_up", "get", "a1"]), min_size=1, max_size=3, unique=True
        )
    )
    tools = []
    for name in names:
        named = draw(st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=4))
        required = [one for one in named if draw(st.booleans())]
        schema = {"type": "object", "properties": named, "required": required, **DEFS}
        if draw(st.booleans()):
            schema["additionalProperties"] = False
        tools.append(tool(name, schema))
    return tools


# --- what random tokens write ---------------------------------------------------------------------

VALUE_OF = {
    "glm47": r"<arg_key>(.*?)</arg_key>\n?<arg_value>(.*?)</arg_value>",
    "laguna": r"<arg_key>(.*?)</arg_key>\n?<arg_value>(.*?)</arg_value>",
    "longcat": r"<longcat_arg_key>(.*?)</longcat_arg_key>\n?<longcat_arg_value>(.*?)</longcat_arg",
    "minicpm5": r'<param name="(.*?)">(?:<!\[CDATA\[)?(.*?)(?:\]\]>)?</param>',
    "minimax_m2": r'<parameter name="(.*?)">(.*?)</parameter>',
    "muse_spark": r'<atem:parameter name="(.*?)">(.*?)</atem:parameter>',
    "qwen3_coder": r"<parameter=(.*?)>\n(.*?)\n</parameter>",
    "kimi_k3": r'key="(.*?)" type="\w+"<\|sep\|>(.*?)<\|close\|>argument',
}
ARGUMENTS_AFTER = {
    "generic": '"arguments": ',
    "json_tools": '"arguments": ',
    "harmony": "<|message|>",
    "kimi_k2": "<|tool_call_argument_begin|>",
    "mistral": "[ARGS]",
}
QUOTES = {"gemma4": r'<\|"\|>(.*?)<\|"\|>', "function_gemma": "<escape>(.*?)<escape>"}


def leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in leaves(one)]
    if isinstance(value, list):
        return [text for one in value for text in leaves(one)]
    return [value] if isinstance(value, str) else []


def check_equal(family: str, text: str, found: Sequence[dict[str, Any]]) -> None:
    """The arguments are those that were written, read in another way, which needs no care.

    No string that a grammar allows contains what ends it.
    """
    if pattern := VALUE_OF.get(family):
        written = re.findall(pattern, text, re.DOTALL)
        values = [(name, value) for call in found for name, value in call.items()]
        assert [name for name, _ in written] == [name for name, _ in values]
        for (_, raw), (_, value) in zip(written, values, strict=True):
            assert raw == value if isinstance(value, str) else json.loads(raw) == value
    elif start := ARGUMENTS_AFTER.get(family):
        start = start if start in text else '"arguments": '  # the older form of Mistral's
        parts = text.split(start)[1:]
        assert [json.JSONDecoder().raw_decode(part)[0] for part in parts] == list(found)
    elif quote := QUOTES.get(family):
        assert re.findall(quote, text, re.DOTALL) == leaves(list(found))
    else:
        inner = text[text.index("[") : text.rindex("]") + 1]
        names = dict.fromkeys(re.findall(r"(\w+)\(", inner), lambda **given: given)
        assert eval(inner, {"true": True, "false": False, "null": None, **names}) == found


COUNTS: Counter[str] = Counter()


def check_reply(
    family: str, vocabulary: str, tools: list[Tool], seed: int, *, spelled: bool, several: bool
) -> None:
    wrapped, writer = tokenizer_of(family, vocabulary, spelled=spelled)
    grammar = grammar_text(job_of(family, tools, parallel_tools=several), wrapped)
    assert grammar is not None
    ids = writer.write(grammar, seed)
    COUNTS["replies"] += 1
    if ids is None:
        return
    COUNTS["complete"] += 1
    text = writer.text(ids)
    pieces = read(family, ids, tools, wrapped, parallel_tools=several)
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert len(calls) == len(pieces), text
    assert len(calls) == 1 or (several and calls), text
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for call in calls:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validator = jsonschema.Draft202012Validator(schemas[call.name], format_checker=checker)
        assert not list(validator.iter_errors(json.loads(call.arguments))), (text, call.arguments)
    check_equal(family, text, [json.loads(call.arguments) for call in calls])


WITH_TOKENS_ALONE = ("harmony", "kimi_k3", "muse_spark")
"""Families whose format is known by the tokens in the vocabulary."""


@pytest.mark.parametrize("family", sorted(MARKERS))
def test_random_tokens_write_valid_calls(family: str) -> None:
    @settings(
        max_examples=TOOLSETS or 2,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(toolsets(), st.integers(0, 2**32), st.booleans(), st.booleans())
    def check(tools: list[Tool], seed: int, spelled: bool, several: bool) -> None:
        spelled = spelled and family not in WITH_TOKENS_ALONE
        for vocabulary in VOCABULARIES if TOOLSETS else ("bytes",):
            check_reply(family, vocabulary, tools, seed, spelled=spelled, several=several)

    check()


def test_most_random_calls_are_complete() -> None:
    """The property above would else say little; the figures are printed with -s."""
    print(dict(COUNTS))
    assert COUNTS["complete"] > 0.6 * COUNTS["replies"]


LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
GET: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY: dict[str, Any] = {"type": "object"}
TOOLS = (tool("look", LOOK), tool("get", GET))
WRITTEN = {
    **WELL_FORMED,
    "laguna": WELL_FORMED["glm47"],
    "pythonic": WELL_FORMED["pythonic"].replace("'", '"'),  # as JSON writes strings
    "generic": WELL_FORMED["json_tools"],
    "harmony": "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    '{"city": "Aix", "days": 2}',
    "muse_spark": f" to=look<|message|>{WELL_FORMED['muse_spark']}",
}


def accepts(family: str, grammar: str, text: str, *, spelled: bool = False) -> bool:
    return tokenizer_of(family, spelled=spelled)[1].accepts(grammar, text)


def as_written(family: str) -> str:
    """A call of `look`, with the line breaks that the grammar writes between tags."""
    text = WRITTEN[family].removesuffix("<|call|>")
    for before in (
        "<atem:invoke",
        "<atem:parameter name",
        "</atem:invoke>",
        "</atem:function_calls>",
    ):
        text = text.replace(before, f"\n{before}") if family == "muse_spark" else text
    return text.replace('name="look">\n\n', 'name="look">\n')


@pytest.mark.parametrize("family", sorted(MARKERS))
def test_calls_as_the_templates_write_them_are_allowed(family: str) -> None:
    grammar = compiled(family, TOOLS)
    text = as_written(family) + ("<|call|>" if family == "harmony" else "")
    assert accepts(family, grammar, text), text
    assert not accepts(family, grammar, text.replace("look", "lock"))
    assert not accepts(family, grammar, text.replace("days", "hours"))
    assert not accepts(family, grammar, "I look. " + text)
    assert not accepts(family, grammar, "")


@pytest.mark.parametrize(
    "family", ["qwen3_coder", "json_tools", "minimax_m2", "pythonic", "gemma4"]
)
def test_one_call_alone_where_several_are_not_wanted(family: str) -> None:
    text = as_written(family)
    twice = {
        "minimax_m2": re.sub(r"(<invoke.*</invoke>\n)", r"\1\1", text, flags=re.DOTALL),
        "pythonic": text.replace('look(city="Aix", days=2)', 'look(city="Aix"), get()'),
    }.get(family, text + text)
    assert accepts(family, compiled(family, TOOLS), twice)
    one = compiled(family, TOOLS, parallel_tools=False)
    assert accepts(family, one, text)
    assert not accepts(family, one, twice)


def test_only_the_named_tools_are_called() -> None:
    choice = ToolChoice(required=True, names=("get",))
    grammar = compiled("json_tools", TOOLS, tool_choice=choice)
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert accepts("json_tools", grammar, call % ("get", "{}"))
    assert not accepts("json_tools", grammar, call % ("look", '{"city": "Aix"}'))
    with pytest.raises(BadRequest, match="none of the tools") as caught:
        compiled("json_tools", TOOLS, tool_choice=ToolChoice(required=True, names=("fly",)))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["<tool_call>", "a</tool_call>b"])
def test_a_tool_named_like_a_marker_is_refused(name: str) -> None:
    """The model would write the marker, which ends or begins a call."""
    with pytest.raises(BadRequest, match="cannot be written in this model's calls"):
        compiled("json_tools", (tool(name, LOOK),))


QWEN = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
CITY = "<parameter=city>\nAix\n</parameter>\n"
SEVEN = "<parameter=days>\nseven\n</parameter>\n"


@pytest.mark.parametrize("spelled", [False, True])
def test_strict_tools_are_held_to_their_schemas_and_nothing_else_is(spelled: bool) -> None:
    tools = (tool("look", LOOK, strict=True), tool("get", LOOK))
    grammar = compiled("qwen3_coder", tools, tool_choice=ToolChoice(), spelled=spelled)

    def allowed(text: str) -> bool:
        return accepts("qwen3_coder", grammar, text, spelled=spelled)

    for text in ("", "Hello <tool", "I look.\n" + QWEN.format("look", CITY) + "\nand so on"):
        assert allowed(text), text
    assert allowed("Now: " + QWEN.format("get", SEVEN + CITY))
    assert not allowed(QWEN.format("look", CITY + SEVEN))
    assert not allowed(QWEN.format("look", ""))
    assert not allowed("Now: " + QWEN.format("fly", CITY))


@pytest.mark.parametrize("family", sorted(MARKERS))
def test_a_reply_with_strict_tools_may_be_text(family: str) -> None:
    tools = (tool("look", LOOK, strict=True), tool("any", ANY))
    grammar = compiled(family, tools, tool_choice=ToolChoice())
    text = "<|channel|>final<|message|>Hello" if family == "harmony" else "Hello"
    text = " to=user<|message|>Hello" if family == "muse_spark" else text
    assert accepts(family, grammar, text)
    call = as_written(family) + ("<|call|>" if family == "harmony" else "")
    assert accepts(family, grammar, call)
    assert not accepts(family, grammar, call.replace("city", "town"))


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
@pytest.mark.parametrize("family", sorted(MARKERS))
def test_references_that_branch_at_every_step_take_no_long_time(family: str, keyword: str) -> None:
    """Followed each time, these 40 definitions would take 2^40 steps."""
    steps = [{"$ref": f"#/$defs/s{i}"} for i in range(1, 41)]
    defs: dict[str, Any] = {f"s{i}": {keyword: [step, step]} for i, step in enumerate(steps)}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/s0"}},
        "required": ["a"],
        "$defs": defs | {"s40": {"type": "string"}},
    }
    with suppress(BadRequest):  # of a syntax that cannot express so many alternatives
        compiled(family, [tool("write", schema, strict=True)])


def test_what_is_constrained() -> None:
    assert not is_constrained(job_of("json_tools", TOOLS, tool_choice=ToolChoice()))
    assert is_constrained(job_of("json_tools", TOOLS, tool_choice=ToolChoice(names=("get",))))
    assert is_constrained(
        job_of("json_tools", [tool("x", ANY, strict=True)], tool_choice=ToolChoice())
    )


def test_a_format_beside_tools_is_that_of_the_text() -> None:
    form = OutputFormat("choice", '["yes", "no"]')
    grammar = compiled("json_tools", TOOLS, tool_choice=ToolChoice(), format=form)
    for text in ("yes", '<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>'):
        assert accepts("json_tools", grammar, text)
    assert not accepts("json_tools", grammar, "maybe")


@pytest.mark.parametrize("family", ["qwen3_coder", "gemma4", "json_tools", "kimi_k3"])
def test_a_tool_that_takes_any_arguments(family: str) -> None:
    call = as_written(family)
    assert accepts(family, compiled(family, [tool("look", ANY)]), call.replace("city", "town"))


@pytest.mark.parametrize(
    ("family", "schema", "message"),
    [
        (
            "json_tools",
            {"properties": {"a": {"not": {"type": "null"}}}},
            "`not`.*/properties/a/not",
        ),
        ("json_tools", {"type": "string"}, "expected an object of arguments"),
        ("qwen3_coder", {"patternProperties": {"^x": {}}}, "`patternProperties`.*call syntax"),
        ("qwen3_coder", {"properties": {"a b": {}}, "required": ["a b"]}, "`properties/a b`"),
        ("qwen3_coder", {"const": {"a": 1}}, "`const`.*call syntax"),
        (
            "gemma4",
            {"properties": {"a": {"type": "array", "prefixItems": [{}], "minItems": 2}}},
            "prefix",
        ),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused(family: str, schema: Any, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compiled(family, [tool("look", schema)])
    assert re.search(message, str(caught.value)), str(caught.value)
    assert '"look"' in str(caught.value)
    assert caught.value.param == "tools"


def test_listed_strings_with_markup_are_written_as_cdata() -> None:
    listed = {"properties": {"a": {"enum": ["<b>", "x & y"]}}, "required": ["a"]}
    call = '<function name="look"><param name="a">{}</param></function>'
    grammar = compiled("minicpm5", [tool("look", listed, strict=True)])
    assert accepts("minicpm5", grammar, call.format("<![CDATA[<b>]]>"))
    assert not accepts("minicpm5", grammar, call.format("<![CDATA[<i>]]>"))
    assert not accepts("minicpm5", grammar, call.format("<b>"))


def test_a_syntax_that_is_unknown_is_refused() -> None:
    tokenizer = TokenizerWrapper(bare("bytes"))
    with pytest.raises(Unsupported, match="syntax of this model's calls is not known"):
        grammar_text(job_of("json_tools", TOOLS), tokenizer)


def test_calls_without_arguments_may_follow_one_with() -> None:
    wrapped, _ = tokenizer_of("minimax_m2")
    empty = '<invoke name="get">\n</invoke>\n'
    text = as_written("minimax_m2").replace("</minimax", empty * 20 + "</minimax")
    ids = wrapped.encode(text, add_special_tokens=False)
    calls = read("minimax_m2", ids, TOOLS, wrapped)
    assert [piece.name for piece in calls if isinstance(piece, ToolCall)] == ["look"] + ["get"] * 20
