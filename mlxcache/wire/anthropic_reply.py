"""Conversion of engine events to a message of Anthropic's API, whole or streamed.

Both forms are made by `ContentBlocks`, so that a streamed reply and a whole one have the same
blocks.
Sources: https://docs.anthropic.com/en/api/messages and
https://docs.anthropic.com/en/api/messages-streaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from mlxcache import typed
from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.types import Finished, FinishReason, Piece, Prompt, Text, Thinking, ToolCall
from mlxcache.wire.anthropic_request import ID_PREFIX
from mlxcache.wire.anthropic_types import Request
from mlxcache.wire.decode import decode
from mlxcache.wire.reply import is_cut
from mlxcache.wire.signatures import sign_thinking

StreamEvent = dict[str, Any]

STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "tool_calls": "tool_use",
    "repetition": "end_turn",
}


class ContentBlocks:
    """Content blocks of a reply while it is generated. `content` holds the finished ones.

    Call `feed` for each piece of the reply, then `close`. White space at the start of a text or
    thinking block is held back until other text follows. A block of white space alone is therefore
    never sent: clients drop it, or are refused when they send it back. If `show_thinking` is False,
    the reasoning is only in the block's signature.
    """

    def __init__(self, *, show_thinking: bool = True):
        self.content: list[dict[str, Any]] = []
        self._show_thinking = show_thinking
        self._kind: type[Text | Thinking] | None = None
        self._text = ""
        self._started = False

    def feed(self, piece: Piece) -> list[StreamEvent]:
        """Add a piece of the reply and return the stream events that result, maybe none."""
        if isinstance(piece, ToolCall):
            return [*self.close(), *self._tool_use(piece)]
        ended = [] if type(piece) is self._kind else self.close()
        self._kind = type(piece)
        return [*ended, *self._grow(piece.text)]

    def close(self) -> list[StreamEvent]:
        return list(self._end())

    def _end(self) -> Iterator[StreamEvent]:
        text, started = self._text, self._started
        thinks = self._kind is Thinking
        self._kind, self._text, self._started = None, "", False
        if not started:
            return
        if not thinks:
            yield from self._stop({"type": "text", "text": text})
            return
        signature = sign_thinking(text)
        yield self._delta({"type": "signature_delta", "signature": signature})
        shown = text if self._show_thinking else ""
        yield from self._stop({"type": "thinking", "thinking": shown, "signature": signature})

    def _grow(self, text: str) -> Iterator[StreamEvent]:
        self._text += text
        if not self._started:
            if not self._text.strip():
                return
            self._started, text = True, self._text
            thinking = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._begin({"type": "text", "text": ""} if self._kind is Text else thinking)
        if self._kind is Text and text:
            yield self._delta({"type": "text_delta", "text": text})
        elif self._show_thinking and text:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _tool_use(self, call: ToolCall) -> Iterator[StreamEvent]:
        raw, arguments = _parse_arguments(call)
        block = {"type": "tool_use", "id": f"{ID_PREFIX}{call.id}", "name": call.name}
        yield self._begin(block | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": raw})
        yield from self._stop(block | {"input": arguments})

    def _begin(self, block: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _stop(self, block: dict[str, Any]) -> Iterator[StreamEvent]:
        yield {"type": "content_block_stop", "index": len(self.content)}
        self.content.append(block)


def _parse_arguments(call: ToolCall) -> tuple[str, dict[str, Any]]:
    """Return a call's arguments as valid JSON text and as an object."""
    raw = call.arguments or "{}"
    try:
        return raw, typed.decode(dict[str, Any], raw)
    except msgspec.DecodeError:
        pass  # half of an escaped surrogate pair, or a number too large for a float
    try:
        repaired = decode(dict[str, msgspec.Raw], raw.encode())
    except BadRequest as error:
        message = f"The arguments of {call.name} are not a JSON object."
        raise GenerationFailed(message) from error
    return msgspec.json.encode(repaired).decode(), repaired


def count_usage(prompt: Prompt, cached: int, generated: int = 0) -> dict[str, int]:
    """Return the `usage` object of a message: three counts add up to the prompt.

    `cache_read_input_tokens` were cached, `cache_creation_input_tokens` fed up to the last
    `cache_control` breakpoint, and `input_tokens` fed after that.
    """
    creation = max(0, (prompt.breakpoint or 0) - cached)
    return {
        "input_tokens": len(prompt.ids) - cached - creation,
        "cache_creation_input_tokens": creation,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def count_prompt(prompt: Prompt, *, edited: bool = False) -> dict[str, Any]:
    """Return the response body of `POST /v1/messages/count_tokens`.

    `edited`: the request has `context_management`, of which no edit is applied.
    """
    count = len(prompt.ids)
    edits = {"context_management": {"original_input_tokens": count}} if edited else {}
    return {"input_tokens": count, **edits}


def edit_fields(body: Request) -> dict[str, Any]:
    """Return the field that says that no edit was applied, if the request asks for edits."""
    if body.context_management is None:
        return {}
    return {"context_management": {"applied_edits": []}}


def begin_message(id: str, model: str, usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


REPETITION = {
    "type": "repetition",
    "explanation": "The model repeated the same text again and again, so the reply was ended.",
}


def end_fields(last: Finished, *, whole: bool = False) -> dict[str, Any]:
    """Return the fields that tell why a reply ended. `whole`: see `is_cut`."""
    fields: dict[str, Any] = {
        "stop_reason": "max_tokens" if is_cut(last, whole) else STOP_REASONS[last.reason],
        "stop_sequence": last.stop_sequence,
    }
    return fields | ({"stop_details": REPETITION} if last.reason == "repetition" else {})
