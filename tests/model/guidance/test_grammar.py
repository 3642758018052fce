"""Formats of replies: what is compiled and refused, and that nothing invalid can be written."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxcache.errors import BadRequest
from mlxcache.model import json_schema
from mlxcache.model.guidance.grammar import grammar_text
from mlxcache.model.json_schema import Node, Schema
from mlxcache.model.tool_syntax.writing import Unwritable, alternatives
from mlxcache.types import Job, OutputFormat, Prompt, token_ids
from tests.model.guided import VOCABULARIES, Writer, bare
from tests.model.schemas import schemas, values

SCHEMAS = int(os.environ.get("MLXCACHE_SCHEMAS", "8"))
"""Schemas of the property test; `MLXCACHE_SCHEMAS=500` runs it whole."""

Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


@lru_cache
def wrapped(vocabulary: str, special: tuple[str, ...] = ()) -> tuple[TokenizerWrapper, Writer]:
    tokenizer = bare(vocabulary, special)
    return TokenizerWrapper(tokenizer), Writer(tokenizer)


def compiled(kind: Kind, value: str = "", vocabulary: str = "bytes") -> str:
    job = Job("x", Prompt(token_ids([1])), format=OutputFormat(kind, value))
    text = grammar_text(job, wrapped(vocabulary)[0])
    assert text is not None
    return text


def accepts(grammar: str, text: str, vocabulary: str = "bytes") -> bool:
    return wrapped(vocabulary)[1].accepts(grammar, text)


def refused(schema: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        compiled("json_schema", json.dumps(schema))
    assert caught.value.param == "response_format"
    return caught.value


def test_a_job_without_format_is_free() -> None:
    assert grammar_text(Job("x", Prompt(token_ids([1]))), wrapped("bytes")[0]) is None


COUNTS: Counter[str] = Counter()


@settings(
    max_examples=SCHEMAS * 5 // 4,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_complete_reply_satisfies_its_schema(schema: dict[str, Any], seed: int) -> None:
    """Random tokens of two vocabularies; whole, also of one with 120,000 tokens."""
    try:
        grammar = compiled("json_schema", json.dumps(schema))
    except BadRequest:
        COUNTS["refused"] += 1
        return
    COUNTS["schemas"] += 1
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(exact, format_checker=checker)
    for vocabulary in VOCABULARIES if SCHEMAS > 100 else VOCABULARIES[:2]:  # the third is slow
        writer = wrapped(vocabulary)[1]
        ids = writer.write(grammar, seed)
        COUNTS["replies"] += 1
        if ids is not None:
            COUNTS["complete"] += 1
            text = writer.text(ids)
            validator.validate(json.loads(text, parse_float=Decimal))


@settings(max_examples=SCHEMAS * 3, derandomize=True, database=None, deadline=None)
@given(data=st.data())
def test_values_that_satisfy_a_schema_can_be_written(data: st.DataObject) -> None:
    """Drawn by hypothesis-jsonschema; grammars would else be valid that allow too little."""
    schema = data.draw(values())
    value = data.draw(from_schema(schema))
    text = json.dumps(value, ensure_ascii=False)
    assume(not re.search(r"\\u|\x7f|e[+-]\d", text))  # control characters, and tiny numbers
    assert accepts(compiled("json_schema", json.dumps(schema)), text), (schema, text)


def test_most_random_replies_are_complete() -> None:
    """The property above would else say little; the figures are printed with -s."""
    print(dict(COUNTS))
    assert COUNTS["schemas"] > COUNTS["refused"]
    assert COUNTS["complete"] > 0.7 * COUNTS["replies"]


def test_white_space_is_one_blank_or_one_indented_line() -> None:
    grammar = compiled("json_schema", '{"type": "array", "items": {"type": "integer"}}')
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]"):
        assert accepts(grammar, text)
    for text in ("[1,  2]", "[\n\n1]", " [1]", "[1]\n"):
        assert not accepts(grammar, text)


def test_choices_expressions_and_grammars() -> None:
    choice = compiled("choice", json.dumps(["a", "ab", 'say "x"\n']))
    assert [accepts(choice, text) for text in ("a", "ab", 'say "x"\n', "b")] == [True] * 3 + [False]
    regex = compiled("regex", r"^\d{3}/[a-c]\/$")
    assert accepts(regex, "123/b/")
    assert not accepts(regex, "12/b/")
    lark = compiled("grammar", 'start: "a" B\nB: /[0-9]+/')
    gbnf = compiled("grammar", 'root ::= "a" b\nb ::= [0-9]+\n')
    for grammar in (lark, gbnf):
        assert accepts(grammar, "a42")
        assert not accepts(grammar, "42")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("regex", "(a"), ("regex", "(?=a)b")),
        *(("grammar", "start: b"), ("grammar", "root ::= ("), ("grammar", "root ::= missing")),
        *(("grammar", 'a ::= "no root"'), ("grammar", "root ::= " + 3000 * "(")),
    ],
)
def test_an_expression_that_is_wrong_is_refused(kind: Kind, value: str) -> None:
    with pytest.raises(BadRequest, match=r"invalid (regular expression|grammar)") as caught:
        compiled(kind, value)
    assert caught.value.param == "response_format"
    assert "start: T" not in str(caught.value)


@pytest.mark.parametrize("choices", ["[]", '[1, "a"]'])
def test_choices_are_strings(choices: str) -> None:
    with pytest.raises(BadRequest, match="list of strings"):
        compiled("choice", choices)


UNENFORCEABLE = {
    "not": {"type": "null"},
    "if": {"type": "null"},
    "uniqueItems": True,
    "contains": {},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "propertyNames": {"maxLength": 3},
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
}


@pytest.mark.parametrize("keyword", UNENFORCEABLE)
def test_a_keyword_that_cannot_be_kept_is_refused_by_name_and_place(keyword: str) -> None:
    part = {keyword: UNENFORCEABLE[keyword]} | ({"then": {}} if keyword == "if" else {})
    error = refused({"type": "object", "properties": {"a/b": {"anyOf": [{}, part]}}})
    assert f"`{keyword}`" in str(error)
    assert f"/properties/a~1b/anyOf/1/{keyword}" in str(error)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"a{i}": {"type": "integer", "multipleOf": 99_000} for i in range(400)}},
        {"type": "number", "multipleOf": 12345.678},
        {"type": "integer", "multipleOf": 4999, "anyOf": [{"multipleOf": 5003}]},
    ],
)
def test_divisors_that_take_minutes_to_compile_are_refused(schema: dict[str, Any]) -> None:
    assert "multipleOf" in str(refused(schema))


def test_usual_divisors_are_compiled() -> None:
    several = {f"a{i}": {"multipleOf": value} for i, value in enumerate((3600, 1024, 0.01, 1e-6))}
    json_schema.check({"type": "object", "properties": several}, param="x")
    json_schema.check({"allOf": [{"multipleOf": 0.5}, {"multipleOf": 100}]}, param="x")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "must be a JSON object"),
        ({"type": "strin"}, 'unknown type "strin".* at /type'),
        ({"properties": []}, "expected an object of schemas.* at /properties"),
        ({"anyOf": {}}, "expected a list of schemas.* at /anyOf"),
        ({"items": 3}, "expected a schema, got 3 at /items"),
        ({"type": "string", "minLength": -1}, "expected a count, got -1 at /minLength"),
        ({"multipleOf": 1000003}, "at most 100000, got 1000003 at /multipleOf"),
        ({"required": "a"}, "expected a list of names.* at /required"),
        ({"$ref": "https://example.com/x"}, "not local.* at /\\$ref"),
        ({"$ref": "#/$defs/gone"}, "cannot be resolved.* at /\\$ref"),
        ({"type": "string", "format": "iri"}, '`format` "iri".* at /format'),
        (
            {"items": {"type": "string", "pattern": "(?=a)"}},
            "`pattern`.*look-around.* at /items/pattern",
        ),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "Length.*greater than maxLength"),
        ({"type": "string", "enum": [1]}, "`enum`.*at /enum"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no finite value"),
        ({"$ref": "#"}, "no finite value"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value"),
        ({"enum": [2**53 + 1]}, "has no exact 64-bit float at /enum/0"),
        ({"const": -(10**400)}, r"expected a finite number, got -1000.*\.\.\. at /const"),
        ({"type": "number", "minimum": 10**400}, r"a finite number, got 1000.*\.\.\. at /minimum"),
        ({"type": "object", "minProperties": 2}, "`minProperties`.*names are free"),
        (
            {"oneOf": [{"type": "string"}, {"minLength": 3}]},
            "`oneOf`.*0 and 1 may both.* at /oneOf",
        ),
    ],
)
def test_a_schema_that_is_wrong_or_that_nothing_satisfies_is_refused(
    schema: Any, message: str
) -> None:
    assert re.search(message, str(refused(schema))), str(refused(schema))


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
@pytest.mark.parametrize("end", [{"type": "string"}, False])
def test_references_that_branch_at_every_step_are_followed_once(keyword: str, end: Any) -> None:
    """Followed each time, these 60 definitions would take 2^60 steps."""
    steps = [{"$ref": f"#/$defs/s{i}"} for i in range(1, 61)]
    defs: dict[str, Any] = {f"s{i}": {keyword: [step, step]} for i, step in enumerate(steps)}
    schema = {"$ref": "#/$defs/s0", "$defs": defs | {"s60": end}}
    if end is False:
        assert "no finite value" in str(refused(schema))
    else:
        assert accepts(compiled("json_schema", json.dumps(schema)), '"a"')


def test_alternatives_that_branch_at_every_step_are_not_all_read() -> None:
    """Each leads to nothing, so that there are never many alternatives at once."""
    step: Node = False
    for _ in range(40):
        step = {"anyOf": [step, step]}
    with pytest.raises(Unwritable):
        alternatives(Schema(True), step)


def test_alternatives_nested_in_alternatives_are_compared_once() -> None:
    """Compared each time, eight levels of ten alternatives would take 10^8 comparisons."""
    defs: dict[str, Any] = {
        f"s{i}": {"anyOf": [{"$ref": f"#/$defs/s{i + 1}"} for _ in range(10)]} for i in range(8)
    }
    options = [{"$ref": "#/$defs/s0"}, {"const": 2}]
    schema = {"oneOf": options, "$defs": defs | {"s8": {"const": 1}}}
    assert accepts(compiled("json_schema", json.dumps(schema)), "2")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"const":' + "[" * 900 + "]" * 900 + "}"),
        ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
)
def test_what_is_nested_too_deeply_is_refused(kind: Kind, value: str) -> None:
    with pytest.raises(BadRequest, match=r"recursion|nested too deeply"):
        compiled(kind, value)


def test_keywords_that_ask_for_nothing_are_taken() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"not": {}},
        "properties": {"a": {"type": "array", "uniqueItems": False, "x-order": 1}},
        "if": {"const": 1},
        "description": "of no effect",
    }
    grammar = compiled("json_schema", json.dumps(schema))
    assert accepts(grammar, '{"a": []}')
    assert not accepts(grammar, '{"b": []}')


def test_options_of_llguidance_in_a_schema_have_no_effect() -> None:
    schema = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
    assert "`uniqueItems`" in str(refused(schema))


def test_alternatives_that_exclude_each_other_may_stand_below_one_of() -> None:
    """As pydantic and zod write unions by a field."""
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": kinds}
    grammar = compiled("json_schema", json.dumps(schema))
    assert accepts(grammar, '{"kind": "dog"}')
    assert not accepts(grammar, '{"kind": "cow"}')


def test_no_escape_spells_a_named_property_in_another_way() -> None:
    """`{"\\u0061": "x"}` has the property `a`."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = compiled("json_schema", json.dumps(schema))
    assert accepts(grammar, '{"b": "x"}')
    assert not accepts(grammar, '{"\\u0061": "x"}')


def test_no_number_reads_to_one_beyond_an_exclusive_bound() -> None:
    """4.99999999999999999999 reads to 5.0."""
    grammar = compiled("json_schema", '{"type": "number", "exclusiveMaximum": 5, "minimum": 4}')
    assert accepts(grammar, "4.5")
    assert not accepts(grammar, "4.99999999999999999999")


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")


def test_in_gpt_oss_the_final_message_has_the_format() -> None:
    tokenizer, writer = wrapped("bytes", HARMONY)
    job = Job("x", Prompt(token_ids([1])), format=OutputFormat("json_object"))
    grammar = grammar_text(job, tokenizer)
    assert grammar is not None
    final = '<|channel|>final<|message|>{"a": 1}'
    for reply in (final, final.replace("final", "final <|constrain|>json")):
        assert writer.accepts(grammar, reply)
    for reply in (
        '{"a": 1}',
        "<|channel|>final<|message|>text",
        "<|channel|>analysis<|message|>{}",
    ):
        assert not writer.accepts(grammar, reply)


@pytest.mark.parametrize("job", [{"raw": True}, {"prompt": Prompt(token_ids([1]), continued=True)}])
def test_a_raw_text_and_the_rest_of_a_message_have_no_header(job: dict[str, Any]) -> None:
    tokenizer, writer = wrapped("bytes", HARMONY)
    given: dict[str, Any] = {"prompt": Prompt(token_ids([1]))} | job
    grammar = grammar_text(Job("x", format=OutputFormat("json_object"), **given), tokenizer)
    assert grammar is not None
    assert writer.accepts(grammar, '{"a": 1}')
    assert not writer.accepts(grammar, '<|channel|>final<|message|>{"a": 1}')
