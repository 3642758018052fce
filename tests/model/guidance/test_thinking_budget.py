"""The end of a think block at its budget, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxcache.model.guidance.guide import Bitmask, Guide
from mlxcache.model.guidance.thinking import (
    LEAST_FOR_WORDS,
    MOST_WAITING,
    CloseThinking,
    ThinkEnd,
    ThinkingBudget,
    read_closing,
)
from tests.model.test_output import CHANNEL, MUSE, QWEN, THINK, XTML, wrapped

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
VOCABULARY = 608


def closing(tokenizer: Any, architecture: str = "llama") -> ThinkEnd:
    found = read_closing(tokenizer, architecture, VOCABULARY)
    assert found is not None
    return found


def text(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(ids)))


def test_each_family_has_its_closing() -> None:
    qwen = wrapped("json_tools", QWEN)
    assert text(qwen, closing(qwen).words) == "\n</think>\n\n"
    own = closing(qwen, "qwen3_moe")
    assert text(qwen, own.words).startswith("\n\nConsidering the limited time by the user")
    assert text(qwen, own.words).endswith("thinking directly now.\n</think>\n\n")
    assert text(qwen, own.plain) == "\n</think>\n\n"
    assert text(qwen, own.plain[-own.after :]) == "\n\n"
    gemma = wrapped("gemma4", CHANNEL)
    assert text(gemma, closing(gemma).plain).strip() == "<channel|>"
    kimi = wrapped("kimi_k3", XTML)
    assert text(kimi, closing(kimi).plain).strip() == "<|close|>think<|sep|>"
    muse = wrapped("muse_spark", ("<|message|>", "<|eom|>", "<|start|>"), response_format=MUSE)
    assert text(muse, closing(muse).plain) == "<|eom|><|start|>assistant"
    gpt = wrapped(None, HARMONY)
    found = closing(gpt)
    assert text(gpt, found.plain) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert text(gpt, found.plain[-found.header :]) == "final<|message|>"
    assert text(gpt, found.options) == "fc"  # one letter a token here
    assert read_closing(wrapped("mistral", ()), "mistral", VOCABULARY) is None


def test_the_template_decides_the_blanks() -> None:
    tokenizer = wrapped(None, THINK)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}"
        "<think>{{ m.reasoning_content }} </think>\n{% endif %}{{ m.content }}{% endfor %}"
    )
    assert text(tokenizer, closing(tokenizer).plain) == " </think>\n"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert text(tokenizer, closing(tokenizer).plain) == "\n</think>\n\n"


class Reply:
    def __init__(
        self, tokenizer: Any, limit: int, *, tools: bool = False, inner: Guide | None = None
    ):
        self.tokenizer = tokenizer
        self.guide = inner
        self.tokens: list[int] = []
        self.budget = ThinkingBudget(closing(tokenizer), tokenizer, limit, tools=tools)

    def write(self, content: str, *, thinking: bool, used: int | None = None) -> None:
        """Let the model write `content`; each of its tokens gives way to a forced one."""
        for token in self.tokenizer.encode(content, add_special_tokens=False):
            allowed = self.allowed()
            self.take(token if allowed is None or token in allowed else allowed[0], thinking, used)

    def take(self, token: int, thinking: bool, used: int | None = None) -> None:
        if self.guide is not None:
            self.guide.accept(token)
            self.guide = self.guide.copy()
        self.tokens.append(token)
        used = len(self.tokens) if used is None else used
        steering = self.budget.note(token, thinking=thinking, used=used)
        if steering is not None:
            self.guide = steering(self.guide)

    def allowed(self) -> list[int] | None:
        mask = self.guide.mask() if self.guide is not None else None
        return None if mask is None else bits(mask)

    @property
    def text(self) -> str:
        return text(self.tokenizer, self.tokens)


def bits(mask: Bitmask) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def test_thinking_is_closed_at_its_budget_and_the_guide_leaves() -> None:
    reply = Reply(wrapped(None, THINK), 10)
    reply.write("a" * 9, thinking=True)
    reply.write("bc", thinking=False)
    assert reply.text == "aaaaaaa\n</think>\n\n"
    reply.write("answer", thinking=False)
    assert reply.guide is None
    assert reply.text.endswith("answer")


def test_a_model_that_closes_itself_is_let_be() -> None:
    for written in ("a" * 8 + "</think>", "a" * 7 + "\n</think>", "a" * 6 + "</think>"):
        reply = Reply(wrapped(None, THINK), 10)
        for token in reply.tokenizer.encode(written, add_special_tokens=False):
            reply.take(token, thinking=token < 256)
        reply.write("answer of the model", thinking=False)
        assert reply.text.count("</think>") == 1
        assert reply.text.endswith("of the model")
        assert reply.guide is None


def test_half_a_character_or_marker_is_waited_for() -> None:
    tokenizer = wrapped(None, THINK)
    for half, rest in (("aaaaaaa", "\u20ac"), ("aaaaaa</thi", "ng>")):
        reply = Reply(tokenizer, len(half) + 2)
        for token in tokenizer.encode(half + rest, add_special_tokens=False):
            reply.take(token, thinking=True)
            if reply.guide is not None and reply.allowed() is not None:
                break
        reply.write("b" * 9, thinking=True)
        assert "\ufffd" not in reply.text
        assert "</think>" in reply.text
    reply = Reply(tokenizer, 10)
    reply.write("a" * 6 + "<" * 20, thinking=True)
    assert reply.text.startswith("aaaaaa" + "<" * (MOST_WAITING + 1) + "\n</think>")


def test_a_second_block_gets_what_is_left() -> None:
    """Nothing, once the budget is spent: it is closed at once, without words."""
    reply = Reply(wrapped(None, THINK), 10)
    reply.write("a" * 11, thinking=True)
    reply.write("text  ", thinking=False)
    assert reply.guide is None
    start = len(reply.tokens)
    reply.write("<think>" + "b" * 9, thinking=True, used=11)
    assert text(reply.tokenizer, reply.tokens[start:]).startswith("<think>\n</think>")


def test_small_budgets_have_no_words() -> None:
    """The words take at most half of a budget, and all of the block keeps within it."""
    tokenizer = wrapped(None, THINK)
    found = closing(tokenizer, "qwen3")
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    least = max(LEAST_FOR_WORDS, 2 * len(found.words))
    for limit in (least - 1, least):
        budget = ThinkingBudget(found, tokenizer, limit, tools=False)
        steered = ((n, budget.note(a, thinking=True, used=n)) for n in range(1, limit + 1))
        used, steering = next((n, change) for n, change in steered if change is not None)
        guide = steering(None)
        assert guide is not None
        guide.accept(a)  # drawn before the guide could decide
        said: list[int] = []
        while (mask := guide.mask()) is not None:
            said += bits(mask)
            guide.accept(said[-1])
        assert ("Considering" in text(tokenizer, said)) == (limit == least)
        assert used + 1 + len(said) - found.after == limit


class Only:
    def __init__(self, *ids: int):
        self.ids = ids
        self.seen: tuple[int, ...] = ()

    def accept(self, token: int) -> None:
        if token not in self.ids:
            raise ValueError(token)
        self.seen += (token,)

    def mask(self) -> Bitmask | None:
        found = np.zeros(VOCABULARY, np.uint8)
        found[list(self.ids)] = 1
        return np.packbits(found, bitorder="little").view(np.int32)[: VOCABULARY // 32]

    def copy(self) -> Only:
        other = Only(*self.ids)
        other.seen = self.seen
        return other


def test_the_inner_guide_sees_every_token_and_has_the_last_word() -> None:
    """What it forbids after the block is left out; what it forbids in the block is waited for."""
    tokenizer = wrapped(None, THINK)
    a, b, newline = 97, 98, 10
    (end,) = tokenizer.encode("</think>", add_special_tokens=False)
    a, b, newline = (tokenizer.encode(c, add_special_tokens=False)[0] for c in "ab\n")
    inner = Only(a, b, newline, end)
    reply = Reply(tokenizer, 10, inner=inner)
    reply.write("a" * 12, thinking=True)
    reply.write("bbbb", thinking=False)
    assert isinstance(reply.guide, Only)
    assert reply.guide.seen == tuple(reply.tokens)
    strict = Reply(tokenizer, 5, inner=Only(a, end))
    strict.write("a" * 20, thinking=True)
    assert "\n" not in strict.text


@pytest.mark.parametrize("tools", [False, True])
def test_gpt_oss_answers_or_calls(tools: bool) -> None:
    """With tools the model chooses the channel, but thinks no more."""
    tokenizer = wrapped(None, HARMONY)
    reply = Reply(tokenizer, 5, tools=tools)
    reply.write("a" * 6, thinking=True)
    while (allowed := reply.allowed()) is not None and len(allowed) == 1:
        reply.take(allowed[0], thinking=False)
    end = text(tokenizer, reply.tokens)
    if not tools:
        assert end.endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
        return
    assert end.endswith("<|end|><|start|>assistant<|channel|>")
    assert allowed is not None
    assert sorted(text(tokenizer, [t]) for t in allowed) == ["c", "f"]
    reply.write("commentary to=functions.f", thinking=False)
    assert reply.text.endswith("<|channel|>commentary to=functions.f")
    assert reply.guide is None


def test_a_copy_is_independent() -> None:
    tokenizer = wrapped(None, THINK)
    guide = CloseThinking(
        (5, 6), Only(5, 6, 7), within=2, options=(), leaves=(), decode=lambda _: "", tail=(),
        vocab_size=VOCABULARY,
    )  # fmt: skip
    other = guide.copy()
    other.accept(5)
    mask, mask2 = guide.mask(), other.mask()
    assert mask is not None
    assert mask2 is not None
    assert (bits(mask), bits(mask2)) == ([5], [6])
    assert tokenizer is not None
