"""What a client reads of a grammar that compiles to nothing, or to more than can be followed."""

from __future__ import annotations

import json

import pytest
from tokenizers.normalizers import NFC

from mlxcache.errors import BadRequest
from mlxcache.model.guidance.guide import GrammarGuide, Grammars
from tests.model.test_output import wrapped

TOKENIZER = wrapped(None, ())
GRAMMARS = Grammars(TOKENIZER, 600)


@pytest.mark.parametrize("grammar", ["start: start", "start: /[a&&b]/"])
def test_a_grammar_that_no_text_matches_is_refused_with_its_field(grammar: str) -> None:
    with pytest.raises(BadRequest, match="no text matches") as caught:
        GRAMMARS.guide(grammar, "structured_outputs.grammar")
    assert caught.value.param == "structured_outputs.grammar"


OPEN = {
    "anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(300)]
}
TOO_COMPLEX = {
    "repetitions": ('start: "a"{99999999}', "a"),
    "an expression": ("start: /(a{1000}){1000}/", "a"),
    "rows": (f"start: {' | '.join(f'r{i}' for i in range(3000))}\n"
             + "\n".join(f'r{i}: "a" /[a-z]/ "x{i}"' for i in range(3000)), "abx"),
    "alternatives": (f"start: %json {json.dumps(OPEN)}", '{"a": "b"'),
}  # fmt: skip
"""Grammars that can be compiled, and the beginning of a reply that is too much work."""


def follow(guide: GrammarGuide, text: str) -> None:
    for letter in text:
        guide.mask()
        guide.accept(TOKENIZER.convert_tokens_to_ids(letter))


@pytest.mark.parametrize("kind", TOO_COMPLEX)
def test_a_grammar_that_takes_too_much_work_is_refused_with_its_field(kind: str) -> None:
    grammar, text = TOO_COMPLEX[kind]
    guide = GRAMMARS.guide(grammar, "grammar")
    with pytest.raises(BadRequest, match=r"^grammar is too complex.*Simplify") as caught:
        follow(guide, text)
    assert (caught.value.param, caught.value.code) == ("grammar", "grammar_too_complex")


def test_a_token_that_is_not_allowed_is_the_callers_error() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        GRAMMARS.guide('start: "a"').accept(TOKENIZER.convert_tokens_to_ids("b"))


def test_a_character_of_two_code_points_can_be_written() -> None:
    """Also if the tokenizer, like Qwen's, joins the two in texts that it reads."""
    joining = wrapped(None, ())
    joining.backend_tokenizer.normalizer = NFC()
    guide = Grammars(joining, 600).guide('start: "cafe\u0301"')
    for token in TOKENIZER.encode("cafe\u0301", add_special_tokens=False):
        assert guide.mask()[token // 32] >> token % 32 & 1
        guide.accept(token)
