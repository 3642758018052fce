"""Rules `thinking` and `replay`: restore replies to the form in which the model wrote them.

Many clients send back only text and calls, or (Zed) thinking as the beginning of the text. A
template that keeps thinking would then render a reply that differs from the computed one. Others
strip white space, join blocks, or format the JSON of calls differently. The message gets the form
that the model wrote. So it renders the same in each turn, after a restart, and in a prompt that was
computed by anticipation before the client sent the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.prompt.canonical.draft import Draft, History, Message
from mlxcache.prompt.replies import DecodedReply
from mlxcache.types import TEXTS

_ENCODE = json.JSONEncoder(default=repr).encode

KnownReply = Callable[[bytes, Mapping[str, Any], Sequence[Mapping[str, Any]]], DecodedReply | None]
"""Callable that looks up the reply of which a message is a copy; see `Replay.find_reply`."""


@dataclass(frozen=True, slots=True)
class Found:
    """Known and unknown replies in a conversation.

    `history`: digest of all messages. `keys`: of the known replies. `asked`: another digest, which
    does not depend on the content of replies. `unknown`: for each reply that is not known, such a
    digest of the messages before it.
    """

    history: bytes = b""
    keys: tuple[bytes, ...] = ()
    asked: bytes = b""
    unknown: tuple[bytes, ...] = ()


NOTHING = Found()

_REPLY = b"reply"
"""Bytes that stand for any reply in the digest `Found.asked`."""


def restore_replies(
    draft: Draft, known_reply: KnownReply, *, thinking: bool, blanks: bool
) -> Found:
    """Give replies in the history the form in which the model wrote them, where it is known.

    `thinking`, `blanks`: what to restore. In a reply to be continued that is only thinking, because
    the client appends the rest to the text it sent.
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


def _thinking_is_text(message: Message, said: DecodedReply) -> bool:
    text = message.get("content")
    if message.get("reasoning_content") or not said.thinking.strip() or not isinstance(text, str):
        return False
    return "".join(text.split()) == "".join(f"{said.thinking} {said.text}".split())


def _restored(
    draft: Draft, message: Message, said: DecodedReply, *, thinking: bool, blanks: bool
) -> dict[str, Any]:
    restored = dict(message)
    if thinking and said.thinking and not message.get("reasoning_content"):
        restored["reasoning_content"] = said.thinking
        draft.hits.add("thinking")
    if not blanks:
        return restored
    for key, shown in (("content", said.text), ("reasoning_content", said.thinking)):
        if message.get(key) and message[key] != shown:
            restored[key] = shown
            draft.hits.add("replay")
    calls = message.get("tool_calls") or ()
    written = [_as_written(*pair) for pair in zip(calls, said.content.calls, strict=bool(calls))]
    if any(new is not old for new, old in zip(written, calls, strict=True)):
        restored["tool_calls"] = written
        draft.hits.add("replay")
    return restored


def _as_written(call: Mapping[str, Any], said: tuple[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    if _ENCODE(function.get("arguments")) == _ENCODE(said[1]):
        return call
    return {**call, "function": {**function, "arguments": said[1]}}
