"""Conversion of Responses API request bodies to `Chat`, limits and output formats.

An unsupported field that would change the answer raises Unsupported with the field's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import TEXTS, Chat, OutputFormat
from mlxcache.wire import responses_types as types
from mlxcache.wire.formats import format_of_schema
from mlxcache.wire.images import ImageReader, Item, join_items
from mlxcache.wire.openai_output import read_format
from mlxcache.wire.openai_request import (
    EFFORT_BUDGETS,
    check_generation,
    check_template_args,
    effort_args,
    limit_tokens,
    parse_arguments,
)
from mlxcache.wire.responses_tools import INPUT, LOCAL_SHELL, Toolbox
from mlxcache.wire.retention import hints_from_retention
from mlxcache.wire.signatures import recover_thinking

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include` that this server supports; the others concern tools that it does not run."""

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_IMAGE_PARTS = frozenset({"input_image", "image_url"})


def check_supported(body: types.ResponsesRequest) -> None:
    """Raise Unsupported for the first unsupported field that would change the answer.

    Raises BadRequest if fields contradict each other, or `chat_template_kwargs` has an argument
    that the server itself passes.
    """
    check_generation(body)
    if body.n not in (None, 1) or body.best_of not in (None, 1):
        raise Unsupported("`n` is not supported: a response has one reply.", param="n")
    if body.background:
        message = "`background` is not supported: a reply is computed while its client waits."
        raise Unsupported(message, param="background")
    for field in ("conversation", "prompt", "context_management"):
        if getattr(body, field) not in (None, [], {}):
            hint = ": use `previous_response_id`" if field == "conversation" else ""
            raise Unsupported(f"`{field}` is not supported{hint}.", param=field)
    if body.top_logprobs and not wants_logprobs(body):
        message = f"`top_logprobs` needs `include` with '{LOGPROBS}'."
        raise BadRequest(message, param="top_logprobs")
    check_template_args(body.chat_template_kwargs)


def wants_logprobs(body: types.ResponsesRequest) -> bool:
    """Return whether the request asks for the log-probabilities of the reply's tokens."""
    return LOGPROBS in (body.include or ())


def wants_encrypted(body: types.ResponsesRequest) -> bool:
    """Return whether reasoning items must also have their text as `encrypted_content`."""
    return ENCRYPTED in (body.include or ())


def read_max_tokens(body: types.ResponsesRequest, default: int | None) -> int | None:
    """Return the maximum tokens of the reply, or None for no limit.

    `default` is returned if the request states no maximum. -1 in the request means no limit. Raises
    BadRequest for other values below 1 in the request.
    """
    if body.max_output_tokens is not None:
        return limit_tokens(body.max_output_tokens, "max_output_tokens")
    return limit_tokens(body.max_tokens, "max_tokens") if body.max_tokens is not None else default


def read_thinking_budget(body: types.ResponsesRequest, *, takes_effort: bool) -> int | None:
    """Return the maximum tokens of thinking, or None for no limit.

    It is `reasoning.max_tokens` of the request. If there is none, `reasoning.effort` becomes a
    number by `EFFORT_BUDGETS`, unless `takes_effort`: the chat template uses the effort itself.
    """
    reasoning = body.reasoning
    if reasoning is None:
        return None
    if reasoning.max_tokens is not None:
        return reasoning.max_tokens
    return None if takes_effort else EFFORT_BUDGETS.get(reasoning.effort or "")


def read_text_format(body: types.ResponsesRequest) -> OutputFormat | None:
    """Return the required format of the visible text, or None for free text.

    Raises:
        Unsupported: the kind of format is not supported.
        BadRequest: the schema is missing, or two fields require a format.
    """
    extension, form = read_format(body), body.text.format if body.text else None
    at = "text.format"
    if form is None or form.type == "text":
        return extension
    if extension is not None:
        message = f"A reply has one format: use `{at}` or `{extension.param}`, not both."
        raise BadRequest(message, param=at)
    if form.type == "json_object":
        return OutputFormat("json_object", param=at)
    if form.type != "json_schema":
        raise Unsupported(
            f"`{at}` {form.type[:64]!r} is not supported: use 'json_schema', 'json_object' or "
            "'text'.",
            param=at,
        )
    if form.schema is None:
        message = f"`{at}` of type 'json_schema' needs `name` and `schema`."
        raise BadRequest(message, param=f"{at}.schema")
    return format_of_schema(form.schema, f"{at}.schema")


# -- input -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input items of a request, after those of the stored responses that it continues.

    `stored` is the number of `items` that come from stored responses.
    """

    items: Sequence[types.RawItem]
    stored: int = 0

    def path(self, index: int) -> str:
        """Return the place of the item at `index` of `items`, for errors.

        It is, for example, `input[0]`, or `previous_response_id (item 0)` for a stored item.
        """
        at = index - self.stored
        return f"input[{at}]" if at >= 0 else f"previous_response_id (item {index})"


def read_input(body: types.ResponsesRequest) -> list[types.RawItem]:
    """Return the items of `input`. A text becomes one user message, an empty text no item."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}] if body.input else []
    return body.input


def to_chat(
    body: types.ResponsesRequest, talk: Conversation, tools: Toolbox, *, images: bool = False
) -> Chat:
    """Convert `instructions` and the items of `talk` to a chat.

    `images` tells whether the model accepts images. Raises Unsupported for unsupported items and
    media, and for images if the model accepts none; BadRequest for a malformed item or an empty
    conversation.
    """
    writer = MessageWriter(tools, ImageReader(images))
    if body.instructions:
        writer.messages.append({"role": "system", "content": body.instructions})
    for i, raw in enumerate(talk.items):
        writer.write(raw, talk.path(i))
    if not writer.messages:
        raise BadRequest("`input` is empty.", param="input")
    args = effort_args(body.reasoning.effort if body.reasoning else None)
    return Chat(
        messages=writer.messages,
        tools=tuple(tools.functions),
        template_args=args | (body.chat_template_kwargs or {}),
        keeps=hints_from_retention(body.prompt_cache_retention, len(writer.messages)),
    )


TURNS_AT_ONCE = 8
"""Turns that `shorten` drops at once.

The next requests then begin alike, and reuse each other's KV.
"""


def shorten(chat: Chat) -> list[Chat]:
    """Return versions of `chat` without its oldest turns, each shorter than the one before.

    Used for `truncation` `auto`. A turn begins with a user message. System and developer messages
    at the start and the newest turn are kept; other turns are dropped `TURNS_AT_ONCE` (8) at a
    time. The versions have no keep hints. Returns an empty list if there is only one turn.
    """
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    begins = [i for i, role in enumerate(roles) if role == "user" and i > head]
    cuts = begins[TURNS_AT_ONCE - 1 :: TURNS_AT_ONCE]
    if begins and begins[-1] not in cuts:
        cuts.append(begins[-1])
    first = chat.messages[:head]
    return [replace(chat, messages=[*first, *chat.messages[cut:]], keeps=()) for cut in cuts]


class MessageWriter:
    """Builder of `messages`, those of a `Chat`, from input items.

    Call `write` for each item. Reasoning, text and calls of one reply are separate items, which
    become one assistant message.
    """

    def __init__(self, tools: Toolbox, images: ImageReader):
        self.messages: list[dict[str, Any]] = []
        self._tools = tools
        self._images = images
        self._names: dict[str, str] = {}

    def write(self, raw: types.RawItem, where: str) -> None:
        """Add the messages for one input item. `where` is its place in the body, for errors.

        Raises Unsupported if the item or its content is not supported, and BadRequest if it is
        malformed.
        """
        item = types.read_item(raw, where)
        match item:
            case types.Message(role="assistant"):
                self._write_text(item, where)
            case types.Message():
                self._write_message(item, where)
            case types.FunctionCall():
                name = self._tools.rendered_name(item.name, item.namespace)
                self._write_call(item.call_id, name, parse_arguments(item.arguments))
            case types.CustomCall():
                name = self._tools.rendered_name(item.name, item.namespace)
                self._write_call(item.call_id, name, {INPUT: item.input})
            case types.LocalShellCall():
                id = item.call_id or item.id or f"call_{len(self.messages)}"
                self._write_call(id, LOCAL_SHELL, item.action or {})
            case types.CallOutput():
                self._write_output(item, where)
            case types.Reasoning():
                self._write_reasoning(item)

    def _write_message(self, message: types.Message, where: str) -> None:
        separator = "" if message.role == "user" else "\n\n"
        items = self._items(message.content, where, images=message.role == "user")
        content = join_items(items, separator)
        self.messages.append({"role": message.role, "content": content})

    def _items(
        self, content: str | list[types.Part] | None, where: str, *, images: bool
    ) -> list[Item]:
        if not isinstance(content, list):
            return [content or ""]
        items: list[Item] = []
        for i, part in enumerate(content):
            at = f"{where}.content[{i}]"
            if part.type in _IMAGE_PARTS and images and self._images.supported:
                items.append(self._images.read_url(part.image_url, at))
            else:
                items.append(_text(part, at))
        return items

    def _reply(self, *, begins: str) -> dict[str, Any]:
        """Return the assistant message to which an input item belongs; it is added if necessary.

        A reply has reasoning, then text, then calls. `begins` is the part that the item adds, as a
        key of the message: `reasoning_content`, `content` or `tool_calls`. A new message is added
        if the last one is not the assistant's, or already has this part or a later one. Calls are
        the exception: a message may have several.
        """
        order = ("reasoning_content", "content", "tool_calls")
        last = self.messages[-1] if self.messages else {}
        later = order[order.index(begins) + (begins == "tool_calls") :]
        if last.get("role") == "assistant" and not any(last.get(key) for key in later):
            return last
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _write_text(self, message: types.Message, where: str) -> None:
        texts = [str(item) for item in self._items(message.content, where, images=False)]
        reply = self._reply(begins="content")
        reply["content"] = "".join(texts)
        if sum(map(bool, texts)) > 1:
            reply[TEXTS] = tuple(text for text in texts if text)

    def _write_call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": id, "type": "function", "function": function}
        self._reply(begins="tool_calls").setdefault("tool_calls", []).append(call)

    def _write_output(self, item: types.CallOutput, where: str) -> None:
        """Add a message with a tool result. `where` is the item's place in the body, for errors."""
        items = self._items(item.output, f"{where}.output", images=True)
        content = join_items(items, "")
        message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
        if item.call_id in self._names:
            message["name"] = self._names[item.call_id]
        self.messages.append(message)

    def _write_reasoning(self, item: types.Reasoning) -> None:
        """Add a reasoning item to the assistant message of its reply.

        The item's summary is left out, because the model did not write it.
        """
        shown = "".join(part.text for part in item.content or ())
        if text := recover_thinking(shown, item.encrypted_content):
            self._reply(begins="reasoning_content")["reasoning_content"] = text


def _text(part: types.Part, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in _TEXT_PARTS and part.text is not None:
        return part.text
    if part.type in _TEXT_PARTS or part.type == "refusal":
        raise BadRequest(f"{where}: a part of type {part.type!r} needs its text.", param=where)
    raise Unsupported(
        f"{where}: content of type {part.type[:64]!r} is not supported.", param=f"{where}.type"
    )
