"""Conversion of Responses API request bodies to `Chat`, tools, limits and output formats.

An unsupported field that would change the answer raises Unsupported with the field's name.

Chat templates support only functions. A custom tool becomes a function with one string argument,
`input`. A tool of the type `namespace` is a named group of tools, which become separate functions.

Sources: https://platform.openai.com/docs/guides/function-calling and
https://platform.openai.com/docs/api-reference/responses/create#responses-create-tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import TEXTS, Chat, OutputFormat, ToolCall, ToolChoice
from mlxcache.wire import openai_request as openai
from mlxcache.wire import responses_types as types
from mlxcache.wire.chat_parts import (
    EFFORT_BUDGETS,
    MOST_NAME,
    Function,
    ToolUse,
    check_template_args,
    effort_args,
    format_of_schema,
    in_call_order,
    keep_hints,
    make_call,
    make_function,
    parse_arguments,
    with_strict,
)
from mlxcache.wire.decode import convert, wrong
from mlxcache.wire.grammar_pattern import pattern_of_lark, pattern_of_regex
from mlxcache.wire.images import ImageReader, Item, join_items
from mlxcache.wire.openai_types import is_on
from mlxcache.wire.signatures import SignatureReader

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include` that this server supports; the others concern tools that it does not run."""

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_IMAGE_PARTS = frozenset({"input_image", "image_url"})


def check_supported(body: types.ResponsesRequest) -> None:
    """Raise Unsupported for the first unsupported field that would change the answer.

    Raises BadRequest if fields contradict each other.
    """
    openai.check_generation(body)
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
    if any(item.get("type") == types.TRIGGER for item in read_input(body)[:-1]):
        raise BadRequest(f"`input`: an item `{types.TRIGGER}` must be the last.", param="input")
    check_template_args(body.chat_template_kwargs)


def wants_logprobs(body: types.ResponsesRequest) -> bool:
    return LOGPROBS in (body.include or ())


def wants_encrypted(body: types.ResponsesRequest) -> bool:
    """Return whether reasoning items must also have their text as `encrypted_content`."""
    return ENCRYPTED in (body.include or ())


def read_thinking_budget(body: types.ResponsesRequest, *, takes_effort: bool) -> int | None:
    """Return the maximum tokens of thinking, or None for no limit.

    It is 0 if thinking is off. Without a stated number, the effort becomes one, unless the chat
    template `takes_effort` itself.
    """
    reasoning = body.reasoning
    if template_args(body).get("enable_thinking") is False:
        return 0
    if reasoning is None:
        return None
    if reasoning.max_tokens is not None:
        return reasoning.max_tokens
    return None if takes_effort else EFFORT_BUDGETS.get(reasoning.effort or "")


def read_text_format(body: types.ResponsesRequest) -> OutputFormat | None:
    """Return the required format of the visible text, or None for free text."""
    extension, form = openai.read_format(body), body.text.format if body.text else None
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
    """Input items of a request, after the `stored` ones of the responses that it continues."""

    items: Sequence[types.RawItem]
    stored: int = 0

    def path(self, index: int) -> str:
        """Return the place of the item at `index`, such as `input[0]`, for errors."""
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

    `images` tells whether the model accepts images.
    """
    writer = _ChatWriter(tools, ImageReader(images))
    if body.instructions:
        writer.messages.append({"role": "system", "content": body.instructions})
    for i, raw in enumerate(talk.items):
        writer.write(raw, talk.path(i))
    if not writer.messages:
        raise BadRequest("`input` is empty.", param="input")
    return Chat(
        messages=in_call_order(writer.messages),
        tools=tuple(tools.functions),
        template_args=template_args(body),
        keeps=keep_hints(body.prompt_cache_retention, len(writer.messages)),
    )


def template_args(body: types.ResponsesRequest) -> dict[str, Any]:
    args = effort_args(body.reasoning.effort if body.reasoning else None)
    return args | (body.chat_template_kwargs or {})


TURNS_AT_ONCE = 8
"""Turns that `shorten` drops at once: the next requests then begin alike, and reuse KV."""


def shorten(chat: Chat) -> list[Chat]:
    """Return versions of `chat` without its oldest turns, each shorter than the one before.

    A turn begins with a user message. System and developer messages at the start and the newest
    turn are kept. The versions have no keep hints. Returns none if there is only one turn.
    """
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    begins = [i for i, role in enumerate(roles) if role == "user" and i > head]
    cuts = begins[TURNS_AT_ONCE - 1 :: TURNS_AT_ONCE]
    if begins and begins[-1] not in cuts:
        cuts.append(begins[-1])
    first = chat.messages[:head]
    return [replace(chat, messages=[*first, *chat.messages[cut:]], keeps=()) for cut in cuts]


SUMMARY = "Summary of this conversation so far, written by the assistant:"

_ASK_FOR_SUMMARY = (
    "Summarise this conversation, so that you can go on with the work from your summary and the "
    "user's messages alone. State the goal, what was decided and why, what was done, which files, "
    "names and commands matter, what is not done yet, and the next step. Answer with the summary "
    "only, and call no tools."
)


def asks_for_summary(body: types.ResponsesRequest) -> bool:
    return any(item.get("type") == types.TRIGGER for item in read_input(body)[-1:])


def ask_for_summary(body: types.ResponsesRequest) -> types.ResponsesRequest:
    """Return the request whose reply is a summary of the conversation of `body`.

    Its prompt begins as that of the conversation's next turn, so it reuses the KV of the last one.
    """
    asking = [] if asks_for_summary(body) else [{"type": types.TRIGGER}]
    items = [*read_input(body), *asking]
    if len(items) == 1 and not body.previous_response_id:
        raise BadRequest("`input` is empty: there is nothing to summarise.", param="input")
    return msgspec.structs.replace(
        body,
        input=items,
        tool_choice="none",
        truncation=None,
        stop=None,
        text=None,
        store=False,
    )


class _ChatWriter:
    """Builder of `messages`, those of a chat, from input items.

    Reasoning, text and calls of one reply are separate items, which become one assistant message.
    """

    def __init__(self, tools: Toolbox, images: ImageReader):
        self.messages: list[dict[str, Any]] = []
        self._tools = tools
        self._images = images
        self._signatures = SignatureReader()
        self._names: dict[str, str] = {}

    def write(self, raw: types.RawItem, where: str) -> None:
        """Add the messages for the input item at `where`."""
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
            case types.Compaction():
                self._write_summary(item, where)
            case types.CompactionTrigger():
                self.messages.append({"role": "user", "content": _ASK_FOR_SUMMARY})

    def _write_message(self, message: types.Message, where: str) -> None:
        if message.content is None:
            raise wrong(f"{where}.content", f"a {message.role} message needs content.")
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

        A reply has reasoning, then text, then calls. `begins`: the part that the item adds. A new
        message is added if the last one is not the assistant's, or already has this part (but it
        may have several calls) or a later one.
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
        self._names[id] = name[:MOST_NAME]
        call = make_call(id, name, arguments)
        self._reply(begins="tool_calls").setdefault("tool_calls", []).append(call)

    def _write_output(self, item: types.CallOutput, where: str) -> None:
        items = self._items(item.output, f"{where}.output", images=True)
        content = join_items(items, "")
        message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
        if item.call_id in self._names:
            message["name"] = self._names[item.call_id]
        self.messages.append(message)

    def _write_summary(self, item: types.Compaction, where: str) -> None:
        if not (summary := self._signatures.recover("", item.encrypted_content)):
            message = "this summary was not written by mlxcache, or is damaged: it cannot be read."
            raise wrong(f"{where}.encrypted_content", message)
        self.messages.append({"role": "user", "content": f"{SUMMARY}\n\n{summary}"})

    def _write_reasoning(self, item: types.Reasoning) -> None:
        # The summary is left out, because the model did not write it.
        shown = "".join(part.text for part in item.content or ())
        if text := self._signatures.recover(shown, item.encrypted_content):
            self._reply(begins="reasoning_content")["reasoning_content"] = text


def _text(part: types.Part, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in _TEXT_PARTS and part.text is not None:
        return part.text
    if part.type in _TEXT_PARTS or part.type == "refusal":
        raise wrong(where, f"a part of type {part.type!r} needs its text.")
    raise Unsupported(
        f"{where}: content of type {part.type[:64]!r} is not supported.", param=f"{where}.type"
    )


# -- tools -----------------------------------------------------------------------------------

INPUT = "input"
"""Name of the only argument of a custom tool's function."""

LOCAL_SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class Entry:
    """One callable tool: its name for the client, and that of its group of tools, if any."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Toolbox:
    """Tools of one request, in the client's order.

    `functions` holds the tools in the form of `Chat.tools`; `left_out` the types of those that are
    left out of the prompt.
    """

    def __init__(self, tools: Sequence[types.Tool]):
        self.functions: list[Function] = []
        self.left_out: list[str] = []
        # with `strict` and patterns, which are not rendered
        self._callable: list[Function] = []
        self._entries: dict[str, Entry] = {}
        self._rendered: dict[tuple[str, str | None], str] = {}
        for at, tool, namespace in _flatten(tools):
            if tool.type in types.LEFT_OUT:
                self.left_out.append(tool.type)
            else:
                self._add(tool, namespace, at)

    def _add(self, tool: types.Tool, namespace: str | None, at: str) -> None:
        if tool.type not in ("function", "custom"):
            raise Unsupported(
                f"{at}: tools of type {tool.type[:64]!r} are not supported: they run on OpenAI's "
                "servers only.",
                param=f"{at}.type",
            )
        if not tool.name:
            raise wrong(f"{at}.name", "a name is required.")
        rendered = tool.name
        if rendered in self._entries and namespace:
            rendered = f"{namespace}__{tool.name}"
        if rendered in self._entries:
            raise BadRequest(f"{at}: two tools are named {rendered[:64]!r}.", param=f"{at}.name")
        if tool.type == "custom":
            function, limited = _custom(tool, rendered, at)
        else:
            function = make_function(rendered, tool.description, tool.parameters)
            limited = with_strict(function) if is_on(tool.strict) else function
        self._entries[rendered] = Entry(tool.name, namespace, tool.type == "custom")
        self._rendered.setdefault((tool.name, namespace), rendered)
        self._rendered.setdefault((tool.name, None), rendered)
        self.functions.append(function)
        self._callable.append(limited)

    def rendered_name(self, name: str, namespace: str | None) -> str:
        """Return the name in the prompt of the tool that the client calls `name`.

        A `namespace` of None matches any group. An unknown name is returned unchanged.
        """
        return self._rendered.get((name, namespace), name)

    def find(self, rendered: str) -> Entry:
        """Return the tool with a name in the prompt; a function of this name if it is unknown."""
        return self._entries.get(rendered) or Entry(rendered)

    def read_use(self, body: types.ResponsesRequest) -> ToolUse:
        """Return which tools may be called, and how, as the body's `tool_choice` asks for."""
        choice = body.tool_choice or "auto"
        asked = types.ToolChoice(choice) if isinstance(choice, str) else choice
        if asked.type == "none" or (asked.type == "auto" and not self.functions):
            return ToolUse()
        found = self._choice(asked)
        if not self.functions:
            message = "`tool_choice` needs `tools`, and there are none."
            raise BadRequest(message, param="tool_choice")
        named = asked.type in ("function", "custom")
        single = named or body.parallel_tool_calls is False or body.max_tool_calls == 1
        return ToolUse(tuple(self._callable), found, parallel=not single, named=named)

    def _choice(self, asked: types.ToolChoice) -> ToolChoice:
        match asked.type:
            case "auto":
                return ToolChoice()
            case "required":
                return ToolChoice(required=True)
            case "function" | "custom":
                return ToolChoice(True, (self._known(asked.name, asked.namespace, "tool_choice"),))
            case "allowed_tools" if asked.tools:
                names = [
                    self._known(tool.name, tool.namespace, f"tool_choice.tools[{i}]")
                    for i, tool in enumerate(asked.tools)
                    if tool.type not in types.LEFT_OUT
                ]
                return ToolChoice(asked.mode == "required", tuple(dict.fromkeys(names)))
            case "allowed_tools":
                message = "`tool_choice` of type 'allowed_tools' needs `tools`."
                raise BadRequest(message, param="tool_choice.tools")
        if asked.type in types.LEFT_OUT or asked.type in ("file_search", "code_interpreter", "mcp"):
            message = f"`tool_choice` {asked.type!r}: this tool runs on OpenAI's servers only."
            raise Unsupported(message, param="tool_choice")
        raise BadRequest(
            "`tool_choice` must be 'auto', 'none', 'required', or an object of type 'function', "
            "'custom' or 'allowed_tools'.",
            param="tool_choice",
        )

    def _known(self, name: str | None, namespace: str | None, at: str) -> str:
        if not name:
            raise BadRequest(f"`{at}` needs the tool's name.", param=at)
        rendered = self.rendered_name(name, namespace)
        if rendered not in self._entries:
            message = f"`{at}` names {name[:64]!r}, which is not one of `tools`."
            raise BadRequest(message, param="tool_choice")
        return rendered


def _flatten(tools: Sequence[types.Tool]) -> Iterator[tuple[str, types.Tool, str | None]]:
    """Yield each tool's place in the body, the tool, and its group's name, if it is in one."""
    for i, tool in enumerate(tools):
        if tool.type != "namespace":
            yield f"tools[{i}]", tool, None
            continue
        if not tool.name:
            raise wrong(f"tools[{i}].name", "a name is required.")
        if len(tool.name) > MOST_NAME:
            raise wrong(f"tools[{i}].name", f"at most {MOST_NAME} characters are accepted.")
        for j, raw in enumerate(tool.tools or ()):
            at = f"tools[{i}].tools[{j}]"
            yield at, convert(raw, types.Tool, at), tool.name


def _input_schema(**limits: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", **limits}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _custom(tool: types.Tool, rendered: str, at: str) -> tuple[Function, Function]:
    """Return a custom tool as a function, and the same with the grammar of its input, if any."""
    description, form = tool.description or "", tool.format or types.CustomFormat()
    if form.type != "grammar":
        free = make_function(rendered, description, _input_schema())
        return free, free
    if not form.syntax or not form.definition:
        raise wrong(f"{at}.format", "a grammar needs `syntax` and `definition`.")
    read = pattern_of_lark if form.syntax == "lark" else pattern_of_regex
    pattern = read(form.definition, f"{at}.format.definition")
    kind = "Lark grammar" if form.syntax == "lark" else "regular expression"
    rule = f"`{INPUT}` must follow this {kind}:\n{form.definition}"
    description = f"{description}\n\n{rule}" if description else rule
    limited = make_function(rendered, description, _input_schema(pattern=pattern))
    return make_function(rendered, description, _input_schema()), with_strict(limited)


# -- calls -----------------------------------------------------------------------------------


def write_call(call: ToolCall, tools: Toolbox, id: str, status: str) -> dict[str, Any]:
    """Return the output item of a tool call, with this id and status."""
    entry = tools.find(call.name)
    head: dict[str, Any] = {"id": id, "call_id": call.id, "name": entry.name, "status": status}
    if entry.namespace:
        head["namespace"] = entry.namespace
    if entry.custom:
        return {"type": "custom_tool_call", **head, "input": _read_input(call.arguments)}
    return {"type": "function_call", **head, "arguments": call.arguments}


def _read_input(arguments: str) -> str:
    """Return the input of a custom tool's call; its JSON if that is no object with only this."""
    value = json.loads(arguments)
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
