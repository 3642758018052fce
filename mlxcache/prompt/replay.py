"""Exact replay: a reply that a client sends back enters the prompt as the ids that were generated.

Clients rewrite replies: JSON with other white space, stripped text, joined blocks. Template and
tokenizer then produce other tokens for a reply than those whose KV is cached. Therefore, if a
rendered text begins with an earlier prompt and continues with the content of a reply to it, the ids
of that reply replace the text.

Contents are compared by parsing both forms with the model's own output parser. There is no match
after an edit, other white space inside a text, another order of calls, or if the template leaves
out thinking; such text is tokenised as it is. The canonicalisation rules `thinking` and `replay`
prevent some of these cases: before rendering, they look up a client's copy of a reply with
`find_reply` and restore the thinking, the white space and the form of calls that were generated.

A control token that the model wrote in its text comes back as that token. What this opens: whoever
gets a model to write one (its owner, a page that an agent read, a forged snapshot) has it in later
prompts of that conversation too, in that reply; text that no reply held never becomes one.
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
from mlxcache.prompt.replies import (
    TAIL_CHARACTERS,
    DecodedReply,
    GeneratedReply,
    RenderedReply,
    Replies,
    ReplyContent,
    ReplyReader,
    Tools,
)

_REACH, _LEAST_REACH = 4, 4096
"""Characters searched for the end of a reply: so often those of the reply, and at least so many."""

_MOST_ENDS = 16
"""Most possible ends of a reply that are tried."""

_CONTEXT = 256
"""Characters before a reply that are searched for a control token at which encoding starts."""


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """A rendered text in which known replies were replaced by the text of their generated ids.

    `digest`, `tail`: those of the text as rendered. `changed`: a reply's ids differ from its
    encoding.
    """

    text: str
    splices: tuple[Splice, ...] = ()
    digest: bytes = b""
    changed: bool = False
    tail: str = ""
    replies: tuple[bytes, ...] = ()


class Replay:
    """Finds known replies in rendered texts. Thread-safe."""

    def __init__(
        self,
        reader: ReplyReader,
        codec: Codec,
        renderer: Renderer,
        steady: Callable[[str], str],
        replies: Replies,
    ):
        self.replies = replies
        self._reader, self._finder = reader, reader.finder
        self._codec, self._steady = codec, steady
        self._closer = learn_closer(renderer, reader.finder)

    def find_reply(
        self, history: bytes, message: Mapping[str, Any], tools: Tools
    ) -> DecodedReply | None:
        """Return the newest known reply that has the same content as an assistant message, or None.

        Thinking is compared if the message has any, as such or at the start of its text.
        """
        replies = self.replies.find_by_history(history)
        content = ReplyContent.of_message(message) if replies else None
        if content is None:
            return None
        thinks = any(map(str.strip, content.thoughts))
        for reply in reversed(replies):
            decoded = reply.decode(self._reader, tools)
            if decoded is None:
                continue
            said = decoded.content
            if said.same(content) if thinks else said.same_except_thinking(content):
                return decoded
            if not thinks and said.same_with_thinking_as_text(content):
                return decoded
        return None

    def splice_replies(self, text: str, tools: Tools, *, enabled: bool = True) -> ReplayedText:
        """Replace known replies in a text by the text of their ids, if `enabled`."""
        walk = hashlib.blake2b(digest_size=16)
        steady = self._steady(text)
        parts: list[str] = []
        splices: list[Splice] = []
        keys: list[bytes] = []
        hashed = done = length = 0
        changed = False
        for at in self.replies.prompt_lengths(steady) if enabled else ():
            if at < done:
                continue
            walk.update(steady[hashed:at].encode("utf-8", "surrogatepass"))
            hashed = at
            found = self._find_rendered(text, at, self.replies.find(walk.digest()), tools)
            if found is None:
                continue
            parts += [text[done:at], found.raw]
            length += at - done
            end = length + len(found.raw)
            splices.append(Splice(length, end, found.shown, found.ids, found.closing))
            keys.append(found.key)
            length, done, changed = end, at + len(found.shown), changed or found.changes
        walk.update(steady[hashed:].encode("utf-8", "surrogatepass"))
        parts.append(text[done:])
        spliced = "".join(parts) if splices else text
        tail = steady[-TAIL_CHARACTERS:]
        return ReplayedText(spliced, tuple(splices), walk.digest(), changed, tail, tuple(keys))

    def _find_rendered(
        self, text: str, at: int, replies: Sequence[GeneratedReply], tools: Tools
    ) -> RenderedReply | None:
        """Find the newest of `replies` that the text contains at character `at`, or None."""
        for reply in reversed(replies):
            known = reply.rendered
            if known is not None and text.startswith(known.guard, at):
                return known
            found = self._match(text, at, reply, tools)
            if found is not None:
                reply.set_rendered(found)
                return found
        return None

    def _match(
        self, text: str, at: int, reply: GeneratedReply, tools: Tools
    ) -> RenderedReply | None:
        """Return the form in which a conversation contains `reply` at `at`, or None."""
        decoded = reply.decode(self._reader, tools)
        if decoded is None:
            return None
        for match in self._find_ends(text, at, decoded):
            shown = text[at : match.start()]
            known = hash(shown)
            if known in reply.rejected:
                continue
            if self._has_same_markers(shown, decoded):
                ids = self._codec.encode(shown).tolist()
                content = self._reader.read_content(ids, reply, tools)
                if content is not None and content.same(decoded.content):
                    return self._make_rendered(text, at, match.start(), match.group(), decoded)
            reply.rejected.append(known)
        return None

    def _has_same_markers(self, shown: str, decoded: DecodedReply) -> bool:
        """Return whether a rendered reply has the same markers of thinking as the generated one.

        False, for example, if the template leaves out those of empty thinking; its rendering is
        then used. If the reply has several thoughts, which a template may join, any marker
        suffices.
        """
        find, several = self._reader.find_thinking_markers, len(decoded.content.thoughts) > 1
        markers = find(shown)
        return bool(markers) if several else markers == find(decoded.raw)

    def _find_ends(self, text: str, at: int, decoded: DecodedReply) -> list[re.Match[str]]:
        """Return the control tokens that may end a reply; its content may have some too."""
        ends = {decoded.closing, self._closer} - {""}
        far = at + max(_LEAST_REACH, _REACH * len(decoded.raw))
        found = [m for m in self._finder.find_all(text, at, far) if m.group() in ends]
        within = sum(decoded.raw.count(end) for end in ends) + (not decoded.closing)
        return found[: min(within, _MOST_ENDS)]

    def _make_rendered(
        self, text: str, at: int, end: int, ended: str, decoded: DecodedReply
    ) -> RenderedReply:
        ids, raw, closing = decoded.ids, decoded.raw, decoded.closing
        if closing and closing == ended:
            end += len(closing)
        elif closing:
            ids, raw, closing = ids[:-1], raw[: -len(closing)], ""
        shown = text[at:end]
        guard = shown if closing else shown + ended
        near = self._finder.find_all(text, max(0, at - _CONTEXT), at)
        start = max((m.start() for m in near), default=at)
        before = self._codec.encode(text[start:at])
        canonical = self._codec.encode(text[start:end])
        changes = not np.array_equal(canonical, np.concatenate((before, ids)))
        return RenderedReply(shown, guard, ids, raw, closing, changes, decoded.key)
