"""Exact replay: a reply that comes back is put into the prompt as the model wrote it.

Clients send replies back written anew: JSON with other blanks, text without the white space at
its end. The template and the tokenizer then make other tokens of it than those that were computed.
So where a rendered text begins as an earlier prompt did, and goes on with what a reply to that
prompt says, the ids of that reply stand there in place of the text.

What the reply says is compared by reading both with the model's own output parser. So an edit,
another order of calls, or thinking that the template leaves out are no match, and the text is
tokenised as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxcache.prompt.codec import Codec
from mlxcache.prompt.incremental import Splice
from mlxcache.prompt.marks import learn_closer
from mlxcache.prompt.renderer import Renderer
from mlxcache.prompt.replies import TAIL, Generated, Reading, Replies, Said, Spoken, Tools
from mlxcache.types import Tokens

_LEAST_WINDOW = 4096
_WINDOW = 4
"""How far behind a prompt a reply may reach: a few times its own characters."""

_MOST_ENDS = 16
"""Places at which a reply may end that are tried."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A text with the replies in it that are put in exactly.

    `digest`, `tail`: of the text as it was rendered. `changed`: some reply's ids are not those that
    its text would have.
    """

    text: str
    splices: tuple[Splice, ...] = ()
    digest: bytes = b""
    changed: bool = False
    tail: str = ""


@dataclass(frozen=True, slots=True)
class _Fit:
    """How a reply stands in a rendered text: as `shown`, and `guard` includes what must follow."""

    shown: str
    guard: str
    ids: Tokens
    raw: str
    closing: str
    changes: bool


class Replay:
    """Finds replies in rendered texts. Safe in any thread.

    `steady`: a rendered text as it would be in another process.
    """

    def __init__(
        self,
        reading: Reading,
        codec: Codec,
        renderer: Renderer,
        steady: Callable[[str], str],
        replies: Replies,
    ):
        self.replies = replies
        self._reading, self._anchors = reading, reading.anchors
        self._codec, self._steady = codec, steady
        self._closer = learn_closer(renderer, reading.anchors)

    def thought(self, history: bytes, message: Mapping[str, Any], tools: Tools) -> str:
        """What was thought behind a history in the newest reply that has a message's text and
        calls; empty if there is none."""
        said = Said.in_message(message)
        if said is None:
            return ""
        for reply in reversed(self.replies.behind(history)):
            spoken = self._reading.spoken(reply, tools)
            if spoken is not None and spoken.said.same_but_thinking(said):
                return spoken.said.thinking
        return ""

    def replayed(self, text: str, tools: Tools, *, on: bool = True) -> Replayed:
        """A rendered text with every reply put in that is found, if this is `on`. `tools`: the
        conversation's."""
        walk = hashlib.blake2b(digest_size=16)
        steady = self._steady(text)
        parts: list[str] = []
        splices: list[Splice] = []
        hashed = done = length = 0
        changed = False
        for at in self.replies.places(steady) if on else ():
            if at < done:
                continue
            walk.update(steady[hashed:at].encode("utf-8", "surrogatepass"))
            hashed = at
            fit = self._best(text, at, self.replies.to(walk.digest()), tools)
            if fit is None:
                continue
            parts += [text[done:at], fit.raw]
            length += at - done
            end = length + len(fit.raw)
            splices.append(Splice(length, end, fit.shown, fit.ids, fit.closing))
            length, done, changed = end, at + len(fit.shown), changed or fit.changes
        walk.update(steady[hashed:].encode("utf-8", "surrogatepass"))
        parts.append(text[done:])
        spliced = "".join(parts) if splices else text
        return Replayed(spliced, tuple(splices), walk.digest(), changed, steady[-TAIL:])

    def _best(self, text: str, at: int, replies: Sequence[Generated], tools: Tools) -> _Fit | None:
        for reply in reversed(replies):
            fit = reply.fitted
            if fit is not None and text.startswith(fit.guard, at):
                assert isinstance(fit, _Fit)
                return fit
            fit = self._fit(text, at, reply, tools)
            if fit is not None:
                reply.fitted = fit
                return fit
        return None

    def _fit(self, text: str, at: int, reply: Generated, tools: Tools) -> _Fit | None:
        """How the text from a character on says the same as a reply; None if it does not."""
        spoken = self._reading.spoken(reply, tools)
        if spoken is None:
            return None
        for match in self._ends(text, at, spoken):
            shown = text[at : match.start()]
            known = hash(shown)
            if known in reply.refused:
                continue
            # A template that leaves out what marks even an empty thought is followed.
            if self._reading.thinks(shown) == self._reading.thinks(spoken.raw):
                said = self._reading.said(self._codec.encode(shown).tolist(), reply, tools)
                if said is not None and said.same(spoken.said):
                    return self._placed(text, at, match.start(), match.group(), spoken)
            reply.refused.append(known)
        return None

    def _ends(self, text: str, at: int, spoken: Spoken) -> list[re.Match[str]]:
        """Where in a text a reply from a character on may end: what ends it may be in it, too."""
        ends = {spoken.closing, self._closer} - {""}
        far = at + max(_LEAST_WINDOW, _WINDOW * len(spoken.raw))
        found = [m for m in self._anchors.scan(text, at, far) if m.group() in ends]
        within = sum(spoken.raw.count(end) for end in ends) + (not spoken.closing)
        return found[: min(within, _MOST_ENDS)]

    def _placed(self, text: str, at: int, end: int, ended: str, spoken: Spoken) -> _Fit:
        ids, raw, closing = spoken.ids, spoken.raw, spoken.closing
        if closing and closing == ended:
            end += len(closing)
        elif closing:
            ids, raw, closing = ids[:-1], raw[: -len(closing)], ""
        shown = text[at:end]
        guard = shown if closing else shown + ended
        start = max((m.start() for m in self._anchors.scan(text, max(0, at - 256), at)), default=at)
        before = self._codec.encode(text[start:at])
        canonical = self._codec.encode(text[start:end])
        changes = not np.array_equal(canonical, np.concatenate((before, ids)))
        return _Fit(shown, guard, ids, raw, closing, changes)
