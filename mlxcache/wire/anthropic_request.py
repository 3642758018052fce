"""Conversion of Anthropic's Messages bodies to `Chat`, tools, output settings and `Sampling`.

When a conversation grows by a turn, its earlier messages must be converted to the same result. Each
rule here therefore depends only on a block and the blocks before it: never on later blocks, on
whether a text was sent as a string or as a list, or on cache_control. Texts of one message are
joined by a blank line, and empty texts are left out.

Sources: https://docs.anthropic.com/en/api/messages,
https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview,
https://docs.anthropic.com/en/docs/build-with-claude/structured-outputs and
https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching (`cache_control`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlxcache.errors import BadRequest, ContextLengthExceeded, Unsupported
from mlxcache.types import DEFAULTED, TEXTS, Chat, OutputFormat, Sampling, ToolChoice
from mlxcache.wire import anthropic_types as types
from mlxcache.wire.chat_parts import (
    EFFORT_BUDGETS,
    HOUR,
    MINUTES_5,
    MOST_NAME,
    Function,
    effort_args,
    format_of_schema,
    in_call_order,
    make_call,
    make_function,
    with_strict,
)
from mlxcache.wire.decode import convert, unsupported, wrong
from mlxcache.wire.images import ImageReader, Item, join_items
from mlxcache.wire.openai_types import is_on
from mlxcache.wire.signatures import SignatureReader

ID_PREFIX = "toolu_"
"""Prefix of tool call ids in this API; a `Chat` has the ids without it."""

NO_THREADS = "thread_unsupported_request"
"""Error code of the API for a server that does not store threads.

The SDK's tool runner then sends the whole conversation with each request.
"""


def to_chat(
    body: types.Conversation, *, strict: bool = True, images: bool = False
) -> tuple[Chat, tuple[Function, ...]]:
    """Convert `body` to a chat and to all tools that may be called, including deferred ones.

    The reply continues a final assistant message, unless that ends in a tool call, in reasoning or
    in white space: then BadRequest is raised if `strict`, else the message is taken as complete.
    `images`: whether the model accepts images. Raises Unsupported for what would change the answer,
    and BadRequest for what is malformed or not allowed at its place.
    """
    _check_supported(body)
    try:
        tools = Toolbox(body.tools or ())
        writer = _ChatWriter(tools, ImageReader(images))
        writer.begin(body)
        last_user = max((i for i, m in enumerate(body.messages) if m.role == "user"), default=-1)
        for i, message in enumerate(body.messages):
            cleared = message.clear_at == "next_user_message" and i < last_user
            writer.write(message, f"messages[{i}]", cleared=cleared)
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error
    if body.cache_control is not None:
        writer.mark()
    continues = body.messages[-1].role == "assistant" and writer.continue_last(strict=strict)
    chat = Chat(
        messages=tuple(in_call_order(writer.messages)),
        tools=tuple(tools.head),
        template_args=template_args(body),
        breakpoint=writer.breakpoint,
        continue_final=continues,
        keeps=_keep_hints(body, writer.breakpoint),
    )
    return chat, tools.callable()


def to_sampling(body: types.Request) -> Sampling:
    """Convert the sampling fields. The model's own defaults apply to omitted ones (`unset`)."""
    top_p = 1.0 if body.top_p is None else body.top_p
    stated = {name for name in ("temperature", "top_p", "top_k") if getattr(body, name) is not None}
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=top_p or 1.0,
        # A nucleus of no mass holds the likeliest token alone; a top_p of 0 would mean "off" below.
        top_k=(body.top_k or 0) if top_p else 1,
        unset=frozenset(DEFAULTED) - stated - {"" if top_p else "top_k"},
    )


_NOT_APPLIED_EDITS = frozenset({"clear_thinking_20251015", "clear_tool_uses_20250919"})
"""Edits that are accepted although nothing is cleared: the prefix would be computed again."""


def _check_supported(body: types.Conversation) -> None:
    config, management = body.output_config, body.context_management
    refused = {
        "mcp_servers": body.mcp_servers,
        "container": body.container,
        "compaction": body.compaction,
        "output_config.task_budget": config and config.task_budget,
    }
    for name, value in refused.items():
        if value:
            raise Unsupported(f"{name} is not supported.", param=name)
    for i, edit in enumerate(management.edits if management else ()):
        if edit.type not in _NOT_APPLIED_EDITS:
            raise unsupported(
                f"context_management.edits[{i}]",
                f"edits of type {edit.type[:64]!r} are not supported.",
            )
    if body.thread:
        raise Unsupported(
            "thread is not supported: send the whole conversation in messages.",
            param="thread",
            code=NO_THREADS,
        )


def _keep_hints(body: types.Conversation, breakpoint: int | None) -> tuple[tuple[int, float], ...]:
    """Return the keep hints that the fields `cache_control` in `body` ask for.

    Each is a pair: the number of leading messages to keep (0: only tools and system prompt), and
    the seconds to keep them after each use. `breakpoint`: that of the chat.
    """
    head = [*(tool.cache_control for tool in body.tools or ()), *_marks(body.system)]
    rest = [mark for message in body.messages for mark in _marks(message.content)]
    hints = {0: _longest(head)}
    if breakpoint:
        hints[breakpoint] = _longest([*rest, body.cache_control])
    return tuple((leading, seconds) for leading, seconds in hints.items() if seconds)


def _marks(content: types.Content | None) -> list[Any]:
    return [block.get("cache_control") for block in content] if isinstance(content, list) else []


def _longest(marks: Iterable[Any]) -> float:
    """Return the longest time in seconds that `marks` ask for; an unknown `ttl` is 5 minutes."""
    given = [mark for mark in marks if isinstance(mark, dict)]
    return max((HOUR if mark.get("ttl") == "1h" else MINUTES_5 for mark in given), default=0.0)


# -- messages --------------------------------------------------------------------------------


class _ChatWriter:
    """Builder of `messages`, those of a chat, from those of a request body.

    `breakpoint` is the number of leading messages up to and including the last one with a field
    `cache_control`: 0 if only tools or the system prompt have one, None if there is none.
    """

    def __init__(self, tools: Toolbox, images: ImageReader):
        self.messages: list[dict[str, Any]] = []
        self.breakpoint: int | None = None
        self._blocks = _BlockReader(tools, images)
        self._tool_names: dict[str, str] = {}
        self._signatures = SignatureReader()

    def begin(self, body: types.Conversation) -> None:
        texts, marked = self._blocks.read_texts(body.system or "", "system")
        if any(texts):
            self.messages.append({"role": "system", "content": _join(texts)})
        if marked or any(tool.cache_control is not None for tool in body.tools or ()):
            self.breakpoint = 0

    def write(self, message: types.Message, where: str, *, cleared: bool = False) -> None:
        """Add one message of the body, which is at `where`.

        A `cleared` system message is left out: the client limited it with `clear_at` to the time
        before the next user message. Tools defined in it can be called nevertheless.
        """
        where += ".content"
        if message.role == "system":
            texts, marked = self._blocks.read_texts(message.content or "", where)
            if any(texts) and not cleared:
                self._append({"role": "system", "content": _join(texts)}, marked)
            elif marked:
                self.mark()
        elif message.content is None:
            raise wrong(where, "a text or a list of blocks is required.")
        elif message.role == "assistant":
            self._write_assistant(message.content, where)
        else:
            self._write_user(message.content, where)

    def mark(self) -> None:
        self.breakpoint = len(self.messages)

    def continue_last(self, *, strict: bool) -> bool:
        """Return whether the reply is to continue the final assistant message.

        Removes an empty one. One that cannot be continued raises BadRequest if `strict`.
        """
        last = self.messages[-1]
        content = last["content"]
        if "tool_calls" in last:
            reason = "ends in tool_use: send the tool's result"
        elif not content and "reasoning_content" in last:
            reason = "ends in thinking, which cannot be continued"
        elif content != content.rstrip():
            reason = "ends in white space, which cannot be continued"
        else:
            if not content:
                self.messages.pop()
                if self.breakpoint is not None:
                    self.breakpoint = min(self.breakpoint, len(self.messages))
            return bool(content)
        if strict:
            raise BadRequest(f"messages: the final assistant message {reason}.", param="messages")
        return False

    def _append(self, message: dict[str, Any], marked: bool) -> None:
        self.messages.append(message)
        if marked:
            self.mark()

    def _write_user(self, content: types.Content, where: str) -> None:
        """Add a user message: tool results, and what is between them, become messages each."""
        before = len(self.messages)
        items: list[Item] = []
        marked = False
        for at, block in _read_blocks(content, where):
            if isinstance(block, types.ToolResult):
                self._append_user(items, marked)
                items, marked = [], False
                self._write_tool_result(block, at)
            else:
                items += self._blocks.read_block(block, at)
                marked |= _has_mark(block)
        if before == len(self.messages) and not any(items):
            self._append({"role": "user", "content": ""}, marked)
        else:
            self._append_user(items, marked)

    def _append_user(self, items: list[Item], marked: bool) -> None:
        if any(items):
            self._append({"role": "user", "content": join_items(items, "\n\n")}, marked)
        elif marked:
            self.mark()

    def _write_tool_result(self, block: types.ToolResult, where: str) -> None:
        items, marked = self._blocks.read_items(block.content or "", f"{where}.content")
        content = join_items(items, "\n\n")
        if block.is_error:
            parts = [content] if isinstance(content, str) else content
            content = join_items(["Error: ", *parts], "")
        id = block.tool_use_id.removeprefix(ID_PREFIX)
        message = {"role": "tool", "tool_call_id": id, "content": content}
        if id in self._tool_names:
            message["name"] = self._tool_names[id]
        self._append(message, marked or _has_mark(block))

    def _write_assistant(self, content: types.Content, where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        marked = False
        for at, block in _read_blocks(content, where):
            marked |= _has_mark(block)
            match block:
                case types.Thinking():
                    thoughts.append(self._signatures.recover(block.thinking, block.signature))
                case types.ToolUse():
                    id = block.id.removeprefix(ID_PREFIX)
                    self._tool_names[id] = block.name[:MOST_NAME]
                    calls.append(make_call(id, block.name, block.input))
                case types.RedactedThinking() | types.Fallback():
                    pass
                case _:
                    texts.append(self._blocks.read_text(block, at))
        message: dict[str, Any] = {"role": "assistant", "content": _join(texts)}
        if sum(map(bool, texts)) > 1:
            message[TEXTS] = tuple(texts)
        if any(thoughts):
            message["reasoning_content"] = _join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._append(message, marked)


# -- blocks ----------------------------------------------------------------------------------


class _BlockReader:
    """Converter of content blocks to text, or to images if the message may hold them.

    Results of tools that run on Anthropic's servers, such as a web search in the history, become a
    text: the block's type, and its content as JSON. A reference to a tool becomes the tool's
    description. `where` is the place in the body of a block, or of a list of blocks.
    """

    def __init__(self, tools: Toolbox, images: ImageReader):
        self._tools = tools
        self._images = images

    def read_block(self, block: types.Block, where: str) -> list[Item]:
        if isinstance(block, types.Document):
            return self._read_document(block, where)
        if isinstance(block, types.Image) and self._images.supported:
            return [self._images.read_source(block.source, where)]
        return [self.read_text(block, where)]

    def read_items(self, content: types.Content, where: str) -> tuple[list[Item], bool]:
        """Return the texts and images of all blocks, and whether one has `cache_control`."""
        found = list(_read_blocks(content, where))
        items = [item for at, block in found for item in self.read_block(block, at)]
        return items, any(_has_mark(block) for _, block in found)

    def read_texts(self, content: types.Content, where: str) -> tuple[list[str], bool]:
        """Return the text of each block, and whether one has `cache_control`."""
        found = list(_read_blocks(content, where))
        texts = [self.read_text(block, at) for at, block in found]
        return texts, any(_has_mark(block) for _, block in found)

    def read_text(self, block: types.Block, where: str) -> str:
        """Return the text that a block adds to the prompt, where only text is allowed."""
        match block:
            case types.Text(text=text):
                pass
            case types.Compaction(content=content):
                text = content or ""
            case types.ToolReference(tool_name=name):
                text = self._tools.describe_loaded(name)
            case types.ToolChange():
                text = self._read_tool_change(block, where)
            case types.Document():
                text = _join(_only_texts(self._read_document(block, where), where))
            case types.SearchResult(title=title, source=source, content=inner):
                _check_citations(block.citations, where)
                text = _join([title, source, *self.read_texts(inner, f"{where}.content")[0]])
            case types.ServerToolUse(name=name):
                text = f"[{name}] {_to_json(block.input)}"
            case types.ServerToolResult():
                text = self._read_server_result(block)
            case types.Image() if not self._images.supported:
                raise unsupported(where, "content of type 'image' is not supported.")
            case _:
                raise wrong(where, "a block of this type is not allowed here.")
        return text

    def _read_document(self, block: types.Document, where: str) -> list[Item]:
        _check_citations(block.citations, where)
        source = block.source
        if source.type not in ("text", "content"):
            kind = source.type[:64]
            raise unsupported(where, f"documents with a source of type {kind!r} are not supported.")
        inner = source.data if source.type == "text" else source.content
        items, _ = self.read_items(inner, f"{where}.source.content")
        return [block.title or "", block.context or "", *items]

    def _read_server_result(self, block: types.ServerToolResult) -> str:
        content = block.content
        if isinstance(content, dict) and isinstance(content.get("tool_references"), list):
            names = [r.get("tool_name") for r in content["tool_references"] if isinstance(r, dict)]
            texts = [self._tools.describe_loaded(name) for name in names if isinstance(name, str)]
            return _join(texts)
        return f"[{block.type}] {_to_json(_without_encrypted(content))}"

    def _read_tool_change(self, block: types.ToolChange, where: str) -> str:
        if "definition" in block.tool:
            at = f"{where}.tool.definition"
            return self._tools.define(convert(block.tool["definition"], types.Tool, at), at)
        name = block.tool.get("name")
        if not isinstance(name, str):
            raise BadRequest(f"{where}.tool.name: a string is required.", param=where)
        if block.type == "tool_removal":
            return self._tools.remove(name)
        return self._tools.describe_loaded(name)


def _check_citations(citations: types.Citations | None, where: str) -> None:
    if citations is not None and citations.enabled:
        raise unsupported(
            f"{where}.citations", "citations are not supported: set `enabled` to false."
        )


def _only_texts(items: list[Item], where: str) -> list[str]:
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise wrong(where, "a document with images is not allowed here.")
    return texts


def _read_blocks(content: types.Content, where: str) -> Iterator[tuple[str, types.Block]]:
    """Yield each block of `content`, after its place in the body. A string is one text block."""
    if isinstance(content, str):
        yield where, types.Text(content)
        return
    for i, raw in enumerate(content):
        at = f"{where}[{i}]"
        yield at, types.read_block(raw, at)


def _has_mark(block: types.Block) -> bool:
    return isinstance(block, types.Marked) and block.cache_control is not None


def _join(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def _without_encrypted(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_encrypted(item) for item in value]
    if isinstance(value, dict):
        return {
            k: _without_encrypted(v) for k, v in value.items() if not k.startswith("encrypted_")
        }
    return value


# -- tools -----------------------------------------------------------------------------------


class Toolbox:
    """Tools of one request, in the client's order, as functions for the chat template.

    `head` holds the tools that are described at the start of the prompt, `all` holds every tool.
    In `all`, a function may also have `strict`, which is not rendered. A tool with `defer_loading`
    is not in `head`: it is described where a `tool_reference` in a tool result or a `tool_addition`
    in a system message loads it, so that the start of the prompt stays the same.
    """

    def __init__(self, tools: Iterable[types.Tool]):
        self.head: list[Function] = []
        self.all: list[Function] = []
        self._deferred: dict[str, Function] = {}
        self._removed: set[str] = set()
        self._left = 8 << 20  # characters of descriptions, which a few bytes of a body can repeat
        for i, tool in enumerate(tools):
            function = self._add(tool, f"tools[{i}]")
            if not tool.defer_loading:
                self.head.append(function)
        self._in_head = {function["function"]["name"] for function in self.head}

    def describe_loaded(self, name: str) -> str:
        """Return the text that replaces a reference to the tool `name`, which can be called now."""
        self._removed.discard(name)
        if name in self._deferred:
            described = _to_json(self._deferred[name])
            self._left -= len(described)
            if self._left < 0:
                raise ContextLengthExceeded("prompt is too long: it repeats a tool's description")
            return f"The tool {name} can be called from now on:\n{described}"
        if name in self._in_head:
            return f"The tool {name} can be called from now on."
        return f"The tool {name} is not available."

    def remove(self, name: str) -> str:
        """Remove the tool `name` until a message adds it again; return the text that says so."""
        self._removed.add(name)
        return f"The tool {name} can no longer be called."

    def callable(self) -> tuple[Function, ...]:
        """Return the tools that may be called after the messages read so far."""
        return tuple(f for f in self.all if f["function"]["name"] not in self._removed)

    def define(self, tool: types.Tool, where: str) -> str:
        """Add a tool that a message defines at `where`; return the text that describes it."""
        function = self._add(tool, where)
        self._deferred[tool.name] = function
        return self.describe_loaded(tool.name)

    def _add(self, tool: types.Tool, where: str) -> Function:
        function = _function(tool, where)
        self.all.append(with_strict(function) if is_on(tool.strict) else function)
        if tool.defer_loading:
            self._deferred[tool.name] = function
        return function


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(tool: types.Tool, where: str) -> Function:
    description, schema = tool.description or "", tool.input_schema
    if tool.type not in (None, "custom"):
        family = tool.type.rpartition("_")[0]
        if family not in _CLIENT_TOOLS:
            raise unsupported(where, f"tools of type {tool.type[:64]!r} are not supported.")
        description, schema = _CLIENT_TOOLS[family]
        if tool.max_characters is not None:
            description += f" A view shows at most {tool.max_characters} characters of a file."
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise unsupported(
            f"{where}.allowed_callers",
            "no code runs on this server, so a tool needs the caller 'direct'.",
        )
    if not tool.name:
        raise wrong(f"{where}.name", "a name is required.")
    if schema is None:
        raise wrong(f"{where}.input_schema", "a schema is required.")
    if tool.input_examples:
        examples = [_to_json(example) for example in tool.input_examples]
        listed = "\n".join(["Examples of the input:", *examples])
        description = f"{description}\n\n{listed}" if description else listed
    return make_function(tool.name, description, schema)


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_LINE = {
    "type": "integer",
    "description": "For insert: the line after which the text goes; 0 is the start.",
}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view, optional: the first and the last line; -1 as the last is the end.",
}

_CLIENT_TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open from call to call.",
        _object(
            [],
            command=_string("The command to run. Required unless restart is true."),
            restart={"type": "boolean", "description": "True starts a fresh shell instead."},
        ),
    ),
    "text_editor": (
        "Views, creates and edits text files.",
        _object(
            ["command", "path"],
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            path=_string("The file, or for view also a directory."),
            view_range=_RANGE,
            file_text=_string("For create: the file's whole text."),
            old_str=_string("For str_replace: the text to replace, which must occur exactly once."),
            new_str=_string("For str_replace and insert: the new text."),
            insert_line=_LINE,
        ),
    ),
    "memory": (
        "Keeps notes in files under /memories, which outlast this conversation.",
        _object(
            ["command"],
            command={
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
            },
            path=_string("The file or directory. For every command but rename."),
            view_range=_RANGE,
            file_text=_string("For create: the file's whole text."),
            old_str=_string("For str_replace: the text to replace."),
            new_str=_string("For str_replace: the new text."),
            insert_line=_LINE,
            insert_text=_string("For insert: the text to put in."),
            old_path=_string("For rename: the present path."),
            new_path=_string("For rename: the path to be."),
        ),
    ),
}
"""Description and schema of tools that a client sends without a schema, by `type` without version.

Anthropic's models know these schemas from training."""


# -- output settings -------------------------------------------------------------------------


def read_format(body: types.Conversation) -> OutputFormat | None:
    """Return the required format of the reply's text, or None for free text.

    `output_format` is the older name of `output_config.format`.
    """
    newer, older = "output_config.format", "output_format"
    form = body.output_config.format if body.output_config else None
    if form is not None and body.output_format is not None:
        raise BadRequest(f"A reply has one format: use {newer}, and not {older}.", param=older)
    field = older if form is None else newer
    form = form or body.output_format
    if form is None:
        return None
    if form.type != "json_schema":
        raise unsupported(field, f"{form.type[:64]!r} is not supported: use 'json_schema'.")
    if form.schema is None:
        raise wrong(f"{field}.schema", "a schema is required.")
    return format_of_schema(form.schema, f"{field}.schema")


def check_not_continued(chat: Chat, form: OutputFormat | None) -> None:
    """Raise BadRequest if a format is required and the assistant's last message is to be continued.

    Anthropic's API refuses this too.
    """
    if form is not None and chat.continue_final:
        raise BadRequest(
            f"{form.param} is the format of a whole reply: the assistant's last message cannot be "
            "continued in it. Remove one of the two.",
            param=form.param,
        )


def read_tool_choice(body: types.Conversation, tools: Sequence[Function]) -> ToolChoice | None:
    """Return which of `tools` may or must be called, or None if none may be.

    Unlike in Anthropic's API, a forced call does not exclude thinking: the model thinks first.
    """
    choice = body.tool_choice
    kind = choice.type if choice else "auto"
    if kind == "none" or (kind == "auto" and not tools):
        return None
    if kind not in ("auto", "any", "tool"):
        raise wrong("tool_choice.type", f"{kind[:64]!r} is none of auto, any, tool, none.")
    if not tools:
        raise wrong("tool_choice", f"{kind!r} needs tools, and there are none.")
    if kind != "tool":
        return ToolChoice(required=kind == "any")
    name = choice.name if choice else None
    if not name:
        raise wrong("tool_choice.name", "a name is required.")
    if all(tool["function"]["name"] != name for tool in tools):
        raise wrong("tool_choice.name", f"{name[:64]!r} is not one of tools.")
    return ToolChoice(required=True, names=(name,))


def template_args(body: types.Conversation) -> Mapping[str, Any]:
    """Return the chat template's arguments for thinking and effort, if the request sets them."""
    args = effort_args(read_effort(body))
    if body.thinking is not None:
        args["enable_thinking"] = _may_think(body.thinking)
    return args


def _may_think(config: types.ThinkingConfig | None) -> bool:
    return config is None or config.type not in ("disabled", "between_tools")


def read_thinking_budget(body: types.Request, *, takes_effort: bool) -> int | None:
    """Return the maximum tokens of thinking, or None if there is no limit.

    It is 0 if thinking is disabled. Without a stated number, an effort of `low` or `medium` becomes
    one, unless the chat template `takes_effort` itself.
    """
    config = body.thinking
    if config is not None and config.type == "disabled":
        return 0
    if config is not None and config.type == "enabled" and config.budget_tokens is not None:
        return config.budget_tokens
    effort = read_effort(body)
    if takes_effort or effort == "high" or not _may_think(config):
        return None
    return EFFORT_BUDGETS.get(effort or "")


def read_effort(body: types.Conversation) -> types.Effort | None:
    """Return the effort of the reply, or None if the request has none.

    An effort in a system message applies at once if the message follows new input of the user (more
    than tool results), otherwise from the next such input on.
    Source: https://platform.claude.com/docs/en/build-with-claude/effort-per-message.
    """
    effort = body.output_config.effort if body.output_config else None
    later: types.Effort | None = None
    after_input = False
    for message in body.messages:
        if message.role != "system":
            after_input = message.role == "user" and _has_input(message)
            if after_input:
                effort, later = later or effort, None
        elif message.output_config is not None and message.output_config.effort is not None:
            later = message.output_config.effort
            if after_input:
                effort, later = later, None
    return effort


def _has_input(message: types.Message) -> bool:
    content = message.content or ""
    return isinstance(content, str) or any(raw.get("type") != "tool_result" for raw in content)


def shows_thinking(body: types.Request) -> bool:
    """Return whether reasoning is sent to the client.

    It is not sent for `updates` either, with which Anthropic's models show only short notes between
    tool calls; local models write such notes as text.
    """
    return body.thinking is None or body.thinking.display not in ("omitted", "updates")
