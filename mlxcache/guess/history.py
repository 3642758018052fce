"""Tokens of conversations, kept between turns, and earlier text in them that is like their end.

The index is a chain of positions with the same hash of their last three tokens, as in LZ77
compressors (https://www.rfc-editor.org/rfc/rfc1951, section 4). It takes about 12 bytes a token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxcache.common_prefix import common_length
from mlxcache.types import NO_TOKENS, Tokens, join_ids, token_ids

GRAM = 3
"""Newest tokens that an earlier place must have in common with the end to be a candidate."""

LOOK = 16
"""Most candidates that are compared with the end, the newest first."""

MOST_MATCHED = 64
"""Most tokens before a candidate that are compared with those before the end."""

MOST_TOKENS = 1 << 18
"""Default of the most tokens that a log holds, about 3 MB."""

BREAK = -1
"""Token id that separates two texts in a log; no match spans both."""

_BULK = 256  # tokens from which NumPy is faster than a loop
_LEAST_SLOTS = 1 << 10
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # odd, of Knuth's and MurmurHash's multiplications
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next, as they followed an earlier place in the text.

    `matched`: number of tokens before that place which equal the newest tokens; 0 if there is no
    guess.
    """

    tokens: tuple[int, ...] = ()
    matched: int = 0


NO_GUESS = Guess()


class TokenLog:
    """Token ids of a text, with an index of each three tokens in a row. Not thread-safe.

    `most`: maximum number of tokens; the older half is dropped when there are more.
    """

    def __init__(self, most: int = MOST_TOKENS):
        self._most = most
        self._tokens = array("i")
        self._previous = array("i")
        self._heads = array("i", [-1]) * _LEAST_SLOTS

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        return 4 * (len(self._tokens) + len(self._previous) + len(self._heads))

    def extend(self, ids: Sequence[int] | Tokens) -> None:
        if len(self._tokens) + len(ids) > self._most:
            kept = self._most // 2
            self._tokens = self._tokens[max(0, len(self._tokens) - kept) :]
            self._rebuild()
            ids = ids[-kept:]
        if len(ids) >= _BULK or len(self._tokens) + len(ids) > len(self._heads):
            self._extend_many(token_ids(ids))
        else:
            for token in ids:
                self._append(int(token))

    def cut(self) -> None:
        """End the text so far: what is appended later is another text, and no match spans both."""
        if self._tokens and self._tokens[-1] != BREAK:
            self.extend([BREAK] * GRAM)

    def _append(self, token: int) -> None:
        tokens, heads = self._tokens, self._heads
        tokens.append(token)
        if len(tokens) < GRAM:
            self._previous.append(-1)
            return
        slot = _hash(tokens[-3], tokens[-2], token) & (len(heads) - 1)
        self._previous.append(heads[slot])
        heads[slot] = len(tokens) - 1

    def _extend_many(self, ids: Tokens) -> None:
        first = len(self._tokens)
        self._tokens.frombytes(ids.tobytes())
        if len(self._tokens) > len(self._heads):
            self._rebuild()
        else:
            self._index(first)

    def _rebuild(self) -> None:
        slots = _LEAST_SLOTS
        while slots < len(self._tokens):
            slots *= 2
        self._heads = array("i", [-1]) * slots
        self._previous = array("i")
        self._index(0)

    def _index(self, first: int) -> None:
        """Add the positions from `first` on: each refers to the last one with its hash."""
        while len(self._previous) < min(GRAM - 1, len(self._tokens)):
            self._previous.append(-1)
        start = max(first, GRAM - 1)
        if start >= len(self._tokens):
            return
        said = np.frombuffer(self._tokens, np.int32)
        near = said[start - 2 :].astype(np.uint32)
        heads = np.frombuffer(self._heads, np.int32)  # a view: writes change the index
        slots = _hashes(near[:-2], near[1:-1], near[2:]) & np.uint32(len(heads) - 1)
        order = np.argsort(slots, kind="stable")
        placed, at = slots[order], order.astype(np.int32) + start
        opens = np.empty(len(placed), np.bool_)
        opens[:1] = True
        opens[1:] = placed[1:] != placed[:-1]
        before = np.empty(len(placed), np.int32)
        before[1:] = at[:-1]
        before[opens] = heads[placed[opens]]
        closes = np.append(opens[1:], True)
        heads[placed[closes]] = at[closes]
        previous = np.empty(len(placed), np.int32)
        previous[order] = before
        self._previous.frombytes(previous.tobytes())

    def guess(self, count: int) -> Guess:
        """Return up to `count` tokens that followed the earlier place most like the end.

        The `LOOK` newest places after the same three tokens are compared. The one is chosen before
        which the greatest number of tokens equals the newest ones; of several, the newest.
        """
        tokens, previous = self._tokens, self._previous
        end = len(tokens) - 1
        if end < GRAM or count < 1:
            return NO_GUESS
        best, found, place = GRAM - 1, -1, previous[end]
        for _ in range(LOOK):
            if place < 0:
                break
            ends = tokens[place + 1] == BREAK  # nothing followed there
            if not ends and place >= best and tokens[place - best] == tokens[end - best]:
                matched, most = 0, min(MOST_MATCHED, place + 1)
                while matched < most and tokens[place - matched] == tokens[end - matched]:
                    matched += 1
                if matched > best:
                    best, found = matched, place
                    if matched == MOST_MATCHED:
                        break
            place = previous[place]
        if found < 0 or tokens[end] == BREAK:
            return NO_GUESS
        said = _following(tokens, found, count)
        return Guess(said, best) if said else NO_GUESS


def _following(tokens: array[int], place: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens after `place`, repeated if there are fewer; up to another text."""
    said = tokens[place + 1 : place + 1 + count].tolist()
    at = 0
    while len(said) < count:
        said.append(said[at])
        at += 1
    return tuple(said[: said.index(BREAK)] if BREAK in said else said)


def _hash(a: int, b: int, c: int) -> int:
    mixed = (a * _FACTORS[0] ^ b * _FACTORS[1] ^ c * _FACTORS[2]) & _WORD
    return mixed ^ mixed >> 15


def _hashes(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    one, two, three = (np.uint32(factor) for factor in _FACTORS)
    mixed = a * one ^ b * two ^ c * three
    return np.asarray(mixed ^ mixed >> np.uint32(15))


# -- conversations ---------------------------------------------------------------------------------


MOST_HISTORIES = 16
"""Most conversations that are kept while no reply uses them."""

SHARED = 0.5
"""Share of the shorter of conversation and prompt with which both must begin alike."""


class History:
    """Tokens of one conversation: prompts, replies, tool results as a reply would write them."""

    def __init__(self, most: int = MOST_TOKENS):
        self._log = TokenLog(most)
        self._ids = NO_TOKENS
        self._reply: list[int] = []
        self._forms: set[int] = set()
        self._newest: deque[int] = deque(maxlen=MOST_MATCHED)

    def __len__(self) -> int:
        return len(self._log)

    @property
    def nbytes(self) -> int:
        return self._log.nbytes + self._ids.nbytes

    @property
    def said(self) -> Tokens:
        self._join()
        return self._ids

    def shared(self, ids: Tokens) -> int:
        return int(common_length(self.said, ids))

    def follow(self, ids: Tokens) -> None:
        """Add the prompt `ids` of the next reply, except the beginning that is known already."""
        known = self.shared(ids)
        if known < len(self._ids):  # another branch: with the text before it, for its context
            self._log.cut()
            known = max(0, known - MOST_MATCHED)
        self._log.extend(ids[known:])
        self._ids = ids
        self._newest.extend(ids[-MOST_MATCHED:].tolist())

    def add_forms(self, forms: Mapping[str, Tokens]) -> None:
        """Add tool results as a reply would repeat them, by the results' texts."""
        new = [text for text in forms if hash(text) not in self._forms]
        if not new:
            return
        self._forms.update(map(hash, new))
        for key in new:
            self._log.cut()
            self._log.extend(forms[key])
        self._log.cut()
        self._log.extend(list(self._newest))

    def say(self, tokens: Sequence[int]) -> None:
        self._log.extend(tokens)
        self._reply += tokens
        self._newest.extend(tokens)

    def guess(self, count: int) -> Guess:
        return self._log.guess(count)

    def _join(self) -> None:
        if self._reply:
            self._ids = join_ids(self._ids, token_ids(self._reply))
            self._reply = []


class Histories:
    """The most recently used histories of all owners. Not thread-safe."""

    def __init__(self, most: int = MOST_HISTORIES, tokens: int = MOST_TOKENS):
        self._most, self._tokens = most, tokens
        self._kept: OrderedDict[int, tuple[str | None, History]] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, owner: str | None, ids: Tokens) -> History:
        """Return the history of the conversation that the prompt `ids` continues, with `ids` added.

        It is the kept history of `owner` that begins with the most tokens in common with `ids`, at
        least the share `SHARED`, else a new one. It is not kept any more, so that no other reply
        uses it.
        """
        found, most = None, 0
        for number, (theirs, history) in self._kept.items():
            known = history.shared(ids) if theirs == owner else 0
            if known > most and known >= SHARED * min(len(ids), len(history.said)):
                found, most = number, known
        history = self._kept.pop(found)[1] if found is not None else History(self._tokens)
        history.follow(ids)
        return history

    def keep(self, owner: str | None, history: History) -> None:
        self._made += 1
        self._kept[self._made] = owner, history
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()
