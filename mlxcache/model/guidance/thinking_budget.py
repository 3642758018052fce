"""Thinking that ends after a number of tokens, with closing words of the model's family.

The think block is ended by a guide that the reply gets when its budget is nearly spent. Until then
the reply is free, and decoding does not wait for each token. The budget includes the closing words.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxcache.model import markers
from mlxcache.model.chat_template import apply_chat_template
from mlxcache.model.guidance.guide import Bitmask, Guide

log = logging.getLogger(__name__)

Steering = Callable[[Guide | None, Sequence[int]], Guide | None]
"""Function that changes a reply's guide.

It takes the guide so far and the tokens drawn since the change was requested, and returns the new
guide. Both guides have accepted these tokens.
"""

QWEN_WORDS = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the "
    "thinking directly now."
)
"""Closing words on which Qwen3 was trained. Source: https://arxiv.org/abs/2505.09388, 4.3."""

LEAST_FOR_WORDS = 128
"""Smallest budget in tokens with closing words; thinking with a smaller one ends without them."""

MOST_WAITING = 6
"""Maximum number of tokens that are allowed to complete a partly written character or marker."""

RECENT = 32
"""Number of the newest tokens of thinking that are searched for a partly written marker."""

_PROBE = "zqthink7", "zqtext7"


@dataclass(frozen=True, slots=True)
class Closing:
    """Token ids that end a think block of one model family.

    `words`: a sentence with which the model stops thinking, if its family has one, then the end of
    the block. `plain`: the end only. `after`: how many ids at the end of both come after the
    block's closing marker. `header`: how many of those, at their end, are the header of a message
    with visible text. This header is left out if the reply may call tools or follows a grammar;
    then one of the token ids in `options` must follow. `vocab_size`: the width of the logits.
    """

    vocab_size: int
    words: tuple[int, ...]
    plain: tuple[int, ...]
    after: int = 0
    header: int = 0
    options: tuple[int, ...] = ()


def read_closing(
    tokenizer: Any, architecture: str, vocab_size: int, label: str = "unnamed"
) -> Closing | None:
    """Return the token ids that end thinking in the model family of `tokenizer`.

    Returns None if mlx-lm describes no thinking for it. `tokenizer`: mlx-lm's TokenizerWrapper.
    `architecture`: the model_type of config.json. `vocab_size`: the width of the logits. `label`:
    that of the model, for the log.
    """

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if markers.is_harmony(tokenizer):
        header, after = encode("final<|message|>"), encode("<|start|>assistant<|channel|>")
        plain = encode("<|end|>") + after + header
        options = header[:1] + encode("commentary")[:1]
        return Closing(vocab_size, plain, plain, len(after + header), len(header), options)
    if markers.REASONING in tokenizer.response_transitions:
        (marker, _), *_ = tokenizer.response_transitions[markers.REASONING]
        after = encode("<|start|>assistant")
        return Closing(vocab_size, encode(marker) + after, encode(marker) + after, len(after))
    if not tokenizer.has_thinking:
        return None
    before, behind = _blanks(tokenizer, label)
    plain = encode(before + tokenizer.think_end)
    words = encode(QWEN_WORDS + before + tokenizer.think_end)
    follow = encode(behind) if behind else ()
    spoken = words if architecture.startswith("qwen3") else plain
    return Closing(vocab_size, spoken + follow, plain + follow, len(follow))


def _blanks(tokenizer: Any, label: str) -> tuple[str, str]:
    """Return the white space that the template writes before and after the closing marker.

    It is one line break before and two after if the template does not show it. `tokenizer`:
    mlx-lm's TokenizerWrapper. `label`: that of the model, for the log.
    """
    thought, text = _PROBE
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": text, "reasoning_content": thought},
    ]
    try:
        shown = str(apply_chat_template(tokenizer, messages, tokenize=False))
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        log.debug(
            "model %s: chat template failed, line breaks assumed around the end of thinking: %s",
            *(label, error),
        )
        return "\n", "\n\n"
    between = shown.partition(thought)[2].partition(text)[0]
    before, marker, after = between.partition(tokenizer.think_end)
    return (before, after) if marker and not between.replace(marker, "").strip() else ("\n", "\n\n")


class ThinkingBudget:
    """Limit of the thinking in one reply, which requests a guide that ends it.

    `closing`: the tokens that end a think block. `limit`: maximum number of tokens in all think
    blocks together, exceeded by `MOST_WAITING` tokens at most; with None there is no limit until
    `end` is called. `ahead`: maximum number of tokens that are drawn before a new guide takes
    effect. `tools`: True if tool calls in the reply are parsed.
    """

    def __init__(
        self, closing: Closing, tokenizer: Any, limit: int | None, *, ahead: int, tools: bool
    ):
        self._closing = closing
        self._tokenizer = tokenizer
        self._limit = limit
        self._ahead = ahead
        self._tools = tools
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._since = -1  # tokens since the end was asked for; -1: it was not
        least = max(LEAST_FOR_WORDS, 2 * len(closing.words))
        self._spoken = limit is not None and limit < least

    def note(self, token: int, *, thinking: bool, used: int) -> Steering | None:
        """Record a token of the reply; return a function that changes the reply's guide, or None.

        The function is a `Steering`: it takes the guide so far and the tokens drawn since,
        and returns the new guide. With None the guide stays. `thinking`: a think block is
        open after the token. `used`: tokens in think blocks so far.
        """
        self._recent.append(token)
        if self._since >= 0:
            self._since += 1
            if not thinking:
                return self._stop
            if self._since <= len(self._ids) + self._ahead + MOST_WAITING + 2:
                return None
            # what looked like the end of the block was not
        elif not thinking or self._limit is None or used < self._limit - self._within - self._ahead:
            return None
        self._since = 0
        return self._start

    def may_steer(self, used: int, within: int) -> bool:
        """Return whether the guide may change within the next `within` tokens of thinking.

        `used`: tokens in think blocks so far.
        """
        if self._since >= 0:
            return True
        return self._limit is not None and used + within >= self._limit - self._within - self._ahead

    def begin(self, guide: Guide | None) -> Guide | None:
        """Return the guide of a reply that begins inside a think block.

        `guide`: the guide that the reply has so far, or None. It is returned unless the
        limit is so small that the block must be closed at once. The result then closes the
        block, and follows `guide` after it.
        """
        if self._limit is None or self._limit > self._within + self._ahead:
            return guide
        self._since = 0
        return self._start(guide, ())

    def end(self) -> Steering | None:
        """Request the end of the open think block, and of any later one.

        Returns a function that changes the reply's guide (see `note`), or None if the end is
        requested anyway: by an earlier call, or because of `limit`.
        """
        if self._limit == 0 or self._since >= 0:
            return None
        self._limit = self._since = 0
        return self._start

    @property
    def _ids(self) -> tuple[int, ...]:
        return self._closing.plain if self._spoken else self._closing.words

    @property
    def _within(self) -> int:
        """Number of closing tokens that count as thinking: up to and with the closing marker."""
        return len(self._ids) - self._closing.after

    def _start(self, guide: Guide | None, newer: Sequence[int]) -> Guide:
        """Return a guide that ends the open think block; this method is a `Steering`.

        `guide`: the reply's guide so far, or None. `newer`: the tokens drawn since the change was
        requested, by which the new guide is advanced.
        """
        inner = guide.inner if isinstance(guide, CloseThinking) else guide
        ids, header = self._ids, self._closing.header
        options: tuple[int, ...] = ()
        if header and (self._tools or inner is not None):
            ids, options = ids[:-header], self._closing.options
        closing = CloseThinking(
            ids,
            inner,
            within=self._within,
            options=options,
            leaves=self._leaves(),
            decode=self._decode,
            tail=self._recent,
            vocab_size=self._closing.vocab_size,
        )
        for token in newer:
            closing.follow(token)
        self._spoken = True  # a second block ends without words
        return closing

    def _stop(self, guide: Guide | None, newer: Sequence[int]) -> Guide | None:
        """Remove the guide that ended a think block if it is done; this method is a `Steering`.

        `guide`: the reply's guide so far, or None. `newer` is not used. Returns the guide that
        remains, or None if there is none.
        """
        if isinstance(guide, CloseThinking):
            if not guide.done:
                return guide
            guide = guide.inner
        self._since = -1
        return guide

    def _leaves(self) -> Sequence[str]:
        """Return the markers by which the model may end a think block by itself."""
        framing = markers.grammar(self._tokenizer, tools=self._tools, generic=False)
        return tuple(framing.edges.get(markers.REASONING, ()))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


class CloseThinking:
    """Guide that ends a think block with the tokens `ids`, then follows only `inner`.

    `inner`: the guide that the reply had before, which also restricts `ids`; None allows
    everything. `within`: how many of `ids` belong to the block. `options`: tokens, one of which
    follows `ids`; may be empty. `leaves`: markers by which the model may end the block itself
    before. `tail`: the newest tokens of the block so far. `decode`: returns the text of tokens.
    `vocab_size`: the width of the logits.
    """

    def __init__(
        self,
        ids: Sequence[int],
        inner: Guide | None,
        *,
        within: int,
        options: Sequence[int],
        leaves: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        tail: Iterable[int],
        vocab_size: int,
    ):
        self.inner = inner
        self._ids = tuple(ids)
        self._within = within
        self._options = tuple(options)
        self._leaves = tuple(leaves)
        self._decode = decode
        self._tail = tuple(tail)
        self._begun = self._open = len(self._tail)
        self._vocab_size = vocab_size
        self._at = 0
        self.done = False
        """True once the think block is closed and the tokens that must follow it are written."""

    def accept(self, token: int) -> None:
        """Advance this guide and `inner` by a token. Raises ValueError if `inner` forbids it.

        A token that only this guide's own mask excludes is not refused.
        """
        if self.inner is not None:
            self.inner.accept(token)
        self.follow(token)

    def follow(self, token: int) -> None:
        """Advance this guide, but not its `inner` guide, which has accepted `token` already.

        No token is refused, because some were drawn before this guide was in use.
        """
        if self.done:
            return
        if token in self._wanted():
            self._at += 1
            self.done = self._at == len(self._ids) + bool(self._options)
        elif self._at >= self._within:
            self.done = True  # the inner guide had it otherwise
        else:
            self._at = 0
        self._tail = (*self._tail, token)
        if self._at < self._within and self._has_left():
            self.done = True

    def mask(self) -> Bitmask | None:
        """Return the mask of tokens that may come next in the reply, or None if all may."""
        own = self.inner.mask() if self.inner is not None else None
        if self.done or (self._at == 0 and self._waits()):
            return own
        wanted = [t for t in self._wanted() if own is None or _allows(own, t)]
        return _bitmask(wanted, self._vocab_size) if wanted else own

    def copy(self) -> CloseThinking:
        """Return an independent guide in the same state."""
        other = copy(self)
        other.inner = self.inner.copy() if self.inner is not None else None
        return other

    def _wanted(self) -> tuple[int, ...]:
        """Return the tokens that may come next to close the think block.

        This is the next one of `ids`, or after all of them any of `options`.
        """
        return self._ids[self._at : self._at + 1] or self._options

    def _has_left(self) -> bool:
        """Return whether the model itself has ended the think block since this guide began."""
        before = self._decode(self._tail[: self._begun])
        text = self._decode(self._tail)
        return any(text.find(m, max(0, len(before) - len(m) + 1)) >= 0 for m in self._leaves)

    def _waits(self) -> bool:
        """Return whether the closing tokens must wait, because the text ends in an incomplete part.

        The incomplete part is a character, or one of `leaves`. False once this guide was
        advanced by `MOST_WAITING` tokens.
        """
        if len(self._tail) - self._begun >= MOST_WAITING:
            return False
        text = self._decode(self._tail[-RECENT:])
        return text.endswith("\ufffd") or any(
            text.endswith(marker[:n]) for marker in self._leaves for n in range(1, len(marker))
        )


def _bitmask(tokens: Sequence[int], vocab_size: int) -> Bitmask:
    """Return a mask, one bit per token of the vocabulary, that allows only a few `tokens`."""
    bits = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits.view(np.int32)


def _allows(mask: Bitmask, token: int) -> bool:
    return token // 32 < mask.size and bool(mask[token // 32] >> (token % 32) & 1)
