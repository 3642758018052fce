"""Rules `thinking` and `replay`: replies as the model wrote them, whatever the client made of them.

Many clients send back text and calls alone. A template that keeps thinking, as most do up to the
next user message, would then render a reply that differs from the computed one. Where a template
drops thinking, it also drops what is restored here.

Others strip blanks from the ends of a text, or join two blocks of it, sometimes only in a later
turn. The text gets the blanks that the model wrote, so that it renders alike in each turn, and as
it was rendered ahead of the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlxcache.prompt.canonical.draft import Draft, History, Message
from mlxcache.types import TEXTS


class Said(Protocol):
    """The text and the thinking of a reply as the model wrote them."""

    @property
    def text(self) -> str: ...

    @property
    def thinking(self) -> str: ...


Tools = Sequence[Mapping[str, Any]]
KnownReply = Callable[[bytes, Mapping[str, Any], Tools], Said | None]
"""Looks up a reply by the digest of the messages before it, a message with the same text, calls and
(if it has any) thinking, apart from blanks at the edges of blocks, and the tools."""


def apply(draft: Draft, known_reply: KnownReply, *, thinking: bool, blanks: bool) -> bytes:
    """Restore `thinking` that is missing, and `blanks`; returns the digest of all messages.

    A reply that the request continues keeps its end, behind which the client adds the rest.
    """
    history = History("replies")
    for at, message in enumerate(draft.messages):
        if draft.role(at) == "assistant":
            said = known_reply(history.digest, message, draft.tools)
            plain = {key: value for key, value in message.items() if key != TEXTS}
            whole = not draft.continues or at < len(draft.messages) - 1
            if said is not None:
                plain = _restored(draft, plain, said, thinking=thinking, blanks=blanks and whole)
            draft.messages[at] = plain
        history.add(draft.messages[at])
    return history.digest


def _restored(
    draft: Draft, message: Message, said: Said, *, thinking: bool, blanks: bool
) -> dict[str, Any]:
    """A copy of a message with what `said` has; the rules that changed it are noted."""
    restored = dict(message)
    thought = message.get("reasoning_content")
    if not thought and thinking and said.thinking:
        restored["reasoning_content"] = said.thinking
        draft.hits.add("thinking")
    shown = {"content": said.text, "reasoning_content": said.thinking}
    for key in ("content", "reasoning_content"):
        if blanks and message.get(key) and message[key] != shown[key]:
            restored[key] = shown[key]
            draft.hits.add("replay")
    return restored
