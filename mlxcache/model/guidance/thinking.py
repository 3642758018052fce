"""Thinking in guided replies: free up to its closing marker, after which the guide decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLTokenizer

from mlxcache.model import markers
from mlxcache.model.guidance.guide import Bitmask, Guide

HARMONY = ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
"""Opening of a think block of gpt-oss, its closing marker, and the text before the next message."""

BLANKS = ("\n", "\n\n")
"""White space that templates write between thinking and the answer; a reply may have one of these.
"""


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """Form in which a model family writes its thinking, in token ids.

    `opening`: ids that open a think block; empty if only the prompt opens one. `closing`: ids of
    the marker that ends the block, and `marker` its text. `spelled`: the marker also counts when
    other tokens spell it. `after`: ids that come between the block and the text after it. `again`:
    further blocks may follow. `free`: mask of the tokens that a think block may consist of, those
    of the closing marker included. `blanks`: tokens of white space, one of which may come between
    the block and the answer. `beyond`: maps the missing rest of a partly spelled marker to the
    tokens that would complete the marker together with the beginning of the answer. `vocabulary`:
    the model's vocabulary in llguidance's form.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    marker: bytes
    spelled: bool
    after: tuple[int, ...]
    again: bool
    free: Bitmask
    blanks: frozenset[int]
    beyond: Mapping[bytes, tuple[int, ...]]
    vocabulary: LLTokenizer

    def is_closed_by(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with a closed think block, so that the reply has none.

        `prompt`: its token ids, or only the last ones, at least two more than `closing` has. The
        block may be followed by up to two tokens of white space. Always False if not `spelled`.
        """
        end = list(prompt[-len(self.closing) - 2 :])
        while end and end[-1] in self.blanks:
            end.pop()
        return self.spelled and tuple(end[-len(self.closing) :]) == self.closing


def read_format(tokenizer: Any, vocabulary: LLTokenizer) -> ThinkFormat | None:
    """Return the form of thinking of the model family of `tokenizer`.

    Returns None if mlx-lm describes no thinking for it. `tokenizer` is mlx-lm's TokenizerWrapper.
    Takes about 0.1 s.
    """
    words = _words(tokenizer)
    if words is None:
        return None
    opening, marker, after = words
    headers = after != ""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

    closing = encode(marker)
    pieces = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
    texts = [i for i in range(len(pieces)) if not vocabulary.is_special_token(i)]
    raw = marker.encode()
    rests = {} if headers else {raw[k:]: _beyond(raw[k:], texts, pieces) for k in range(len(raw))}
    return ThinkFormat(
        opening=encode(opening),
        closing=closing,
        marker=raw,
        spelled=not headers,
        after=encode(after),
        again=headers,
        free=bitmask([*texts, *closing], vocabulary.vocab_size),
        blanks=frozenset(i for i in texts if pieces[i].decode(errors="replace") in BLANKS),
        beyond=rests,
        vocabulary=vocabulary,
    )


def _words(tokenizer: Any) -> tuple[str, str, str] | None:
    """Return the texts around a think block, as a model family writes them.

    These are its opening, its closing marker, and the beginning of the next message's header, which
    is empty if messages have no headers. Returns None if the family does not think. `tokenizer`:
    mlx-lm's TokenizerWrapper.
    """
    if markers.is_harmony(tokenizer):
        return HARMONY
    headers = tokenizer.response_transitions.get(tokenizer.response_initial_state, ())
    for opening, state in headers:
        if state == markers.REASONING:
            closing = next(found for found, _ in tokenizer.response_transitions[state])
            return f" {opening}", closing, "<|start|>assistant"
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end, ""
    return None


def _beyond(rest: bytes, tokens: Iterable[int], pieces: list[bytes]) -> tuple[int, ...]:
    """Return those of `tokens` that complete a marker together with the beginning of the answer.

    `rest`: the bytes of the marker that are not written yet. `pieces`: the bytes of each token of
    the vocabulary, by id. A token that adds only line ends after `rest` is not returned.
    """
    return tuple(
        i for i in tokens if pieces[i].startswith(rest) and pieces[i][len(rest) :].strip(b"\n")
    )


def bitmask(tokens: Iterable[int], vocab_size: int) -> Bitmask:
    """Return a mask with one bit per token of the vocabulary, which allows only `tokens`."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allows(mask: Bitmask, token: int) -> bool:
    """Return whether `mask`, with one bit per token, allows `token`."""
    return token // 32 < mask.size and bool(mask[token // 32] >> (token % 32) & 1)


State = Literal["begin", "thinking", "between", "answer"]
"""Part of a reply that its next token is in.

`begin`: the marker that opens a think block, or the first token of the answer. `thinking`: a think
block. `between`: the ids `ThinkFormat.after` that follow the block. `answer`: the rest.
"""


class AfterThinking:
    """Guide for the answer only: thinking before it is free, but must end with its marker.

    `guide`: the guide of the answer, at its beginning. `form`: how the model writes its thinking.
    `thinking`: the prompt ends inside a think block. `may_think`: the reply may open a think block.
    Before the answer the model cannot end its reply, and no tool can be called.
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
        """True if a think block is open."""
        return self._state == "thinking"

    def mask(self) -> Bitmask | None:
        """Return the mask of tokens that may come next in the reply, or None if all may."""
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
        """Advance the guide by a token. Raises ValueError if the token was not allowed."""
        if self._state == "answer":
            self._guide.accept(token)
        elif self._state == "thinking":
            self._think(token)
        elif self._state == "between":
            self._follow(token)
        else:
            self._begin(token)

    def copy(self) -> AfterThinking:
        """Return an independent guide in the same state."""
        other = copy(self)
        other._guide = self._guide.copy()
        other._trial = self._trial.copy() if self._trial is not None else None
        return other

    def _free(self) -> Bitmask:
        """Return the mask of tokens that thinking may continue with.

        Tokens that complete the closing marker together with the beginning of the answer are
        excluded.
        """
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
        if closes and (form.spelled or token in form.closing):
            self._blank_allowed = form.spelled and self._tail.endswith(form.marker)
            self._state = "between" if form.after else "begin"
            self._opening = form.opening if form.again else ()
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
        """Advance the guide by a token before the answer.

        Raises ValueError for a token that neither belongs to the marker that opens a think block,
        nor is allowed white space, nor may begin the answer.
        """
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
