"""Conversion of engine events to objects and stream events of the Responses API.

Sources: https://platform.openai.com/docs/api-reference/responses/object and
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlxcache.types import Event, Finished, Piece, Sampling, Text, Thinking, ToolCall
from mlxcache.wire import responses_types as types
from mlxcache.wire.openai_reply import write_logprobs
from mlxcache.wire.reply import HeldLogprobs, finished_or_raise
from mlxcache.wire.responses_request import wants_encrypted, wants_logprobs
from mlxcache.wire.responses_tools import Toolbox, write_call
from mlxcache.wire.signatures import sign_thinking

Payload = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

LEFT_OUT_KEY = "mlxcache_left_out_tools"
"""Key of `metadata` for the types of tools that were left out of the prompt."""


def make_response(
    id: str, model: str, body: types.ResponsesRequest, sampling: Sampling, tools: Toolbox
) -> Payload:
    """Return the `response` object of a request before its reply begins: `status` `in_progress`.

    `id` and `model` are the response's. Types of tools that `tools` left out are in `metadata`.
    """
    metadata = dict(body.metadata or {})
    if tools.left_out:
        metadata[LEFT_OUT_KEY] = ", ".join(dict.fromkeys(tools.left_out))
    reasoning = body.reasoning or types.ReasoningConfig()
    text = msgspec.to_builtins(body.text.format) if body.text and body.text.format else None
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": _without_none(text) if text else {"type": "text"}},
        "tool_choice": _tool_choice(body),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": metadata,
    }


def _tool_choice(body: types.ResponsesRequest) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else _without_none(msgspec.to_builtins(choice))


def _tool(tool: types.Tool) -> Payload:
    shown: Payload = _without_none(msgspec.to_builtins(tool))
    if tool.type == "function":
        shown = {"parameters": None, "strict": False, **shown}
    return shown


def _without_none(value: Payload) -> Payload:
    return {key: one for key, one in value.items() if one is not None}


def count_usage(last: Finished) -> Payload:
    """Return the `usage` object, in tokens. `input_tokens` includes cached tokens."""
    cached = last.cached_tokens
    return {
        "input_tokens": last.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": last.prompt_tokens - cached,
        },
        "output_tokens": last.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": last.reasoning_tokens},
        "total_tokens": last.prompt_tokens + last.generated_tokens,
    }


@dataclass(slots=True)
class _Open:
    """The output item that is being generated, with its text and log-probabilities so far.

    `index` is its index in the response's `output`.
    """

    kind: Literal["reasoning", "message"]
    id: str
    index: int
    text: str
    logprobs: list[Payload]

    def append(self, text: str, logprobs: list[Payload]) -> None:
        """Add a piece of text and its log-probabilities to the item."""
        self.text += text
        self.logprobs += logprobs


class ResponseWriter:
    """Builder of a `response` object and of the stream events from which clients build the same.

    Call `begin`, then `feed` for each engine event, and finally `finish`, or `fail` after an error.
    `response` is the object so far, with the output items that are complete; `last` is the final
    engine event, None until it was fed. `whole` is True if a format or a tool call was required: a
    reply that was ended because it repeated itself is then incomplete. Events are numbered by
    `sequence_number`.
    """

    def __init__(
        self, response: Payload, body: types.ResponsesRequest, tools: Toolbox, *, whole: bool
    ):
        self.response = response
        self.last: Finished | None = None
        self._tools = tools
        self._show_logprobs = wants_logprobs(body)
        self._encrypted = wants_encrypted(body)
        self._whole = whole
        self._held = HeldLogprobs()
        self._open: _Open | None = None
        self._number = 0

    @property
    def output(self) -> list[Payload]:
        """Completed output items of the response."""
        items: list[Payload] = self.response["output"]
        return items

    def begin(self) -> list[Payload]:
        """Return the events to send before the first token."""
        return [self._lifecycle("response.created"), self.ping()]

    def ping(self) -> Payload:
        """Return the event `response.in_progress`.

        It is sent at the start, and again while there is no other event to send.
        """
        return self._lifecycle("response.in_progress")

    def feed(self, event: Event) -> list[Payload]:
        """Return the stream events to send for an engine event, maybe none.

        Raises GenerationFailed if the model failed, and NotReady if the reply was cancelled.
        """
        if isinstance(event, Piece):
            probs = self._held.take(event)
            return self._feed(event, write_logprobs(probs) if self._show_logprobs else [])
        if isinstance(event, Finished):
            return self._end(finished_or_raise(event))
        return []

    def fail(self, code: str, message: str) -> Payload:
        """Mark the response as failed and return its last stream event, `response.failed`.

        `code` and `message` become its `error`. An output item that was not completed is left out.
        """
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._lifecycle("response.failed")

    def cancel(self) -> None:
        """Mark the response as cancelled. Its completed output items are kept."""
        self.response["status"] = "cancelled"

    def _feed(self, piece: Piece, probs: list[Payload]) -> list[Payload]:
        match piece:
            case ToolCall():
                return [*self._close("completed"), *self._write_call(piece)]
            case Thinking(text) if text:
                return self._write_text("reasoning", text, [])
            case Text(text) if text:
                return self._write_text("message", text, probs)
        return []

    def _end(self, last: Finished) -> list[Payload]:
        self.last = last
        rest = self._held.end(last)
        cut = last.reason == "length" or (self._whole and last.reason == "repetition")
        status: Status = "incomplete" if cut else "completed"
        events: list[Payload] = []
        if rest and self._show_logprobs and self._open and self._open.kind == "message":
            events += self._write_text("message", "", write_logprobs(rest))
        events += self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": count_usage(last),
        }
        return events

    def finish(self) -> Payload:
        """Return the last event of the stream, after all engine events have been fed.

        Its type has the response's status: `response.completed` or `response.incomplete`.
        """
        return self._lifecycle(f"response.{self.response['status']}")

    # -- items -------------------------------------------------------------------------------

    def _write_text(
        self, kind: Literal["reasoning", "message"], text: str, probs: list[Payload]
    ) -> list[Payload]:
        events: list[Payload] = []
        if self._open is None or self._open.kind != kind:
            events += self._close("completed")
            self._open = _Open(kind, _item_id(kind), len(self.output), "", [])
            events += self._opening(self._open)
        item = self._open
        item.append(text, probs)
        part = "output_text" if kind == "message" else "reasoning_text"
        more = {"logprobs": probs} if kind == "message" else {}
        delta = self._event(f"response.{part}.delta", **self._place(item), delta=text, **more)
        return [*events, delta]

    def _opening(self, item: _Open) -> list[Payload]:
        empty = self._item(item, "in_progress") | {"content": []}
        empty.pop("encrypted_content", None)
        return [
            self._event("response.output_item.added", output_index=item.index, item=empty),
            self._event("response.content_part.added", **self._place(item), part=self._part(item)),
        ]

    def _close(self, status: Status) -> list[Payload]:
        """Complete the open output item, if there is one, and return the stream events that end it.

        `status`: the item's status, such as `completed`.
        """
        item, self._open = self._open, None
        if item is None:
            return []
        place = self._place(item)
        if item.kind == "message":
            ended = self._event(
                "response.output_text.done", **place, text=item.text, logprobs=item.logprobs
            )
        else:
            ended = self._event("response.reasoning_text.done", **place, text=item.text)
        part = self._event("response.content_part.done", **place, part=self._part(item))
        return [ended, part, self._add(self._item(item, status))]

    def _write_call(self, call: ToolCall) -> list[Payload]:
        item = write_call(call, self._tools, _item_id("fc"), "completed")
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        place = {"item_id": item["id"], "output_index": len(self.output)}
        text = item[field]
        ended = {field: text} if field == "input" else {field: text, "name": item["name"]}
        return [
            self._event(
                "response.output_item.added",
                output_index=len(self.output),
                item={**item, "status": "in_progress", field: ""},
            ),
            self._event(f"response.{name}.delta", **place, delta=text),
            self._event(f"response.{name}.done", **place, **ended),
            self._add(item),
        ]

    def _add(self, item: Payload) -> Payload:
        self.output.append(item)
        return self._event(
            "response.output_item.done", output_index=len(self.output) - 1, item=item
        )

    def _item(self, item: _Open, status: Status) -> Payload:
        if item.kind == "message":
            head = {"type": "message", "id": item.id, "role": "assistant", "status": status}
            return {**head, "content": [self._part(item)]}
        found: Payload = {"type": "reasoning", "id": item.id, "summary": [], "status": status}
        found["content"] = [self._part(item)]
        if self._encrypted:
            found["encrypted_content"] = sign_thinking(item.text)
        return found

    def _part(self, item: _Open) -> Payload:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return {
            "type": "output_text",
            "text": item.text,
            "annotations": [],
            "logprobs": item.logprobs,
        }

    # -- events ------------------------------------------------------------------------------

    def _place(self, item: _Open) -> Payload:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def _lifecycle(self, type: str) -> Payload:
        return self._event(type, response={**self.response, "output": list(self.output)})

    def _event(self, type: str, **fields: Any) -> Payload:
        number, self._number = self._number, self._number + 1
        return {"type": type, "sequence_number": number, **fields}


def _item_id(kind: str) -> str:
    prefix = {"reasoning": "rs", "message": "msg"}.get(kind, kind)
    return f"{prefix}_{secrets.token_hex(12)}"
