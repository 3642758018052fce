"""Conversion of engine events to objects and chunks of OpenAI's chat and text completions.

Sources: https://platform.openai.com/docs/api-reference/chat/object,
https://platform.openai.com/docs/api-reference/chat/streaming and
https://platform.openai.com/docs/api-reference/completions/object.
"""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, ClassVar

from mlxcache import __version__
from mlxcache.types import (
    Event,
    Finished,
    Piece,
    PromptLogprobs,
    Text,
    Thinking,
    TokenLogprob,
    ToolCall,
)
from mlxcache.wire.reply import HeldLogprobs, WholeReply, finished_or_raise, is_cut

FINGERPRINT = f"mlxcache-{__version__}"

Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that a reply object and all chunks of a reply have, and what the request asked for.

    `created`: seconds since 1970. `n` is the number of choices of each prompt; choices are ordered
    by prompt. `echoes` holds the text of each prompt if choices must begin with it. `called` is the
    `finish_reason` of a reply that calls tools. `whole`: see `is_cut`.
    """

    id: str
    model: str
    object: str
    logprobs: bool = False
    include_usage: bool = False
    n: int = 1
    echoes: tuple[str, ...] = ()
    called: str = "tool_calls"
    whole: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, **fields: Any) -> Payload:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            **fields,
        }

    def echo(self, index: int) -> str:
        """Return the prompt text with which choice `index` must begin, maybe none."""
        return self.echoes[index // self.n] if self.echoes else ""

    def end(self, last: Finished, *, called: bool) -> dict[str, str | None]:
        """Return the fields `finish_reason` and `stop_reason` (vLLM's) of a choice."""
        called = called or last.reason == "tool_calls"
        looped = "repetition" if last.reason == "repetition" else None
        reason = "length" if is_cut(last, self.whole) else self.called if called else "stop"
        return {"finish_reason": reason, "stop_reason": last.stop_sequence or looped}


def count_usage(lasts: Sequence[Finished], n: int = 1) -> Payload:
    """Return the `usage` object of all choices; `n` is the number of choices of each prompt.

    A prompt is counted once, with the smallest count of cached tokens of its choices: the others
    reuse what the first computed.
    """
    prompt = sum(last.prompt_tokens for last in lasts[::n])
    generated = sum(last.generated_tokens for last in lasts)
    groups = (lasts[i : i + n] for i in range(0, len(lasts), n))
    cached = sum(min(last.cached_tokens for last in choices) for choices in groups)
    reasoning = sum(last.reasoning_tokens for last in lasts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def chat_completion(replies: Sequence[WholeReply], envelope: Envelope) -> Payload:
    choices = [_chat_choice(reply, i, envelope) for i, reply in enumerate(replies)]
    usage = count_usage([reply.last for reply in replies], envelope.n)
    return envelope.wrap(choices=choices, usage=usage)


def _chat_choice(reply: WholeReply, index: int, envelope: Envelope) -> Payload:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [_call(call, call.arguments) for call in reply.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _chat_logprobs(reply.logprobs) if envelope.logprobs else None,
        **envelope.end(reply.last, called=bool(reply.calls)),
    }


def text_completion(replies: Sequence[WholeReply], envelope: Envelope) -> Payload:
    """Return the `text_completion` object; the text of a choice includes the reasoning."""
    choices = [
        {
            "index": i,
            "text": envelope.echo(i) + reply.thinking + reply.text,
            "logprobs": _text_logprobs(reply, envelope.echo(i)) if envelope.logprobs else None,
            **envelope.end(reply.last, called=False),
        }
        for i, reply in enumerate(replies)
    ]
    return envelope.wrap(
        choices=choices, usage=count_usage([reply.last for reply in replies], envelope.n)
    )


def _text_logprobs(reply: WholeReply, echo: str) -> Payload:
    return TextLogprobs(echo, reply.prompt).write([*reply.prompt, *reply.logprobs])


class Chunks:
    """Chunks of one streamed choice: call `begin`, then `feed` for each engine event."""

    _empty: ClassVar[Payload]
    _write_logprobs: Callable[[Sequence[TokenLogprob]], Payload]

    def __init__(self, envelope: Envelope, index: int = 0):
        self.last: Finished | None = None
        self._envelope = envelope
        self._held = HeldLogprobs()
        self._index = index
        self._called = False

    def begin(self) -> list[Payload]:
        return []

    def feed(self, event: Event) -> list[Payload]:
        """Return the chunks to send for an engine event, maybe none."""
        if isinstance(event, Piece):
            probs = self._held.take(event)
            return self._feed(event, self._show(probs))
        if not isinstance(event, Finished):
            return []
        self.last = finished_or_raise(event)
        rest = self._held.end(event)
        ended = self._envelope.end(event, called=self._called)
        return [self._chunk(self._empty, ended, self._show(rest))]

    def _feed(self, piece: Piece, probs: Payload | None) -> list[Payload]:
        raise NotImplementedError

    def _show(self, tokens: Sequence[TokenLogprob]) -> Payload | None:
        return self._write_logprobs(tokens) if tokens and self._envelope.logprobs else None

    def _chunk(
        self, content: Payload, end: Mapping[str, Any] | None = None, probs: Any = None
    ) -> Payload:
        extra: dict[str, Any] = {"usage": None} if self._envelope.include_usage else {}
        ended = {"finish_reason": None} if end is None else end
        choice = {"index": self._index, **content, "logprobs": probs, **ended}
        return self._envelope.wrap(choices=[choice], **extra)


def usage_chunk(envelope: Envelope, chunks: Sequence[Chunks]) -> Payload:
    """Return the last chunk of a stream, with the usage."""
    usage = count_usage([finished_or_raise(one.last) for one in chunks], envelope.n)
    return envelope.wrap(choices=[], usage=usage)


class ChatChunks(Chunks):
    """Chunks of a streamed chat completion."""

    _empty: ClassVar[Payload] = {"delta": {}}

    def __init__(self, envelope: Envelope, index: int = 0):
        super().__init__(envelope, index)
        self._write_logprobs = _chat_logprobs

    def begin(self) -> list[Payload]:
        return [self._delta({"role": "assistant", "content": ""})]

    def _feed(self, piece: Piece, probs: Payload | None) -> list[Payload]:
        match piece:
            case Text(text) if text:
                return [self._delta({"content": text}, probs=probs)]
            case Thinking(text) if text:
                return [self._delta({"reasoning_content": text})]
            case ToolCall():
                self._called = True
                begun = {"index": piece.index, **_call(piece, "")}
                rest = {"index": piece.index, "function": {"arguments": piece.arguments}}
                return [self._delta({"tool_calls": [delta]}) for delta in (begun, rest)]
        return []

    def _delta(self, delta: dict[str, Any], probs: Any = None) -> Payload:
        return self._chunk({"delta": delta}, probs=probs)


class TextChunks(Chunks):
    """Chunks of a streamed text completion."""

    _empty: ClassVar[Payload] = {"text": ""}

    def __init__(self, envelope: Envelope, index: int = 0):
        super().__init__(envelope, index)
        self._write_logprobs = TextLogprobs().write

    def begin(self) -> list[Payload]:
        echo = self._envelope.echo(self._index)
        return [self._chunk({"text": echo})] if echo else []

    def feed(self, event: Event) -> list[Payload]:
        if not isinstance(event, PromptLogprobs):
            return super().feed(event)
        self._write_logprobs = TextLogprobs(self._envelope.echo(self._index), event.tokens).write
        return [self._chunk({"text": ""}, probs=self._show(event.tokens))]

    def _feed(self, piece: Piece, probs: Payload | None) -> list[Payload]:
        text = "" if isinstance(piece, ToolCall) else piece.text
        return [self._chunk({"text": text}, probs=probs)] if text else []


def _call(call: ToolCall, arguments: str) -> Payload:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": write_logprobs(tokens), "refusal": None}


def write_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return an object for each token, in the form of Chat Completions and Responses."""
    return [
        _logprob(t.token, t.logprob)
        | {"top_logprobs": [_logprob(token, value) for token, _, value in t.top]}
        for t in tokens
    ]


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    raw = _raw(token)
    known = None if "\ufffd" in token else list(raw)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": known}


def _raw(token: str) -> bytes:
    return token.encode(errors="surrogateescape")


class TextLogprobs:
    """Builder of the object `logprobs` of a text completion, piece by piece.

    `text_offset` is the index of the character in which a token begins, counted from the start of
    the choice's text. That begins with the text `echo`, which may lack what the tokenizer adds at
    the start of `prompt`.
    """

    def __init__(self, echo: str = "", prompt: Sequence[TokenLogprob] = ()) -> None:
        told = b"".join(_raw(t.token) for t in prompt).decode(errors="replace")
        self._characters = len(echo) - len(told)
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def write(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the object `logprobs` for the next tokens."""
        return {
            "tokens": [_legacy_token(t.token) for t in tokens],
            "token_logprobs": [
                None if isnan(t.logprob) else max(t.logprob, -9999.0) for t in tokens
            ],
            "top_logprobs": [None if isnan(t.logprob) else _legacy_top(t) for t in tokens],
            "text_offset": [max(0, self._advance(_raw(t.token))) for t in tokens],
        }

    def _advance(self, raw: bytes) -> int:
        """Count the characters of a token, which may be a part of one; return where it begins."""
        cut_short = bool(self._decoder.getstate()[0]) and raw[:1] != b"" and raw[0] & 0xC0 != 0x80
        start = self._characters + cut_short  # the bytes before it became a U+FFFD
        self._characters += len(self._decoder.decode(raw))
        return start


def _legacy_token(token: str) -> str:
    """Return a token's text, or its bytes in OpenAI's escaped form if it is part of a character."""
    try:
        token.encode()
    except UnicodeEncodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in _raw(token))
    return token


def _legacy_top(token: TokenLogprob) -> dict[str, float]:
    pairs = [*((text, value) for text, _, value in token.top), (token.token, token.logprob)]
    found: dict[str, float] = {}
    for text, value in pairs:
        found.setdefault(_legacy_token(text), max(value, -9999.0))
    return found
