"""Guides, which decide the tokens that a reply may continue with, and compiled grammars.

Grammars are compiled by llguidance (https://github.com/guidance-ai/llguidance). From the compiled
grammar and the vocabulary it computes the mask of tokens that may come next in well under a
millisecond. A compiled grammar belongs to one request and is not kept: compiling the grammar of 20
tools takes about 5 ms, and its memory, mostly under 1 MB, is outside the budget.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from threading import Lock
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.model import markers
from mlxcache.model.lark import too_large
from mlxcache.typed import decode

log = logging.getLogger(__name__)

Bitmask = npt.NDArray[np.int32]
"""Allowed tokens, shape (ceil(vocabulary / 32),): bit i % 32 of word i // 32 is token i."""

# llguidance's errors: a grammar can neither end nor continue; a token is not allowed. All others
# are limits of its own.
_NO_TEXT, _NOT_ALLOWED = "NoExtensionBias", "doesn't satisfy the grammar"


class Guide(Protocol):
    """State of one reply that decides which tokens may come next, and is advanced by each.

    Its methods may be called on any thread, by one thread at a time, and call no MLX.
    """

    def accept(self, token: int) -> None:
        """Advance the guide by a token. Raises ValueError if the token was not allowed."""

    def mask(self) -> Bitmask | None:
        """Return the mask of tokens that may come next in the reply, or None if all may."""

    def copy(self) -> Guide:
        """Return an independent guide in the same state."""


class GrammarGuide:
    """Guide by a compiled grammar, from the field `param` of the request.

    `accept` and `mask` raise BadRequest if they take more work than llguidance's limits allow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, param: str):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._param = param

    def accept(self, token: int) -> None:
        if self._matcher.consume_token(token):
            return
        why = _why(self._matcher)
        if _NOT_ALLOWED in why:
            raise ValueError(f"token {token} does not fit the grammar: {why}")
        raise _too_complex(why, self._param)

    def mask(self) -> Bitmask:
        found = self._matcher.compute_bitmask()  # has a bit more than there are tokens
        words = np.frombuffer(found, np.int32, (self._vocab_size + 31) // 32)
        if self._matcher.is_error():
            raise _too_complex(_why(self._matcher), self._param)
        return words

    def copy(self) -> GrammarGuide:
        return GrammarGuide(self._matcher.deep_copy(), self._vocab_size, self._param)


class Grammars:
    """Compiler of one model's grammars. Methods may be called on any thread; they block.

    `vocab_size`: the width of the logits, which may exceed the number of tokens. Control tokens
    (special ones, those that end a turn, markers) are not text: no string or regular expression of
    a grammar allows them; a Lark grammar names one by `<[id]>`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, label: str = "unnamed"):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._label = label
        self._made: LLTokenizer | None = None
        self._lock = Lock()

    def guide(self, grammar: str, param: str = "") -> GrammarGuide:
        """Compile a Lark grammar, or one in llguidance's JSON form, and return its guide.

        Raises BadRequest if it is wrong or too large, Unsupported if the tokenizer cannot be used.
        """
        if (large := too_large(grammar)) is not None:
            raise _too_complex(large, param)
        vocabulary = self.vocabulary()
        began = time.perf_counter()
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # many grammars that are too complex fail here already
        if matcher.is_error():
            why = _why(matcher)
            if why == _NO_TEXT:
                why = "no text matches it"
            raise BadRequest(f"The grammar cannot be compiled: {why}", param=param or None)
        took_ms = 1000 * (time.perf_counter() - began)
        log.debug("model %s: grammar compiled in %.0f ms", self._label, took_ms)
        return GrammarGuide(matcher, vocabulary.vocab_size, param)

    def vocabulary(self) -> LLTokenizer:
        """Return the model's vocabulary in llguidance's form; the first call takes seconds."""
        with self._lock:
            if self._made is None:
                began = time.perf_counter()
                self._made = _vocabulary(self._tokenizer, self._vocab_size)
                seconds = time.perf_counter() - began
                log.info("model %s: vocabulary read for grammars in %.1f s", self._label, seconds)
            return self._made


def _vocabulary(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise Unsupported("Structured output needs a tokenizer.json, which this model lacks.")
    size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    kinds = [
        markers.read_markers(tokenizer, tools=True, generic=generic) for generic in (False, True)
    ]
    controls = {*tokenizer.eos_token_ids, *(i for kind in kinds for i in kind.tokens.values())}
    text = _as_grammars_need(backend.to_str(), controls)
    return LLTokenizer(text, n_vocab=size, eos_token=sorted(tokenizer.eos_token_ids))


def _as_grammars_need(tokenizer_json: str, ids: Set[int]) -> str:
    """Mark the added tokens with these ids as special, and return the changed tokenizer.json.

    It loses padding, truncation, and the Unicode normaliser, with which llguidance would require
    other tokens than those of the text that a grammar requires.
    """
    # the megabytes of vocabulary and merges stay text: parsing them would hold the interpreter
    content: dict[str, Any] = {**decode(dict[str, msgspec.Raw], tokenizer_json)}
    added = msgspec.json.decode(content["added_tokens"])
    for token in added:
        token["special"] = token["special"] or token["id"] in ids
    content |= {"added_tokens": added, "padding": None, "truncation": None}
    normaliser = msgspec.json.decode(content.get("normalizer", b"null"))
    if (normaliser or {}).get("type") in ("NFC", "NFD", "NFKC", "NFKD"):
        content["normalizer"] = None
    return msgspec.json.encode(content).decode()


def _too_complex(why: str, param: str) -> BadRequest:
    return BadRequest(
        f"{param or 'The grammar'} is too complex for a reply to follow: {why}. Simplify it: fewer "
        "repetitions, alternatives or optional properties.",
        param=param or None,
        code="grammar_too_complex",
    )


def _why(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n<state>")[0].strip()
