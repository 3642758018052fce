"""Conversion of engine events to objects and stream events of the Responses API.

Sources: https://platform.openai.com/docs/api-reference/responses/object and
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from mlxcache.errors import GenerationFailed
from mlxcache.types import Event, Finished, Piece, Sampling, Text, Thinking, TokenLogprob, ToolCall
from mlxcache.wire import responses_types as types
from mlxcache.wire.openai_reply import write_logprobs
from mlxcache.wire.reply import HeldLogprobs, finished_or_raise, is_cut
from mlxcache.wire.responses_request import Toolbox, wants_encrypted, wants_logprobs, write_call
from mlxcache.wire.signatures import sign_thinking

Payload = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

LEFT_OUT_KEY = "mlxcache_left_out_tools"

PREFIX = "resp_"
_ITEM_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
"""Beginnings of the ids of output items, whose rest names the response and the place in it."""


def response_of_item(id: str) -> str:
    """Return the id of the response that has the item `id`, if the server made that id."""
    return PREFIX + id.partition("_")[2].rpartition("_")[0]


def make_response(
    id: str, model: str, body: types.ResponsesRequest, sampling: Sampling, tools: Toolbox
) -> Payload:
    """Return the `response` object of a request before its reply begins."""
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


def _summarised(response: Payload) -> str:
    """Return the text of a whole response in the form that an item `compaction` has.

    Raises GenerationFailed if it has no text, or was cut.
    """
    messages = [item for item in response["output"] if item["type"] == "message"]
    text = "".join(part["text"] for item in messages for part in item["content"]).strip()
    if not text:
        raise GenerationFailed("The model wrote no summary: try again, or use another model.")
    if response["status"] != "completed":
        written = response["usage"]["output_tokens"]
        raise GenerationFailed(
            f"The summary was cut after {written} tokens: allow more (`max_output_tokens`, or "
            "`--max-tokens` of the server)."
        )
    return sign_thinking(text)


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


_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of the only part of an output item, by the item's own."""


@dataclass(slots=True)
class _Open:
    """The output item that is being generated, with its `index` in the response's `output`."""

    kind: Literal["reasoning", "message"]
    id: str
    index: int
    text: str = ""
    logprobs: list[Payload] = field(default_factory=list)

    @property
    def place(self) -> Payload:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def part(self) -> Payload:
        part: Payload = {"type": _TEXTS[self.kind], "text": self.text}
        more = {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else {}
        return part | more

    def probs(self, logprobs: list[Payload]) -> Payload:
        """Return the field for log-probabilities, which only messages have."""
        return {"logprobs": logprobs} if self.kind == "message" else {}


class ResponseWriter:
    """Builder of a `response` object and of the stream events from which clients build the same.

    Call `begin`, then `feed` for each engine event, and finally `finish`, or `fail` after an error.
    `response` is the object so far, with the output items that are complete. `whole`: a format or a
    call was required, so that a reply that repeated itself is incomplete.
    """

    def __init__(
        self, response: Payload, body: types.ResponsesRequest, tools: Toolbox, *, whole: bool
    ):
        self.response = response
        self._output: list[Payload] = response["output"]
        self._tools = tools
        self._show_logprobs = wants_logprobs(body)
        self._encrypted = wants_encrypted(body)
        self._whole = whole
        self._held = HeldLogprobs()
        self._open: _Open | None = None
        self._number = 0
        self._events: list[Payload] = []

    def begin(self) -> list[Payload]:
        return [self._lifecycle("created"), self.ping()]

    def ping(self) -> Payload:
        return self._lifecycle("in_progress")

    def feed(self, event: Event) -> list[Payload]:
        """Return the stream events to send for an engine event, maybe none."""
        if isinstance(event, Piece):
            self._feed(event, self._held.take(event))
        elif isinstance(event, Finished):
            self._end(finished_or_raise(event))
        events, self._events = self._events, []
        return events

    def finish(self) -> Payload:
        """Return the last event of the stream, after all engine events have been fed."""
        return self._lifecycle(self.response["status"])

    def fail(self, code: str, message: str) -> Payload:
        """Mark the response as failed and return its last stream event."""
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._lifecycle("failed")

    def cancel(self) -> None:
        self.response["status"] = "cancelled"

    def _feed(self, piece: Piece, tokens: Sequence[TokenLogprob]) -> None:
        match piece:
            case ToolCall():
                self._close("completed")
                self._write_call(piece)
            case Thinking(text) if text:
                self._write_text("reasoning", text)
            case Text(text) if text:
                self._write_text("message", text, tokens)

    def _end(self, last: Finished) -> None:
        rest = self._held.end(last)
        cut = is_cut(last, self._whole)
        status: Status = "incomplete" if cut else "completed"
        if rest and self._show_logprobs and self._open and self._open.kind == "message":
            self._write_text("message", "", rest)
        self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": count_usage(last),
        }

    # -- items -------------------------------------------------------------------------------

    def _write_text(
        self,
        kind: Literal["reasoning", "message"],
        text: str,
        tokens: Sequence[TokenLogprob] = (),
    ) -> None:
        if self._open is None or self._open.kind != kind:
            self._close("completed")
            self._open = _Open(kind, self._next_id(kind), len(self._output))
            self._begin(self._open)
        item: _Open = self._open
        probs = write_logprobs(tokens) if self._show_logprobs else []
        item.text += text
        item.logprobs += probs
        self._emit(f"{_TEXTS[kind]}.delta", **item.place, delta=text, **item.probs(probs))

    def _begin(self, item: _Open) -> None:
        empty = self._item(item, "in_progress") | {"content": []}
        empty.pop("encrypted_content", None)
        self._emit("output_item.added", output_index=item.index, item=empty)
        self._emit("content_part.added", **item.place, part=item.part)

    def _close(self, status: Status) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        probs = item.probs(item.logprobs)
        self._emit(f"{_TEXTS[item.kind]}.done", **item.place, text=item.text, **probs)
        self._emit("content_part.done", **item.place, part=item.part)
        self._add(self._item(item, status))

    def _write_call(self, call: ToolCall) -> None:
        item = write_call(call, self._tools, self._next_id("function_call"), "completed")
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        index, text = len(self._output), item[field]
        begun = {**item, "status": "in_progress", field: ""}
        ended = {field: text} if field == "input" else {field: text, "name": item["name"]}
        self._emit("output_item.added", output_index=index, item=begun)
        self._emit(f"{name}.delta", item_id=item["id"], output_index=index, delta=text)
        self._emit(f"{name}.done", item_id=item["id"], output_index=index, **ended)
        self._add(item)

    def _add(self, item: Payload) -> None:
        self._output.append(item)
        self._emit("output_item.done", output_index=len(self._output) - 1, item=item)

    def _next_id(self, kind: str) -> str:
        own = self.response["id"].removeprefix(PREFIX)
        return f"{_ITEM_PREFIXES[kind]}_{own}_{len(self._output)}"

    def _item(self, item: _Open, status: Status) -> Payload:
        head = {"type": item.kind, "id": item.id}
        if item.kind == "message":
            return {**head, "role": "assistant", "status": status, "content": [item.part]}
        found: Payload = {**head, "summary": [], "status": status, "content": [item.part]}
        if self._encrypted:
            found["encrypted_content"] = sign_thinking(item.text)
        return found

    # -- events ------------------------------------------------------------------------------

    def _emit(self, type: str, **fields: Any) -> None:
        self._events.append(self._event(type, **fields))

    def _lifecycle(self, type: str) -> Payload:
        return self._event(type, response={**self.response, "output": list(self._output)})

    def _event(self, type: str, **fields: Any) -> Payload:
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{type}", "sequence_number": number, **fields}


class SummaryWriter(ResponseWriter):
    """Writer of a response whose only output item is `compaction`: the text that was written."""

    def feed(self, event: Event) -> list[Payload]:
        number = self._number
        super().feed(event)
        self._number = number  # those events are not sent
        if not isinstance(event, Finished):
            return []
        summary = {"type": "compaction", "id": f"cmp_{self.response['id'].removeprefix(PREFIX)}"}
        text = _summarised(self.response)
        self._output.clear()
        begun = {**summary, "encrypted_content": ""}
        self._emit("output_item.added", output_index=0, item=begun)
        self._add({**summary, "encrypted_content": text})
        events, self._events = self._events, []
        return events
