"""Engine events to the objects and chunks of OpenAI's chat and text completions.

Sources: https://platform.openai.com/docs/api-reference/chat/object, .../chat/streaming and
.../completions/object.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlxcache import __version__
from mlxcache.types import Event, Finished, Text, Thinking, TokenLogprob, ToolCall
from mlxcache.wire.reply import WholeReply, finished_or_raise

FINGERPRINT = f"mlxcache-{__version__}"

Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that all chunks of one reply share. `created` is in seconds since 1970.

    `called`: the `finish_reason` if tools were called. OpenAI's is `stop` where `tool_choice` names
    the function, also in a stream.
    """

    id: str
    model: str
    object: str
    called: str = "tool_calls"
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, **fields: Any) -> Payload:
        """Build a reply object or a chunk from these fields and `fields`."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            **fields,
        }


def count_usage(last: Finished) -> Payload:
    """Build `usage`, in tokens; `prompt_tokens` includes the cached ones."""
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.generated_tokens,
        "total_tokens": last.prompt_tokens + last.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": last.reasoning_tokens},
    }


def _finish_reason(last: Finished, envelope: Envelope, *, called: bool) -> str:
    """Return `stop`, `length` or, if tools were called, `Envelope.called`."""
    if last.reason == "length":
        return "length"
    return envelope.called if called or last.reason == "tool_calls" else "stop"


def chat_completion(reply: WholeReply, envelope: Envelope, *, logprobs: bool) -> Payload:
    """Build the `chat.completion` object of a whole reply."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)} for call in reply.calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _chat_logprobs(reply.logprobs) if logprobs else None,
        "finish_reason": _finish_reason(reply.last, envelope, called=bool(reply.calls)),
    }
    return envelope.wrap(choices=[choice], usage=count_usage(reply.last))


def text_completion(reply: WholeReply, envelope: Envelope, *, logprobs: bool) -> Payload:
    """Build the `text_completion` object of a whole reply; reasoning is part of its text."""
    choice = {
        "index": 0,
        "text": reply.thinking + reply.text,
        "logprobs": text_logprobs(reply.logprobs) if logprobs else None,
        "finish_reason": _finish_reason(reply.last, envelope, called=False),
    }
    return envelope.wrap(choices=[choice], usage=count_usage(reply.last))


class Chunks:
    """Chunks of one streamed reply: `begin`, then `feed` for each engine event, then `end`."""

    _empty: ClassVar[Payload]

    def __init__(self, envelope: Envelope, *, include_usage: bool, logprobs: bool):
        self._envelope = envelope
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._called = False
        self._last: Finished | None = None

    def begin(self) -> list[Payload]:
        """Return the chunks before the first token."""
        return []

    def feed(self, event: Event) -> list[Payload]:
        """Return the chunks that `event` adds."""
        raise NotImplementedError

    def end(self) -> list[Payload]:
        """Return the last chunks. Raises what `finished_or_raise` raises."""
        last = finished_or_raise(self._last)
        reason = _finish_reason(last, self._envelope, called=self._called)
        chunks = [self._chunk(self._empty, reason)]
        if self._include_usage:
            chunks.append(self._envelope.wrap(choices=[], usage=count_usage(last)))
        return chunks

    def _chunk(
        self, content: dict[str, Any], finish: str | None = None, probs: Any = None
    ) -> Payload:
        extra: dict[str, Any] = {"usage": None} if self._include_usage else {}
        choice = {"index": 0, **content, "logprobs": probs, "finish_reason": finish}
        return self._envelope.wrap(choices=[choice], **extra)


class ChatChunks(Chunks):
    """`chat.completion.chunk` objects."""

    _empty: ClassVar[Payload] = {"delta": {}}

    def begin(self) -> list[Payload]:
        """Return the chunk that names the role."""
        return [self._delta({"role": "assistant", "content": ""})]

    def feed(self, event: Event) -> list[Payload]:
        """Return the chunks that `event` adds."""
        match event:
            case Text(text, probs) if text or (self._logprobs and probs):
                shown = _chat_logprobs(probs) if self._logprobs else None
                return [self._delta({"content": text}, probs=shown)]
            case Thinking(text) if text:
                return [self._delta({"reasoning_content": text})]
            case ToolCall():
                self._called = True
                return [self._delta({"tool_calls": [delta]}) for delta in _call_deltas(event)]
            case Finished():
                self._last = event
        return []

    def _delta(self, delta: dict[str, Any], probs: Any = None) -> Payload:
        return self._chunk({"delta": delta}, probs=probs)


class TextChunks(Chunks):
    """`text_completion` objects, a piece of text each."""

    _empty: ClassVar[Payload] = {"text": ""}
    _offset = 0

    def feed(self, event: Event) -> list[Payload]:
        """Return the chunks that `event` adds."""
        match event:
            case Text(text, probs) if text or (self._logprobs and probs):
                shown = text_logprobs(probs, self._offset) if self._logprobs else None
                self._offset += len(text)
                return [self._chunk({"text": text}, probs=shown)]
            case Thinking(text) if text:
                self._offset += len(text)
                return [self._chunk({"text": text})]
            case Finished():
                self._last = event
        return []


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _call_deltas(call: ToolCall) -> list[dict[str, Any]]:
    opening = {"name": call.name, "arguments": ""}
    return [
        {"index": call.index, "id": call.id, "type": "function", "function": opening},
        {"index": call.index, "function": {"arguments": call.arguments}},
    ]


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        _logprob(t.token, t.logprob)
        | {"top_logprobs": [_logprob(token, value) for token, _, value in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    # A token that holds part of a character is shown as U+FFFD, whose bytes are not the token's.
    raw = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": max(logprob, -9999.0), "bytes": raw}


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """Build the parallel lists of text completions; `offset` is the text's start, in characters."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [max(t.logprob, -9999.0) for t in tokens],
        "top_logprobs": [{token: max(p, -9999.0) for token, _, p in t.top} for t in tokens],
        "text_offset": offsets,
    }
