"""JSON becomes a typed value or a BadRequest that names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.errors import BadRequest
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_types import ChatRequest


class Item(msgspec.Struct):
    count: int


class Body(msgspec.Struct):
    items: list[Item] = []
    extra: Any = None


def test_a_wrong_type_names_its_field() -> None:
    with pytest.raises(BadRequest, match="Expected `int`, got `str`") as caught:
        decode(Body, b'{"items": [{"count": 1}, {"count": "2"}]}')
    assert caught.value.param == "items[1].count"


@pytest.mark.parametrize("value", [b"{}", b"[]", b"1,1,1,1", b'"[[", ""'])
def test_a_body_of_too_many_values_is_refused_before_it_is_read(value: bytes) -> None:
    fewer, more = (b'{"extra": [%b]}' % b", ".join([value] * n) for n in (400_000, 999_999))
    assert len(decode(Body, fewer).extra) >= 400_000
    with pytest.raises(BadRequest, match="more than 4,000,000 values"):
        decode(Body, more)


@pytest.mark.parametrize(
    ("path", "body", "values"),
    [
        ("messages[1].role", {"messages": [{"role": "user"}, {"role": "bot"}]}, "'assistant', "),
        (
            "reasoning.effort",
            {"messages": [{"role": "user"}], "reasoning": {"effort": "x"}},
            "'high', 'low', ",
        ),
        (
            "tool_choice.allowed_tools.mode",
            {
                "messages": [{"role": "user"}],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}},
            },
            "'auto', 'required'.",
        ),
    ],
)
def test_a_word_that_a_field_does_not_know_is_answered_with_those_it_knows(
    path: str, body: dict[str, Any], values: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(ChatRequest, msgspec.json.encode(body))
    assert f"(at `{path}`): use one of {values}" in str(caught.value)
    assert caught.value.param == path


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"items": [', "not valid JSON"),
        (b'{"extra": "\xff"}', "not UTF-8"),
        (b'{"extra": ' + b"[" * 100_000, "nested"),
        (b'{"extra": ' + b"[" * 101 + b"]" * 101 + b"}", "nested"),
        (b'{"extra": 1e999}', "out of range"),
        (b"[]", "Expected `object`"),
    ],
)
def test_what_is_no_such_value_is_a_bad_request(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        decode(Body, body)


def test_nesting_is_fine_up_to_the_limit() -> None:
    assert decode(Body, b'{"extra": ' + b"[" * 98 + b"]" * 98 + b"}").extra


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"a\ud83db", "a\ufffdb"),
        (rb"\ude00\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d \uD83D", "\\ud83d \ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\"\ud83d\"", '"\ufffd"'),
    ],
)
def test_half_a_surrogate_pair_becomes_the_replacement_character(escaped: bytes, text: str) -> None:
    assert decode(Body, b'{"extra": "' + escaped + b'"}').extra == text


@given(st.text())
def test_every_text_survives(text: str) -> None:
    assert decode(Body, msgspec.json.encode({"extra": text})).extra == text
