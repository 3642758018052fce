"""Tokens of conversations, from which their next tokens are guessed; kept between turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from mlxcache.common_prefix import common_length
from mlxcache.guess.candidates import MOST_MATCHED, MOST_TOKENS, Guess, TokenLog
from mlxcache.types import NO_TOKENS, Tokens, join_ids, token_ids

MOST_HISTORIES = 16
"""Most conversations that are kept while no reply uses them."""

SHARED = 0.5
"""Share of a conversation's tokens with which a prompt must begin to continue it.

If the prompt is shorter than the conversation, it is a share of the prompt's tokens.
"""


class History:
    """Tokens of one conversation: prompts, replies, and tool results as a reply would write them.

    `most`: maximum number of tokens that guesses are taken from. Not thread-safe.
    """

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
        """Bytes of all tokens and of their index."""
        return self._log.nbytes + self._ids.nbytes

    @property
    def said(self) -> Tokens:
        """Token ids of the conversation so far, shape (n,)."""
        self._join()
        return self._ids

    def shared(self, ids: Tokens) -> int:
        """Return how many tokens `ids` and the conversation so far begin with in common."""
        return int(common_length(self.said, ids))

    def follow(self, ids: Tokens) -> None:
        """Add the prompt `ids` of the next reply, except the beginning that is known already.

        If the prompt differs from the conversation so far, what differs is added as another text.
        """
        known = self.shared(ids)
        if known < len(self._ids):  # another branch: with the text before it, for its context
            self._log.cut()
            known = max(0, known - MOST_MATCHED)
        self._log.extend(ids[known:])
        self._ids = ids
        self._newest.extend(ids[-MOST_MATCHED:].tolist())

    def add_forms(self, forms: Mapping[str, Tokens]) -> None:
        """Add tool results as a reply would repeat them, unless they were added before.

        `forms`: token ids of these forms, by the text of the result.
        """
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
        """Append tokens of the reply."""
        self._log.extend(tokens)
        self._reply += tokens
        self._newest.extend(tokens)

    def guess(self, count: int) -> Guess:
        """Return up to `count` tokens that may come next, as `TokenLog.guess` does."""
        return self._log.guess(count)

    def _join(self) -> None:
        if self._reply:
            self._ids = join_ids(self._ids, token_ids(self._reply))
            self._reply = []


class Histories:
    """The most recently used histories of all owners. Not thread-safe.

    `most`: maximum number of histories. `tokens`: the `most` of each `History`.
    """

    def __init__(self, most: int = MOST_HISTORIES, tokens: int = MOST_TOKENS):
        self._most, self._tokens = most, tokens
        self._kept: OrderedDict[int, tuple[str | None, History]] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, owner: str | None, ids: Tokens) -> History:
        """Return the history of the conversation that the prompt `ids` continues; add `ids` to it.

        It is the kept history of `owner` that begins with the most tokens in common with `ids`, at
        least the share `SHARED` of the shorter of the two; if there is none, a new one. It is
        removed from the kept ones, so that no other reply uses it; `keep` adds it again.
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
        """Keep the history of a conversation whose reply has ended, for its next turn.

        If there are too many now, the one that was kept the longest ago is dropped.
        """
        self._made += 1
        self._kept[self._made] = owner, history
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drop all kept histories, those of all owners."""
        self._kept.clear()
