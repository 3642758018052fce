"""Guided replies that think first, in the form of each family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxcache.model.guidance.guide import Grammars
from mlxcache.model.guidance.thinking import AfterThinking, ThinkFormat, allows, read_format
from mlxcache.model.output import OutputParser
from mlxcache.types import Text, Thinking
from tests.model.test_output import CHANNEL, MUSE, QWEN, THINK, XTML, joined, wrapped

ANSWER = '"{" /[a-z]{1,4}/ "}"'
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")

FAMILIES: dict[str, tuple[Any, str]] = {
    "qwen": (wrapped("json_tools", QWEN), ANSWER),
    "deepseek": (wrapped(None, THINK, "spm"), ANSWER),
    "gemma4": (wrapped("gemma4", CHANNEL), ANSWER),
    "kimi_k3": (
        wrapped("kimi_k3", XTML),
        f'<|open|> "response" <|sep|> {ANSWER} <|close|> "response" <|sep|>',
    ),
    "muse_spark": (
        wrapped("muse_spark", ("<|message|>", "<|eom|>", "<|start|>"), response_format=MUSE),
        f'" to=user" <|message|> {ANSWER}',
    ),
    "gpt_oss": (wrapped(None, HARMONY), f'<|channel|> "final" <|message|> {ANSWER}'),
}
"""A tokenizer of each family, and the grammar of an answer in its framing."""


def ids(mask: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def made(family: str) -> tuple[Any, ThinkFormat, Any]:
    tokenizer, answer = FAMILIES[family]
    grammars = Grammars(tokenizer, 320)  # a multiple of 32, where llguidance adds a word
    form = read_format(tokenizer, grammars.vocabulary())
    assert form is not None
    return tokenizer, form, grammars.guide(f"start: {answer}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("open", [False, True])
def test_random_replies_think_and_then_follow_the_grammar(family: str, open: bool) -> None:
    """Whatever is drawn, the parser reads thinking and a valid answer; a copy goes the same way."""
    tokenizer, form, answer = made(family)
    if open and family in ("gpt_oss", "muse_spark"):
        pytest.skip("their prompts end before a header")
    rng = np.random.default_rng(5)
    spelled = tokenizer.encode(form.marker.decode(), add_special_tokens=False)
    thoughts = 0
    for _ in range(30):
        guide: AfterThinking = AfterThinking(form, answer, thinking=open, may_think=True)
        parser = OutputParser(tokenizer, thinking_open=open)
        pieces: list[Any] = []
        due: list[int] = []
        while parser.done is None:
            if guide.thinking and not due and rng.random() < 0.2:
                due = list(spelled)
            token = due.pop(0) if due else int(rng.choice(ids(guide.mask())))
            copied = guide.copy()
            copied.accept(token)
            guide.accept(token)
            assert ids(copied.mask()) == ids(guide.mask())
            pieces += parser.feed(token)
        kinds = [type(piece) for piece in joined(pieces)]
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        assert text[0] + text[-1] == "{}"
        assert text[1:-1].isalpha()
        assert kinds[-1] is Text
        thoughts += Thinking in kinds
    assert thoughts > 5


def test_a_marker_that_ordinary_tokens_spell_ends_thinking_too() -> None:
    """The token that completes it must not begin the answer, which the grammar has not seen."""
    vocabulary = (*THINK, ">{", ">\n")
    tokenizer = wrapped(None, vocabulary)
    grammars = Grammars(tokenizer, len(tokenizer.get_vocab()))
    form = read_format(tokenizer, grammars.vocabulary())
    assert form is not None
    guide = AfterThinking(form, grammars.guide(f"start: {ANSWER}"), thinking=True, may_think=True)
    both, newline = (tokenizer.convert_tokens_to_ids(text) for text in (">{", ">\n"))
    mask = guide.mask()
    assert mask is not None
    assert allows(mask, both)
    for letter in "</think":
        guide.accept(tokenizer.convert_tokens_to_ids(letter))
    mask = guide.mask()
    assert mask is not None
    assert not allows(mask, both)
    assert allows(mask, newline)
    with pytest.raises(ValueError, match="thinking"):
        guide.copy().accept(both)
    guide.accept(newline)
    assert not guide.thinking
    mask = guide.mask()
    assert mask is not None
    assert ids(mask) == [tokenizer.convert_tokens_to_ids("{")]


def test_nothing_ends_the_turn_while_it_thinks() -> None:
    for family in FAMILIES:
        tokenizer, form, answer = made(family)
        mask = AfterThinking(form, answer, thinking=True, may_think=True).mask()
        assert mask is not None
        assert not any(allows(mask, token) for token in tokenizer.eos_token_ids)


def test_a_prompt_that_closes_the_block_forbids_another() -> None:
    tokenizer, form, _ = made("qwen")
    prompt = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    assert form.is_closed_by(prompt)
    assert not form.is_closed_by(prompt[:2])
    assert not form.is_closed_by([*prompt, prompt[0]])


def test_models_without_thinking_have_no_form() -> None:
    tokenizer = wrapped("mistral", ())
    assert read_format(tokenizer, Grammars(tokenizer, 600).vocabulary()) is None
