"""What a client reads of a grammar that compiles to nothing, or to more than can be followed."""

from __future__ import annotations

import pytest
from tokenizers.normalizers import NFC

from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.model.guidance.guide import Grammars
from tests.model.test_output import wrapped

TOKENIZER = wrapped(None, ())
GRAMMARS = Grammars(TOKENIZER, 600)


@pytest.mark.parametrize("grammar", ["start: start", "start: /[a&&b]/"])
def test_a_grammar_that_no_text_matches_is_refused_with_its_field(grammar: str) -> None:
    with pytest.raises(BadRequest, match="no text matches") as caught:
        GRAMMARS.guide(grammar, "structured_outputs.grammar")
    assert caught.value.param == "structured_outputs.grammar"


def test_a_grammar_that_takes_too_much_work_says_so() -> None:
    """It compiles, and fails at its first token."""
    guide = GRAMMARS.guide('start: "a"{99999999}')
    with pytest.raises(GenerationFailed, match=r"too much work.*Simplify"):
        guide.accept(TOKENIZER.convert_tokens_to_ids("a"))


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
