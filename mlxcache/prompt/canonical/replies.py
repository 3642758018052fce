"""Rules `thinking` and `replay`: restore replies to the form in which the model wrote them.

Many clients send back only text and calls. A template that keeps thinking, as most do up to the
next user message, would then render a reply that differs from the computed one. If a template drops
thinking, it also drops the thinking restored here.

Zed sends the thinking as the beginning of the text, which a template would render as text.

Other clients strip white space from the ends of a text, join two of its blocks, sometimes only in a
later turn, or format the JSON of calls differently. The message gets the form that the model wrote.
So it renders the same in each turn, after a restart, and in a prompt that was computed by
anticipation before the client sent the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxcache.prompt.canonical.draft import Draft, History, Message
from mlxcache.types import TEXTS


class Said(Protocol):
    """Interface of a reply as the model wrote it.

    It has a text, thinking, calls as (name, arguments), and a key that identifies it.
    """

    @property
    def text(self) -> str: ...

    @property
    def thinking(self) -> str: ...

    @property
    def calls(self) -> Sequence[tuple[str, Any]]: ...

    @property
    def key(self) -> bytes: ...


Tools = Sequence[Mapping[str, Any]]
_ENCODE = json.JSONEncoder(default=repr).encode

KnownReply = Callable[[bytes, Mapping[str, Any], Tools], Said | None]
"""Callable that looks up the reply as the model wrote it.

Arguments: the digest of the messages before it, the client's message, and the tools. Text, calls
and thinking (if the message has any) must be equal, except white space at the edges of blocks. The
thinking may also be the beginning of the text.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """Known and unknown replies in a conversation.

    `history`: digest of all messages. `keys`: keys of the known replies, in order. `asked`: another
    digest of all messages, which does not depend on the content of replies. `unknown`: for each
    reply that is not known, in order, such a digest of the messages before it.
    """

    history: bytes = b""
    keys: tuple[bytes, ...] = ()
    asked: bytes = b""
    unknown: tuple[bytes, ...] = ()


NOTHING = Found()

_REPLY = b"reply"
"""Bytes that stand for any reply in the digest `Found.asked`."""


def apply(draft: Draft, known_reply: KnownReply, *, thinking: bool, blanks: bool) -> Found:
    """Give replies in the history the form in which the model wrote them, where it is known.

    `thinking`: restore missing thinking. `blanks`: restore white space and the form of calls.
    `known_reply(history, message, tools)` returns the reply that the model wrote, or None;
    `history` is the digest of the messages before it. If the request continues the last reply, only
    missing thinking is restored in it, because the client appends the rest to the text it sent.
    Returns which replies are known.
    """
    history, asked = History("replies"), History("asked")
    keys: list[bytes] = []
    unknown: list[bytes] = []
    for at, message in enumerate(draft.messages):
        if draft.role(at) == "assistant":
            said = known_reply(history.digest, message, draft.tools)
            plain = {key: value for key, value in message.items() if key != TEXTS}
            whole = not draft.continues or at < len(draft.messages) - 1
            if said is None:
                unknown.append(asked.digest)
            else:
                keys.append(said.key)
                inside = _thinking_is_text(plain, said)
                if inside and thinking and whole:
                    plain["content"] = said.text
                if not inside or (thinking and whole):
                    plain = _restored(
                        draft, plain, said, thinking=thinking, blanks=blanks and whole
                    )
            draft.messages[at] = plain
            history.add(plain)
            asked.add_bytes(_REPLY)
        else:
            asked.add_bytes(history.add(message))
    return Found(history.digest, tuple(keys), asked.digest, tuple(unknown))


def _thinking_is_text(message: Message, said: Said) -> bool:
    """Return whether the text of a message consists of the thinking and the text of `said`.

    White space is ignored. `message` is a client's copy of the reply `said`.
    """
    text = message.get("content")
    if message.get("reasoning_content") or not said.thinking.strip() or not isinstance(text, str):
        return False
    return "".join(text.split()) == "".join(f"{said.thinking} {said.text}".split())


def _restored(
    draft: Draft, message: Message, said: Said, *, thinking: bool, blanks: bool
) -> dict[str, Any]:
    """Return a copy of an assistant message in the form of `said`, the reply as the model wrote it.

    `thinking`: restore missing thinking. `blanks`: restore white space and the form of calls. Adds
    the names of the rules that changed the message to `draft.hits`.
    """
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
    calls = message.get("tool_calls") or ()
    if blanks and calls:
        written = [_as_written(*pair) for pair in zip(calls, said.calls, strict=True)]
        if any(new is not old for new, old in zip(written, calls, strict=True)):
            restored["tool_calls"] = written
            draft.hits.add("replay")
    return restored


def _as_written(call: Mapping[str, Any], said: tuple[str, Any]) -> Mapping[str, Any]:
    """Return a call with the arguments of `said`, (name, arguments), as the model wrote them.

    They are equal in value, but the order of keys and the form of numbers may differ.
    """
    function = call.get("function") or {}
    if _ENCODE(function.get("arguments")) == _ENCODE(said[1]):
        return call
    return {**call, "function": {**function, "arguments": said[1]}}
