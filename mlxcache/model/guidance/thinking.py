"""Thinking in replies: free in front of an answer by a grammar, and ended at its budget.

Before a guided answer, thinking is free up to its closing marker, after which the guide decides. A
think block is ended by a guide that the reply gets when its budget is nearly spent. Until then the
reply is free, and decoding does not wait for each token. The budget includes the closing words.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLTokenizer

from mlxcache.model import markers
from mlxcache.model.chat_template import apply_chat_template
from mlxcache.model.guidance.guide import Bitmask, Guide
from mlxcache.types import Tokens

log = logging.getLogger(__name__)

_HARMONY = ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
_BLANKS = ("\n", "\n\n")  # a reply may have one of these between thinking and the answer


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """Form in which a model family writes its thinking, in token ids.

    `opening`: opens a think block; empty if only the prompt opens one. `closing`: the marker that
    ends the block, and `marker` its text. `after`: the header of the next message. With such
    headers further blocks may follow, and the marker does not count when other tokens spell it.
    `free`: mask of the tokens of a think block, those of the closing marker included. `blanks`:
    white space, one of which may come between the block and the answer. `beyond`: maps the missing
    rest of a partly spelled marker to the tokens that would complete it together with the beginning
    of the answer.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    marker: bytes
    after: tuple[int, ...]
    free: Bitmask
    blanks: frozenset[int]
    beyond: Mapping[bytes, tuple[int, ...]]
    vocabulary: LLTokenizer

    def is_closed_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with a closed think block and at most two blank tokens.

        Always False with headers.
        """
        end = list(prompt[-len(self.closing) - 2 :])
        while end and end[-1] in self.blanks:
            end.pop()
        return not self.after and tuple(end[-len(self.closing) :]) == self.closing


def read_format(tokenizer: Any, vocabulary: LLTokenizer) -> ThinkFormat | None:
    """Return the form of thinking, or None if mlx-lm describes none. Takes about 0.1 s."""
    words = _words(tokenizer)
    if words is None:
        return None
    opening, marker, after = words

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

    closing = encode(marker)
    pieces = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
    texts = [i for i in range(len(pieces)) if not vocabulary.is_special_token(i)]
    raw = marker.encode()

    def beyond(rest: bytes) -> tuple[int, ...]:
        found = (i for i in texts if pieces[i].startswith(rest))
        return tuple(i for i in found if pieces[i][len(rest) :].strip(b"\n"))

    return ThinkFormat(
        opening=encode(opening),
        closing=closing,
        marker=raw,
        after=encode(after),
        free=bitmask([*texts, *closing], vocabulary.vocab_size),
        blanks=frozenset(i for i in texts if pieces[i].decode(errors="replace") in _BLANKS),
        beyond={} if after else {raw[k:]: beyond(raw[k:]) for k in range(len(raw))},
        vocabulary=vocabulary,
    )


def _words(tokenizer: Any) -> tuple[str, str, str] | None:
    """Return the opening and the closing of a think block, and the next message's header or ""."""
    if markers.is_harmony(tokenizer):
        return _HARMONY
    headers = tokenizer.response_transitions.get(tokenizer.response_initial_state, ())
    for opening, state in headers:
        if state == markers.REASONING:
            closing = next(found for found, _ in tokenizer.response_transitions[state])
            return f" {opening}", closing, "<|start|>assistant"
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end, ""
    return None


def bitmask(tokens: Iterable[int], vocab_size: int) -> Bitmask:
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allows(mask: Bitmask, token: int) -> bool:
    return token // 32 < mask.size and bool(mask[token // 32] >> (token % 32) & 1)


State = Literal["begin", "thinking", "between", "answer"]
"""Part of a reply that its next token is in.

`begin`: what opens a think block, or the answer. `between`: `ThinkFormat.after`.
"""


class AfterThinking:
    """Guide for the answer only: thinking before it is free, but must end with its marker.

    `guide`: that of the answer. `thinking`: the prompt ends inside a think block. Before the answer
    the model cannot end its reply, and no tool can be called.
    """

    def __init__(self, form: ThinkFormat, guide: Guide, *, thinking: bool, may_think: bool):
        self._form = form
        self._guide = guide
        self._trial: Guide | None = guide.copy()
        self._state: State = "thinking" if thinking else "begin"
        self._opening = form.opening if may_think and not thinking else ()
        self._at = 0
        self._blank_allowed = False
        self._tail = b""

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def mask(self) -> Bitmask | None:
        form = self._form
        if self._state == "answer":
            return self._guide.mask()
        if self._state == "thinking":
            return self._free()
        if self._state == "between":
            return bitmask([form.after[self._at]], form.vocabulary.vocab_size)
        more = [*self._opening[self._at : self._at + 1]]
        if self._blank_allowed:
            more += form.blanks
        own = self._trial.mask() if self._trial is not None else None
        if own is None and self._trial is not None:
            return None
        extra = bitmask(more, form.vocabulary.vocab_size)
        return extra if own is None else extra | own

    def accept(self, token: int) -> None:
        if self._state == "answer":
            self._guide.accept(token)
        elif self._state == "thinking":
            self._think(token)
        elif self._state == "between":
            self._follow(token)
        else:
            self._begin(token)

    def copy(self) -> AfterThinking:
        other = copy(self)
        other._guide = self._guide.copy()
        other._trial = self._trial.copy() if self._trial is not None else None
        return other

    def _free(self) -> Bitmask:
        """Allow no token that completes the closing marker and begins the answer."""
        form = self._form
        banned = [
            token
            for rest, tokens in form.beyond.items()
            if self._tail.endswith(form.marker[: len(form.marker) - len(rest)])
            for token in tokens
        ]
        return form.free & ~bitmask(banned, form.vocabulary.vocab_size) if banned else form.free

    def _think(self, token: int) -> None:
        form = self._form
        if not allows(self._free(), token):
            raise ValueError(f"token {token} cannot be part of thinking")
        self._tail += form.vocabulary.decode_bytes([token])
        closes = self._tail.rstrip(b"\n").endswith(form.marker)
        if closes and (not form.after or token in form.closing):
            self._blank_allowed = not form.after and self._tail.endswith(form.marker)
            self._state = "between" if form.after else "begin"
            self._opening = form.opening if form.after else ()
            self._at, self._tail = 0, b""
            self._trial = self._guide.copy()
        else:
            self._tail = self._tail[-len(form.marker) :]

    def _follow(self, token: int) -> None:
        if token != self._form.after[self._at]:
            raise ValueError(f"token {token} cannot follow thinking")
        self._at += 1
        if self._at == len(self._form.after):
            self._state, self._at = "begin", 0

    def _begin(self, token: int) -> None:
        trial = self._trial
        own = trial.mask() if trial is not None else None
        fits = trial is not None and (own is None or allows(own, token))
        if self._opening[self._at : self._at + 1] == (token,):
            self._at += 1
            if self._at == len(self._opening):
                self._state, self._at, self._blank_allowed = "thinking", 0, False
            elif fits and trial is not None:
                trial.accept(token)
            else:
                self._trial = None
        elif fits and trial is not None:
            trial.accept(token)
            self._guide, self._trial, self._state = trial, None, "answer"
        elif self._blank_allowed and token in self._form.blanks:
            self._blank_allowed = False
        else:
            raise ValueError(f"token {token} does not fit the beginning of the answer")


# the budget

Steering = Callable[[Guide | None], Guide | None]
"""Function that changes a reply's guide: it takes the guide so far and returns the new one."""

AHEAD = 1  # number of tokens that are drawn before a new guide takes effect

# Qwen3 was trained on these words: https://arxiv.org/abs/2505.09388, 4.3
_QWEN_WORDS = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the "
    "thinking directly now."
)

LEAST_FOR_WORDS = 128  # smallest budget in tokens with closing words
MOST_WAITING = 6  # tokens that are allowed to complete a partly written character or marker
_RECENT = 32  # tokens of thinking that are searched for a partly written marker


@dataclass(frozen=True, slots=True)
class ThinkEnd:
    """Token ids that end a think block of one model family.

    `opening`, `closing`: the markers of a block. `words`: a sentence with which the model stops
    thinking, if its family has one, then the end of the block. `plain`: the end only. `after`: how
    many ids at the end of both come after the block's closing marker. `header`: how many of those
    are the header of a message with visible text, left out if the reply may call tools or follows a
    grammar; then one of `options` follows.
    """

    vocab_size: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    words: tuple[int, ...]
    plain: tuple[int, ...]
    after: int = 0
    header: int = 0
    options: tuple[int, ...] = ()

    def is_closed_by(self, prompt: Tokens) -> bool:
        """Return whether a prompt ends with a closed think block and at most two tokens more."""
        size, end = len(self.closing), tuple(prompt[-len(self.closing) - 2 :].tolist())
        return any(end[i : i + size] == self.closing for i in range(3))


def read_closing(
    tokenizer: Any, architecture: str, vocab_size: int, label: str = "unnamed"
) -> ThinkEnd | None:
    """Return the token ids that end thinking, or None if mlx-lm describes no thinking."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    words = _words(tokenizer)
    if words is None:
        return None
    opening, marker, following = words
    edges = encode(opening), encode(marker)
    if markers.is_harmony(tokenizer):
        header, after = encode("final<|message|>"), encode(f"{following}<|channel|>")
        plain = encode(marker) + after + header
        options = header[:1] + encode("commentary")[:1]
        follow = after + header
        return ThinkEnd(vocab_size, *edges, plain, plain, len(follow), len(header), options)
    if following:
        plain = encode(marker) + encode(following)
        return ThinkEnd(vocab_size, *edges, plain, plain, len(encode(following)))
    before, behind = _blanks(tokenizer, label)
    plain = encode(before + marker)
    spoken = encode(_QWEN_WORDS + before + marker) if architecture.startswith("qwen3") else plain
    follow = encode(behind) if behind else ()
    return ThinkEnd(vocab_size, *edges, spoken + follow, plain + follow, len(follow))


def _blanks(tokenizer: Any, label: str) -> tuple[str, str]:
    """Return the white space that the template writes before and after the closing marker."""
    thought, text = "zqthink7", "zqtext7"
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

    `limit`: maximum number of tokens in all think blocks together, exceeded by `MOST_WAITING`
    tokens at most; with None there is no limit until `end` is called. `tools`: the reply's
    calls are parsed. `reopens`: another block may follow the one that is open.
    """

    def __init__(
        self,
        closing: ThinkEnd,
        tokenizer: Any,
        limit: int | None,
        *,
        tools: bool,
        reopens: bool = True,
    ):
        self._closing = closing
        self._tokenizer = tokenizer
        self._limit = math.inf if limit is None else limit
        self._tools = tools
        self._reopens = reopens
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._since = -1  # tokens since the end was asked for; -1: it was not
        least = max(LEAST_FOR_WORDS, 2 * len(closing.words))
        self._spoken = self._limit < least

    def note(self, token: int, *, thinking: bool, used: int) -> Steering | None:
        """Record a token of the reply; return a change of the reply's guide, or None.

        `thinking`: a think block is open after the token. `used`: tokens in think blocks so far.
        """
        self._recent.append(token)
        if self._since >= 0:
            self._since += 1
            if not thinking:
                return self._stop
            if self._since <= len(self._ids) + AHEAD + MOST_WAITING + 2:
                return None
            # what looked like the end of the block was not
        elif not (thinking and self._spent(used)):
            return None
        self._since = 0
        return self._start

    def may_steer(self, used: int, within: int) -> bool:
        """Return whether the guide may change within the next `within` tokens of thinking."""
        return self._since >= 0 or self._spent(used + within)

    def _spent(self, used: int) -> bool:
        return self._reopens and used >= self._limit - self._within - AHEAD

    def begin(self, guide: Guide | None) -> Guide | None:
        """Return the guide of a reply that begins inside a think block."""
        if self._limit > self._within + AHEAD:
            return guide
        self._since = 0
        return self._start(guide)

    def end(self) -> Steering | None:
        """Request the end of the open think block, and of any later one."""
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

    def _start(self, guide: Guide | None) -> Guide:
        inner = guide.inner if isinstance(guide, CloseThinking) else guide
        ids, header = self._ids, self._closing.header
        options: tuple[int, ...] = ()
        if header and (self._tools or inner is not None):
            ids, options = ids[:-header], self._closing.options
        framing = markers.read_markers(self._tokenizer, tools=self._tools, generic=False)
        closing = CloseThinking(
            ids,
            inner,
            within=self._within,
            options=options,
            leaves=tuple(framing.edges.get(markers.REASONING, ())),
            decode=lambda tokens: str(self._tokenizer.decode(list(tokens))),
            tail=tuple(self._recent),
            vocab_size=self._closing.vocab_size,
        )
        self._spoken = True  # a second block ends without words
        return closing

    def _stop(self, guide: Guide | None) -> Guide | None:
        if isinstance(guide, CloseThinking):
            if not guide.done:
                return guide
            guide = guide.inner
        self._since = -1
        return guide


@dataclass
class CloseThinking:
    """Guide that ends a think block with the tokens `ids`, then follows only `inner`.

    `inner`: the guide that the reply had before, which also restricts `ids`. `within`: how many of
    `ids` belong to the block. `options`: tokens, one of which follows `ids`; may be empty.
    `leaves`: markers by which the model may end the block itself before. `tail`: the newest tokens
    of the block so far. `done`: the block is closed, and what must follow it is written.
    """

    ids: tuple[int, ...]
    inner: Guide | None
    within: int
    options: tuple[int, ...]
    leaves: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    tail: tuple[int, ...]
    vocab_size: int
    done: bool = False
    _at: int = 0

    def __post_init__(self) -> None:
        self._begun = len(self.tail)

    def accept(self, token: int) -> None:
        """Advance by a token, which only `inner` may refuse: some were drawn before this guide."""
        if self.inner is not None:
            self.inner.accept(token)
        if self.done:
            return
        if token in self._wanted():
            self._at += 1
            self.done = self._at == len(self.ids) + bool(self.options)
        elif self._at >= self.within:
            self.done = True  # the inner guide had it otherwise
        else:
            self._at = 0
        self.tail = (*self.tail, token)
        if self._at < self.within and self._has_left():
            self.done = True

    def mask(self) -> Bitmask | None:
        own = self.inner.mask() if self.inner is not None else None
        if self.done or (self._at == 0 and self._waits()):
            return own
        wanted = [t for t in self._wanted() if own is None or allows(own, t)]
        return bitmask(wanted, self.vocab_size) if wanted else own

    def copy(self) -> CloseThinking:
        other = copy(self)
        other.inner = self.inner.copy() if self.inner is not None else None
        return other

    def _wanted(self) -> tuple[int, ...]:
        return self.ids[self._at : self._at + 1] or self.options

    def _has_left(self) -> bool:
        before = self.decode(self.tail[: self._begun])
        text = self.decode(self.tail)
        return any(text.find(m, max(0, len(before) - len(m) + 1)) >= 0 for m in self.leaves)

    def _waits(self) -> bool:
        """Return whether the closing tokens wait for the rest of a character or one of `leaves`."""
        if len(self.tail) - self._begun >= MOST_WAITING:
            return False
        text = self.decode(self.tail[-_RECENT:])
        return text.endswith("\ufffd") or any(
            text.endswith(marker[:n]) for marker in self.leaves for n in range(1, len(marker))
        )
