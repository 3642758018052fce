"""Incremental tokenisation: encode only what differs from a text that was encoded before.

A rendered text is cut at control tokens, which tokenizers match before anything else. A splice
gives part of a text known ids instead of its encoding; `replay` makes splices.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxcache.common_prefix import common_characters
from mlxcache.lru import LatestByGroup
from mlxcache.prompt.codec import Codec
from mlxcache.prompt.tokenizer import Added, any_of
from mlxcache.types import Tokens, join_ids

Ints = npt.NDArray[np.int64]

# -- splices -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """Known token ids for a range of characters.

    Characters [start, end) of the spliced text stand for `ids`; the template rendered `shown`
    there. `closing`: text of the control token that the ids end with, or empty.
    """

    start: int
    end: int
    shown: str
    ids: Tokens
    closing: str

    def covers(self, char: int) -> bool:
        return self.start < char < self.end


def first_difference(a: Sequence[Splice], b: Sequence[Splice]) -> int:
    """Return the character of the first splice that only one of two lists has, or `sys.maxsize`."""
    for mine, theirs in zip(a, b, strict=False):
        if mine.ids is not theirs.ids or (mine.start, mine.end) != (theirs.start, theirs.end):
            return min(mine.start, theirs.start)
    rest = a[len(b) :] or b[len(a) :]
    return rest[0].start if rest else sys.maxsize


def remove_splices(text: str, splices: Sequence[Splice]) -> str:
    if not splices:
        return text
    parts, at = [], 0
    for splice in splices:
        parts += [text[at : splice.start], splice.shown]
        at = splice.end
    return "".join((*parts, text[at:]))


def spliced_position(char: int, splices: Sequence[Splice]) -> int:
    """Convert an offset in the rendered text; one inside a splice becomes the splice's start."""
    moved = 0
    for splice in splices:
        start = splice.start - moved
        if char <= start:
            break
        if char < start + len(splice.shown):
            return splice.start
        moved += splice.end - splice.start - len(splice.shown)
    return char + moved


# -- tokenised texts ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """A spliced text with its token ids and the places of its control tokens.

    `starts` and `ends` are their character offsets in `text`, ascending; `at` are their positions
    in `ids`. All three are empty if `ids` do not have the control tokens of `text`.
    """

    text: str
    ids: Tokens
    starts: Ints
    ends: Ints
    at: Ints
    splices: tuple[Splice, ...] = ()

    @property
    def rendered(self) -> str:
        return remove_splices(self.text, self.splices)

    @property
    def nbytes(self) -> int:
        return 4 * len(self.text) + self.ids.nbytes + 3 * self.starts.nbytes

    def position_before(self, char: int) -> int:
        """Return the token position of the last control token at or before a character, or 0."""
        return self._last_before(self.starts, char, self.at)

    def char_before(self, position: int) -> int:
        """Return the character of the last control token at or before a token position, or 0."""
        return self._last_before(self.at, position, self.starts)

    @staticmethod
    def _last_before(sought: Ints, place: int, result: Ints) -> int:
        i = int(np.searchsorted(sought, place, side="right")) - 1
        return int(result[i]) if i >= 0 else 0


class ControlTokenFinder:
    """Finds the control tokens at which a text can be cut.

    These are those that the tokenizer matches on the raw text, before its normaliser and regardless
    of neighbouring characters. Other added tokens may take the same characters first, so they are
    searched too, but not returned.
    """

    def __init__(self, added: Sequence[Added], controls: Sequence[Added], *, normalizer: bool):
        raw = [t for t in added if not t.single_word and not (t.normalized and normalizer)]
        chosen = {token.id for token in controls}
        self._ids = {token.text: token.id for token in raw if token.id in chosen}
        self._pattern = any_of(token.text for token in raw)
        self.longest = max((len(token.text) for token in raw), default=0)
        top = max(chosen, default=0)
        self._is_control = np.zeros(top + 2, dtype=bool)
        self._is_control[list(self._ids.values())] = True

    def find_all(self, text: str, start: int = 0, end: int = sys.maxsize) -> list[re.Match[str]]:
        return [m for m in self._pattern.finditer(text, start, end) if m.group() in self._ids]

    def id_of(self, match: re.Match[str]) -> int:
        return self._ids[match.group()]

    def positions(self, ids: Tokens) -> Ints:
        clipped = np.minimum(ids, len(self._is_control) - 1)
        return np.flatnonzero(self._is_control[clipped])

    def align(self, ids: Tokens, matches: Sequence[re.Match[str]]) -> Ints | None:
        """Return the position in `ids` of each match; None if they have other control tokens."""
        at = self.positions(ids)
        found = [self._ids[match.group()] for match in matches]
        if len(at) != len(found) or ids[at].tolist() != found:
            return None
        return at


class Tokeniser:
    """Encodes rendered texts and reuses the ids of recent ones. Thread-safe.

    The ids before the last control token shared with a recent text are reused, and the text from
    that token on is encoded. The cut is not after the token, because the text after it would then
    be encoded as the start of a text, which gives other ids if tokens strip white space or the
    vocabulary marks the start of a text.

    Unless `incremental`, every text is encoded as a whole.
    """

    def __init__(self, codec: Codec, finder: ControlTokenFinder, *, incremental: bool = True):
        self._codec = codec
        self._finder = finder
        self._incremental = incremental
        self._recent = RecentTexts()

    def encode(
        self, text: str, session: str | None = None, splices: tuple[Splice, ...] = ()
    ) -> Tokenised:
        """Tokenise a rendered text, and remember it under the label `session` for later calls.

        Unless `incremental`, or if the ids made with the splices do not have the control tokens of
        the text, it is tokenised without splices. Raises BadRequest if `text` is not valid Unicode.
        """
        if not self._incremental:
            return self.encode_whole(remove_splices(text, splices))
        old, shared = self._recent.find_nearest(text, session)
        new = self.extend(old, shared, text, splices) if old is not None else None
        if new is None:
            new = self.encode_whole(text, splices)
        if len(new.at):
            follows = old is not None and shared >= _CONTINUES * len(old.text)
            self._recent.add(new, session, old if follows else None)
        return new

    def encode_whole(self, text: str, splices: tuple[Splice, ...] = ()) -> Tokenised:
        ids = self._ids(text, 0, splices)
        matches = self._finder.find_all(text)
        at = self._finder.align(ids, matches)
        if at is None:
            if splices:
                return self.encode_whole(remove_splices(text, splices))
            matches, at = [], np.zeros(0, dtype=np.int64)
        return Tokenised(text, ids, *_spans(matches), at, splices)

    def extend(
        self, old: Tokenised, shared: int, text: str, splices: tuple[Splice, ...] = ()
    ) -> Tokenised | None:
        """Tokenise a text whose first `shared` characters are those of `old`, reusing their ids.

        Returns None if no control token is shared, or if the new ids do not have the control tokens
        of the text: the caller then encodes the whole text.
        """
        shared = min(shared, first_difference(old.splices, splices))
        # A control token is shared only if no longer token could start there in either text.
        sure = int(np.searchsorted(old.starts, shared - self._finder.longest, side="right")) - 1
        sure = _count_outside(old.starts[: sure + 1].tolist(), splices) - 1
        first = max(sure, 0)
        matches = self._finder.find_all(text, int(old.starts[sure]) if sure >= 0 else 0)
        same = 0
        while (
            same < len(matches)
            and first + same < len(old.starts)
            and matches[same].start() == old.starts[first + same]
            and matches[same].end() == old.ends[first + same] <= shared
        ):
            same += 1
        same = _count_outside([match.start() for match in matches[:same]], splices)
        if same == 0:
            return None
        keep = first + same - 1
        tail = matches[same - 1 :]
        ids = self._ids(text, tail[0].start(), splices)
        at = self._finder.align(ids, tail)
        if at is None or at[0] != 0:
            return None
        cut = int(old.at[keep])
        starts, ends = _spans(tail)
        return Tokenised(
            text,
            join_ids(old.ids[:cut], ids),
            np.concatenate((old.starts[:keep], starts)),
            np.concatenate((old.ends[:keep], ends)),
            np.concatenate((old.at[:keep], at + cut)),
            splices,
        )

    def _ids(self, text: str, start: int, splices: Sequence[Splice]) -> Tokens:
        """Encode a text from character `start`, which is not inside a splice.

        Text after a splice is encoded together with the control token that closes the splice, so
        that it gets the same ids as after that token in the text.
        """
        if not splices:
            return self._codec.encode(text[start:])
        parts: list[Tokens] = []
        closing = ""
        for splice in splices:
            if splice.start >= start:
                parts += [self._encode_after(closing, text[start : splice.start]), splice.ids]
                start, closing = splice.end, splice.closing
        return join_ids(*parts, self._encode_after(closing, text[start:]))

    def _encode_after(self, closing: str, text: str) -> Tokens:
        return self._codec.encode(closing + text)[1 if closing else 0 :]

    def position(self, prompt: Tokenised, char: int) -> int:
        """Return the number of leading ids that encode the first `char` characters of a prompt."""
        if char >= len(prompt.text):
            return len(prompt.ids)
        i = int(np.searchsorted(prompt.starts, char, side="right")) - 1
        start, at = (int(prompt.starts[i]), int(prompt.at[i])) if i >= 0 else (0, 0)
        if start == char:
            return at
        cut = self._codec.encode(prompt.text[start:char])
        same = cut[: len(prompt.ids) - at] == prompt.ids[at : at + len(cut)]
        return at + (len(same) if same.all() else int(np.argmin(same)))


_CONTINUES = 0.75


def _count_outside(chars: Sequence[int], splices: Sequence[Splice]) -> int:
    n = len(chars)
    while n and any(splice.covers(chars[n - 1]) for splice in splices):
        n -= 1
    return n


def _spans(matches: Sequence[re.Match[str]]) -> tuple[Ints, Ints]:
    starts, ends = (
        np.fromiter(map(place, matches), dtype=np.int64, count=len(matches))
        for place in (re.Match.start, re.Match.end)
    )
    return starts, ends


class RecentTexts:
    """The latest tokenised texts of each session, with which new texts are compared. Thread-safe.

    Keeps at most `each` texts of a session, and `latest` of requests without one.
    """

    def __init__(self, *, count: int = 128, each: int = 4, latest: int = 8, limit: int = 64 << 20):
        self._latest = latest
        self.held: LatestByGroup[str | None, Tokenised] = LatestByGroup(
            each=each, count=count, limit=limit, size=lambda text: text.nbytes
        )

    def find_nearest(self, text: str, session: str | None) -> tuple[Tokenised | None, int]:
        """Return the text that shares the longest prefix, and its length in characters."""
        held = self.held.items()
        latest = held[-self._latest :]
        near = [h for h in held[: -self._latest] if session is not None and h[0] == session]
        best: Tokenised | None = None
        shared = 0
        for _, candidate in reversed((*near, *latest)):
            length = common_characters(candidate.text, text)
            if length > shared:
                best, shared = candidate, length
        return best, shared

    def add(self, new: Tokenised, session: str | None, continues: Tokenised | None = None) -> None:
        replaced = () if continues is None else (continues,)
        each = self._latest if session is None else None
        self.held.add(session, new, replaced=replaced, each=each)


# -- the check at load -------------------------------------------------------------------------

_AWKWARD_TEXTS = (
    "user\nplain words here",
    "\n",
    "  two blanks before, two behind  ",
    "def f(x):\n\treturn x  # 12345\n\n",
    "1234567890",
    "\u65e5\u672c\u8a9e \u00e9e\u0301 \U0001f980\U0001f469\u200d\U0001f4bb",
    " ",
    "\u0301combining first\r\n",
    "<tag attr='1'>&amp;</tag> ...'s",
)


def check_incremental(tokeniser: Tokeniser, controls: Sequence[Added], rendered: str) -> bool:
    """Return whether incremental encoding gives the same ids as encoding whole texts.

    `rendered`, a conversation, is extended step by step by unusual texts and control tokens.
    """
    inside = [token.text for token in controls if token.text in rendered]
    others = [token.text for token in controls if token.text not in rendered]
    tried = inside[:12] + others[:4]
    for a, b in zip(tried, [*tried[1:], *tried[:1]], strict=True):
        text = rendered
        for piece, token in zip(_AWKWARD_TEXTS, (a, b) * len(_AWKWARD_TEXTS), strict=False):
            longer = text + piece + token + piece
            old = tokeniser.encode_whole(text)
            new = tokeniser.extend(old, common_characters(text, longer), longer)
            if new is not None and new.ids.tolist() != tokeniser.encode_whole(longer).ids.tolist():
                return False
            text = longer
    return True
