"""Tokenising only what changed since a text like it was last tokenised."""

from __future__ import annotations

import logging
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
from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """The characters `start` to `end` of a text are `ids`, shape (n,), in place of `shown`.

    `closing` is the text of the control token that the ids end with; empty where it is none.
    """

    start: int
    end: int
    shown: str
    ids: Tokens
    closing: str

    def holds(self, char: int) -> bool:
        """Whether a character is inside, its first one excepted."""
        return self.start < char < self.end

    def same(self, other: Splice) -> bool:
        """Whether both put the same ids in the same place."""
        return self.ids is other.ids and (self.start, self.end) == (other.start, other.end)


def parted(a: Sequence[Splice], b: Sequence[Splice]) -> int:
    """The character at which the first splice that only one has starts; at the end of all texts if
    they are equal."""
    for mine, theirs in zip(a, b, strict=False):
        if not mine.same(theirs):
            return min(mine.start, theirs.start)
    rest = a[len(b) :] or b[len(a) :]
    return rest[0].start if rest else sys.maxsize


def plain(text: str, splices: Sequence[Splice]) -> str:
    """A text as it was rendered, without its splices."""
    if not splices:
        return text
    parts, at = [], 0
    for splice in splices:
        parts += [text[at : splice.start], splice.shown]
        at = splice.end
    return "".join((*parts, text[at:]))


def place(char: int, splices: Sequence[Splice]) -> int:
    """Where a character of the rendered text stands among the splices; in one, its start."""
    moved = 0
    for splice in splices:
        start = splice.start - moved
        if char <= start:
            break
        if char < start + len(splice.shown):
            return splice.start
        moved += splice.end - splice.start - len(splice.shown)
    return char + moved


log = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """A rendered text with its ids, and where its anchors are.

    An anchor is a control token of the template's own, or of a splice. `starts` and `ends` are
    character offsets, ascending, `at` the same anchors' positions in `ids`; shapes (anchors,).
    """

    text: str
    ids: Tokens
    starts: Ints
    ends: Ints
    at: Ints
    splices: tuple[Splice, ...] = ()

    @property
    def plain(self) -> str:
        """The text as it was rendered, without its splices."""
        return plain(self.text, self.splices)

    @property
    def nbytes(self) -> int:
        """Bytes held, the text's at four a character."""
        return 4 * len(self.text) + self.ids.nbytes + 3 * self.starts.nbytes

    def floor(self, char: int) -> int:
        """The position of the last anchor that starts at or before a character; else 0."""
        i = int(np.searchsorted(self.starts, char, side="right")) - 1
        return int(self.at[i]) if i >= 0 else 0

    def char(self, position: int) -> int:
        """The character at which the last anchor at or before a token position starts; else 0."""
        i = int(np.searchsorted(self.at, position, side="right")) - 1
        return int(self.starts[i]) if i >= 0 else 0


class Anchors:
    """Finds the control tokens that cut a text into pieces tokenised independently.

    Those are matched on the raw text, before any normaliser sees it, and without a look at
    their neighbours. All added tokens so matched compete for the text, so all are looked for.
    """

    def __init__(self, added: Sequence[Added], controls: Sequence[Added], *, normalizer: bool):
        raw = [t for t in added if not t.single_word and not (t.normalized and normalizer)]
        chosen = {token.id for token in controls}
        self._ids = {token.text: token.id for token in raw if token.id in chosen}
        self._pattern = any_of(token.text for token in raw)
        self.longest = max((len(token.text) for token in raw), default=0)
        top = max(chosen, default=0)
        self._is_anchor = np.zeros(top + 2, dtype=bool)
        self._is_anchor[list(self._ids.values())] = True

    def scan(self, text: str, start: int = 0, end: int = sys.maxsize) -> list[re.Match[str]]:
        """The anchors in a part of a text, leftmost and longest first."""
        return [m for m in self._pattern.finditer(text, start, end) if m.group() in self._ids]

    def id_of(self, match: re.Match[str]) -> int:
        return self._ids[match.group()]

    def positions(self, ids: Tokens) -> Ints:
        """Where ids are anchors, shape (k,)."""
        clipped = np.minimum(ids, len(self._is_anchor) - 1)
        return np.flatnonzero(self._is_anchor[clipped])

    def align(self, ids: Tokens, matches: Sequence[re.Match[str]]) -> Ints | None:
        """The position of each match in ids, by order; None if they do not correspond."""
        at = self.positions(ids)
        found = [self._ids[match.group()] for match in matches]
        if len(at) != len(found) or ids[at].tolist() != found:
            return None
        return at


class Tokeniser:
    """Encodes rendered texts, reusing the ids of texts that begin alike. Safe in any thread.

    A new text is compared with the last few of its session and of all; the ids up to the last
    shared anchor are reused, and the text is encoded again *from that anchor on*, whose id is
    dropped then: a cut beside a special token is not the same for tokens that strip blanks, nor
    for vocabularies that mark the start of a text.
    """

    def __init__(self, codec: Codec, anchors: Anchors, *, incremental: bool = True):
        self._codec = codec
        self._anchors = anchors
        self.incremental = incremental
        self._recent = Recent()

    def encode(
        self, text: str, session: str | None = None, splices: tuple[Splice, ...] = ()
    ) -> Tokenised:
        """Tokenise a rendered text (with sentinels) and remember it.

        Its `splices` keep their ids; where these do not fit into the text, it is tokenised as it
        was rendered. Raises BadRequest if the text is not Unicode.
        """
        if not self.incremental:
            return self.full(plain(text, splices))
        old, shared = self._recent.nearest(text, session)
        new = self.extend(old, shared, text, splices) if old is not None else None
        if new is None:
            new = self.full(text, splices)
        if len(new.at):
            follows = old is not None and shared >= _SAME * len(old.text)
            self._recent.add(new, session, old if follows else None)
        return new

    def full(self, text: str, splices: tuple[Splice, ...] = ()) -> Tokenised:
        """Tokenise all of a text, whatever is remembered."""
        ids = self._ids(text, 0, splices)
        matches = self._anchors.scan(text)
        at = self._anchors.align(ids, matches)
        if at is None:
            if splices:
                return self.full(plain(text, splices))
            matches, at = [], np.zeros(0, dtype=np.int64)
        return Tokenised(text, ids, _starts(matches), _ends(matches), at, splices)

    def extend(
        self, old: Tokenised, shared: int, text: str, splices: tuple[Splice, ...] = ()
    ) -> Tokenised | None:
        """Tokenise a text whose first `shared` characters are also old's; None if it can't be."""
        shared = min(shared, parted(old.splices, splices))
        # An anchor counts as shared if no longer token could start at or before it in either.
        sure = int(np.searchsorted(old.starts, shared - self._anchors.longest, side="right")) - 1
        sure = _outside(old.starts[: sure + 1].tolist(), splices) - 1
        first = max(sure, 0)
        matches = self._anchors.scan(text, int(old.starts[sure]) if sure >= 0 else 0)
        same = 0
        while (
            same < len(matches)
            and first + same < len(old.starts)
            and matches[same].start() == old.starts[first + same]
            and matches[same].end() == old.ends[first + same] <= shared
        ):
            same += 1
        same = _outside([m.start() for m in matches[:same]], splices)
        if not same:
            return None
        keep = first + same - 1
        tail = matches[same - 1 :]
        ids = self._ids(text, tail[0].start(), splices)
        at = self._anchors.align(ids, tail)
        if at is None or at[0] != 0:
            return None
        cut = int(old.at[keep])
        return Tokenised(
            text,
            np.concatenate((old.ids[:cut], ids)),
            np.concatenate((old.starts[:keep], _starts(tail))),
            np.concatenate((old.ends[:keep], _ends(tail))),
            np.concatenate((old.at[:keep], at + cut)),
            splices,
        )

    def _ids(self, text: str, start: int, splices: Sequence[Splice]) -> Tokens:
        """The ids of a text from a character on, which is in no splice.

        What follows a splice is encoded behind the control token that closes it, as it would be
        behind that token in the text.
        """
        if not splices:
            return self._codec.encode(text[start:])
        parts: list[Tokens] = []
        closing = ""
        for splice in splices:
            if splice.start >= start:
                parts += [self._behind(closing, text[start : splice.start]), splice.ids]
                start, closing = splice.end, splice.closing
        return np.concatenate((*parts, self._behind(closing, text[start:])))

    def _behind(self, closing: str, text: str) -> Tokens:
        return self._codec.encode(closing + text)[1 if closing else 0 :]

    def position(self, prompt: Tokenised, char: int) -> int:
        """The number of ids that a prompt shares with its text cut at a character."""
        if char >= len(prompt.text):
            return len(prompt.ids)
        i = int(np.searchsorted(prompt.starts, char, side="right")) - 1
        start, at = (int(prompt.starts[i]), int(prompt.at[i])) if i >= 0 else (0, 0)
        if start == char:
            return at
        cut = self._codec.encode(prompt.text[start:char])
        same = cut[: len(prompt.ids) - at] == prompt.ids[at : at + len(cut)]
        return at + (len(same) if same.all() else int(np.argmin(same)))


_SAME = 0.75
"""A text that shares this much of an older one takes its place: it is the next turn of it."""


def _outside(chars: Sequence[int], splices: Sequence[Splice]) -> int:
    """The number of characters up to the last one that is in no splice."""
    n = len(chars)
    while n and any(splice.holds(chars[n - 1]) for splice in splices):
        n -= 1
    return n


def _starts(matches: Sequence[re.Match[str]]) -> Ints:
    return np.fromiter((m.start() for m in matches), dtype=np.int64, count=len(matches))


def _ends(matches: Sequence[re.Match[str]]) -> Ints:
    return np.fromiter((m.end() for m in matches), dtype=np.int64, count=len(matches))


class Recent:
    """The last few tokenised texts, of each session and of all; bounded in count and bytes.

    Safe in any thread; nothing is computed under the lock but sums.
    """

    def __init__(self, *, count: int = 128, each: int = 4, latest: int = 8, limit: int = 64 << 20):
        self._latest = latest
        self._held: LatestByGroup[str | None, Tokenised] = LatestByGroup(
            each=each, count=count, limit=limit, size=lambda text: text.nbytes
        )

    def nearest(self, text: str, session: str | None) -> tuple[Tokenised | None, int]:
        """The remembered text with the longest common prefix, and its length in characters."""
        held = self._held.items()
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
        """Remember a text, in the place of one of its session that it continues.

        What was remembered first is forgotten first.
        """
        replaced = () if continues is None else (continues,)
        each = self._latest if session is None else None
        self._held.add(session, new, replaced=replaced, each=each)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes that the remembered texts hold."""
        return self._held.total


_PIECES = (
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


def incremental_holds(tokeniser: Tokeniser, controls: Sequence[Added], rendered: str) -> bool:
    """Compare both ways on texts made of awkward pieces around control tokens.

    `rendered` is a conversation as the template renders it; its control tokens come first.
    """
    inside = [token.text for token in controls if token.text in rendered]
    others = [token.text for token in controls if token.text not in rendered]
    for a, b in _pairs(inside[:12] + others[:4]):
        text = rendered
        for piece, token in zip(_PIECES, (a, b) * len(_PIECES), strict=False):
            longer = text + piece + token + piece
            old = tokeniser.full(text)
            new = tokeniser.extend(old, common_characters(text, longer), longer)
            if new is not None and new.ids.tolist() != tokeniser.full(longer).ids.tolist():
                return False
            text = longer
    return True


def _pairs(tokens: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(tokens, [*tokens[1:], *tokens[:1]], strict=True))
