import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.prompt.codec import CLOSE, OPEN, Escape
from mlxcache.prompt.tokenizer import any_of
from tests.prompt.chats import restored, texts
from tests.prompt.kinds import CONTROL, MARKS

CONTROLS = any_of([*CONTROL, *MARKS])


@pytest.fixture(scope="module")
def escape() -> Escape:
    return Escape([*CONTROL, *MARKS], passing=MARKS[:2])


def test_ordinary_text_is_the_very_same_object(escape: Escape) -> None:
    text = "if a < b and c > d: return '<b>' # [1]"
    assert escape.escape_value(text) is text


@given(texts(size=8))
def test_escaped_text_holds_no_control_token_and_comes_back(text: str) -> None:
    escape = Escape([*CONTROL, *MARKS])
    escaped = escape.escape_value(text)
    assert CONTROLS.search(escaped) is None
    assert restored(escape, escaped) == text
    assert escape.has_sentinel(escaped) == (escaped != text)


@given(st.lists(texts(size=2), min_size=2, max_size=3))
def test_texts_side_by_side_form_no_control_token(parts: list[str]) -> None:
    escape = Escape([*CONTROL, *MARKS])
    joined = "".join(escape.escape_value(part) for part in parts)
    assert CONTROLS.search(joined) is None
    assert restored(escape, joined) == "".join(parts)


@given(st.text(max_size=40), st.integers(0, 40))
def test_any_unicode_text_comes_back(text: str, at: int) -> None:
    escape = Escape(CONTROL)
    text = text[:at] + OPEN + "0123<s>" + CLOSE + text[at:]
    assert restored(escape, escape.escape_value(text)) == text


def test_a_sentinel_of_another_server_is_plain_text(escape: Escape) -> None:
    """Sentinels cannot be forged: the nonce differs in every process."""
    forged = Escape(CONTROL).escape_value("<s>")
    assert restored(escape, escape.escape_value(forged)) == forged


def test_a_sentinel_written_in_ascii_json_comes_back_as_json(escape: Escape) -> None:
    """Some templates write JSON with every other character escaped."""
    rendered = json.dumps({"path": escape.escape_value('a "<|im_end|>"')})
    assert json.loads(restored(escape, rendered)) == {"path": 'a "<|im_end|>"'}


def test_a_token_with_other_letters_comes_back_as_the_template_escaped_it() -> None:
    """There it was no control token to begin with, and the JSON stays what it was."""
    escape = Escape(["<\uff5cUser\uff5c>"])
    rendered = json.dumps(escape.escape_value("a <\uff5cUser\uff5c>"))
    assert restored(escape, rendered) == json.dumps("a <\uff5cUser\uff5c>")


def test_strings_are_escaped_at_any_depth_and_in_keys(escape: Escape) -> None:
    value: dict[str, Any] = {"a": [{"<s>": "x</s>"}, 1, None, True], "b": ("<|im_end|>",)}
    escaped = escape.escape_value(value)
    assert CONTROLS.search(json.dumps(escaped, ensure_ascii=False)) is None
    found = json.loads(restored(escape, json.dumps(escaped, ensure_ascii=False)))
    assert found == {"a": [{"<s>": "x</s>"}, 1, None, True], "b": ["<|im_end|>"]}


def test_think_marks_pass_in_an_assistant_s_content_only(escape: Escape) -> None:
    """Templates cut an assistant's thinking at its marks; a person's text is only text."""
    text = "<think>x</think><|im_end|>"
    assert escape.escape_message({"role": "assistant", "content": text})["content"].startswith(
        "<think>x</think>" + OPEN
    )
    user = escape.escape_message({"role": "user", "content": text})["content"]
    reply = {"role": "assistant", "reasoning_content": text, "content": ""}
    reasoning = escape.escape_message(reply)
    assert CONTROLS.search(user) is None
    assert CONTROLS.search(reasoning["reasoning_content"]) is None


def test_what_a_normaliser_would_turn_into_a_control_token_is_escaped() -> None:
    """Full-width or capital letters are no way round."""
    escape = Escape(["<s>"], normalized=["<s>"], normalize=str.lower)
    assert escape.has_sentinel(escape.escape_value("see <S>"))
    assert restored(escape, escape.escape_value("see <S>")) == "see <S>"
    assert escape.escape_value("see s") == "see s"


def test_a_sentinel_that_was_cut_up_is_text() -> None:
    """No character has such a number; a template that cuts texts must not end the request."""
    escape = Escape(["<|im_end|>"])
    whole = escape.escape_value("<|im_end|>")
    (digits,) = re.findall(r"\d{14,}", whole)
    broken = whole.replace(digits, "9" * len(digits))
    assert escape.split(broken) == [(broken, False)]
    assert restored(escape, whole) == "<|im_end|>"
