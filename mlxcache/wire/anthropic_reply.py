"""From a reply's pieces to a Messages object, or to the events that build one.

Source: https://docs.anthropic.com/en/api/messages and .../messages-streaming. Both come from the
same `Blocks`, so a streamed reply and a whole one hold the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from mlxcache import typed
from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.types import Finished, FinishReason, Piece, Prompt, Text, Thinking, ToolCall
from mlxcache.wire.anthropic_request import ID_PREFIX
from mlxcache.wire.decode import decode
from mlxcache.wire.signatures import sign

WireEvent = dict[str, Any]

STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
"""The reasons by which a reply comes to its own end; the others are errors."""


class Blocks:
    """Content blocks as they grow; `content` holds those that are closed.

    White space that begins a text or a thinking block is held back until more follows: a block of
    nothing else is never sent, for clients drop it or are refused when they send it back.
    `show_thinking` False: reasoning is sent only inside its signature.
    """

    def __init__(self, *, show_thinking: bool = True):
        self.content: list[dict[str, Any]] = []
        self._show_thinking = show_thinking
        self._kind: type[Text | Thinking] | None = None
        self._text = ""
        self._started = False

    def feed(self, piece: Piece) -> list[WireEvent]:
        """The events that `piece` adds.

        Raises GenerationFailed where a tool call's arguments are not a JSON object.
        """
        if isinstance(piece, ToolCall):
            return [*self.close(), *self._tool_use(piece)]
        ended = [] if type(piece) is self._kind else self.close()
        self._kind = type(piece)
        return [*ended, *self._grow(piece.text)]

    def close(self) -> list[WireEvent]:
        """The events that end the block that is open, if one is."""
        return list(self._end())

    def _end(self) -> Iterator[WireEvent]:
        text, started = self._text, self._started
        thinks = self._kind is Thinking
        self._kind, self._text, self._started = None, "", False
        if not started:
            return
        if not thinks:
            yield from self._stop({"type": "text", "text": text})
            return
        signature = sign(text)
        yield self._delta({"type": "signature_delta", "signature": signature})
        shown = text if self._show_thinking else ""
        yield from self._stop({"type": "thinking", "thinking": shown, "signature": signature})

    def _grow(self, text: str) -> Iterator[WireEvent]:
        self._text += text
        if not self._started:
            if not self._text.strip():
                return
            self._started, text = True, self._text
            yield self._start()
        if self._kind is Text and text:
            yield self._delta({"type": "text_delta", "text": text})
        elif self._show_thinking and text:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _start(self) -> WireEvent:
        if self._kind is Text:
            return self._begin({"type": "text", "text": ""})
        return self._begin({"type": "thinking", "thinking": "", "signature": ""})

    def _tool_use(self, call: ToolCall) -> Iterator[WireEvent]:
        raw, arguments = _arguments(call)
        block = {"type": "tool_use", "id": f"{ID_PREFIX}{call.id}", "name": call.name}
        yield self._begin(block | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": raw})
        yield from self._stop(block | {"input": arguments})

    def _begin(self, block: dict[str, Any]) -> WireEvent:
        return {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> WireEvent:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _stop(self, block: dict[str, Any]) -> Iterator[WireEvent]:
        yield {"type": "content_block_stop", "index": len(self.content)}
        self.content.append(block)


def _arguments(call: ToolCall) -> tuple[str, dict[str, Any]]:
    raw = call.arguments or "{}"
    try:
        return raw, typed.decode(dict[str, Any], raw)
    except msgspec.DecodeError:
        pass  # half of an escaped surrogate pair is what strict readers refuse: mended below
    try:
        mended = decode(dict[str, Any], raw.encode())
    except BadRequest as error:
        message = f"The arguments of {call.name} are not a JSON object."
        raise GenerationFailed(message) from error
    return msgspec.json.encode(mended).decode(), mended


def usage(prompt: Prompt, cached: int, generated: int = 0) -> dict[str, int]:
    """Token counts as Anthropic splits them; the three of the prompt are disjoint and add up to it.

    `cache_read_input_tokens` were not fed, `cache_creation_input_tokens` were fed up to the last
    cache_control mark, `input_tokens` after it.
    """
    creation = max(0, (prompt.breakpoint or 0) - cached)
    return {
        "input_tokens": len(prompt.ids) - cached - creation,
        "cache_creation_input_tokens": creation,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def message(id: str, model: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """A message that has only begun: no content, no reason to stop."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": counts,
    }


def ending(finished: Finished) -> dict[str, str | None]:
    """`stop_reason` and `stop_sequence` of a reply that came to its own end."""
    return {
        "stop_reason": STOP_REASONS[finished.reason],
        "stop_sequence": finished.stop_sequence,
    }
