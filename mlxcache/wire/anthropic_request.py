"""Conversion of Anthropic's Messages bodies to `Chat`, tools and `Sampling`.

When a conversation grows by a turn, its earlier messages must be converted to the same result. Each
rule here therefore depends only on a block and the blocks before it: never on later blocks, on
whether a text was sent as a string or as a list, or on cache_control. Texts of one message are
joined by a blank line, and empty texts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import DEFAULTED, TEXTS, Chat, Sampling
from mlxcache.wire import anthropic_types as types
from mlxcache.wire.anthropic_output import template_args
from mlxcache.wire.anthropic_tools import Function, Toolbox, to_json
from mlxcache.wire.images import ImageReader, Item, join_items
from mlxcache.wire.retention import hints_from_marks
from mlxcache.wire.signatures import recover_thinking

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
    `images` tells whether the model accepts images.

    Raises:
        Unsupported: the body has an unsupported field or block that would change the answer, or an
            image that the model does not accept.
        BadRequest: a block is malformed, or not allowed at its place.
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
        messages=tuple(writer.messages),
        tools=tuple(tools.head),
        template_args=template_args(body),
        breakpoint=writer.breakpoint,
        continue_final=continues,
        keeps=hints_from_marks(body, writer.breakpoint),
    )
    return chat, tools.callable()


def to_sampling(body: types.Request) -> Sampling:
    """Convert the sampling fields. The default temperature is 1, as Anthropic documents.

    Omitted fields are listed in `Sampling.unset`, so that the model's own defaults apply to them.
    """
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
"""Edits of `context_management` that are accepted although nothing is cleared.

A cleared prefix would have to be computed again; the reply says that no edit was applied."""


def _check_supported(body: types.Conversation) -> None:
    config, management = body.output_config, body.context_management
    unsupported = {
        "mcp_servers": body.mcp_servers,
        "container": body.container,
        "compaction": body.compaction,
        "output_config.task_budget": config and config.task_budget,
    }
    for name, value in unsupported.items():
        if value:
            raise Unsupported(f"{name} is not supported.", param=name)
    for i, edit in enumerate(management.edits if management else ()):
        if edit.type not in _NOT_APPLIED_EDITS:
            where = f"context_management.edits[{i}]"
            message = f"{where}: edits of type {edit.type[:64]!r} are not supported."
            raise Unsupported(message, param=where)
    if body.thread:
        raise Unsupported(
            "thread is not supported: send the whole conversation in messages.",
            param="thread",
            code=NO_THREADS,
        )


# -- messages --------------------------------------------------------------------------------


class _ChatWriter:
    """Builder of `messages`, those of a chat, from those of a request body.

    `breakpoint` is the number of leading messages up to and including the last one with a field
    `cache_control`: 0 if only tools or the system prompt have one, None if there is none.
    """

    def __init__(self, tools: Toolbox, images: ImageReader):
        self.messages: list[dict[str, Any]] = []
        self.breakpoint: int | None = None
        self._blocks = BlockReader(tools, images)
        self._tool_names: dict[str, str] = {}

    def begin(self, body: types.Conversation) -> None:
        """Add the system prompt, if there is one.

        Sets `breakpoint` to 0 if the system prompt or a tool has `cache_control`.
        """
        texts, marked = self._blocks.read_texts(body.system or "", "system")
        if any(texts):
            self.messages.append({"role": "system", "content": _join(texts)})
        if marked or any(tool.cache_control is not None for tool in body.tools or ()):
            self.breakpoint = 0

    def write(self, message: types.Message, where: str, *, cleared: bool = False) -> None:
        """Add one message of the body. Tool results in it become messages of their own.

        A system message without text is not added. Nor is a `cleared` one: the client limited it
        with `clear_at` to the time before the next user message. Tools defined in such messages can
        be called nevertheless. `where` is the message's place in the body, for errors. Raises
        BadRequest if a message of another role has no content, and the errors of `BlockReader`.
        """
        where += ".content"
        if message.role == "system":
            self._write_system(message.content or "", where, cleared=cleared)
        elif message.content is None:
            raise BadRequest(f"{where}: a text or a list of blocks is required.", param=where)
        elif message.role == "assistant":
            self._write_assistant(message.content, where)
        else:
            self._write_user(message.content, where)

    def _write_system(self, content: types.Content, where: str, *, cleared: bool) -> None:
        texts, marked = self._blocks.read_texts(content, where)
        if any(texts) and not cleared:
            self._append({"role": "system", "content": _join(texts)}, marked)
        elif marked:
            self.mark()

    def mark(self) -> None:
        """Set `breakpoint` to the number of messages added so far, for a `cache_control` field."""
        self.breakpoint = len(self.messages)

    def continue_last(self, *, strict: bool) -> bool:
        """Return True if the reply is to continue the final message, an assistant message.

        Returns False if the message is empty, and removes it. If the message cannot be continued,
        because it ends in a tool call, in reasoning or in white space, raises BadRequest if
        `strict`, else returns False.
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
                self._remove_last()
            return bool(content)
        if strict:
            raise BadRequest(f"messages: the final assistant message {reason}.", param="messages")
        return False

    def _remove_last(self) -> None:
        self.messages.pop()
        if self.breakpoint is not None:
            self.breakpoint = min(self.breakpoint, len(self.messages))

    def _append(self, message: dict[str, Any], marked: bool) -> None:
        self.messages.append(message)
        if marked:
            self.mark()

    def _write_user(self, content: types.Content, where: str) -> None:
        """Add the texts, images and tool results of a user message, in order.

        Each tool result becomes a message of its own; the texts and images between two of them
        become one user message. `where` is the place of `content` in the body, for errors.
        """
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
        """Add a message with a tool result. `where` is the place of `block` in the body."""
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
                    thoughts.append(recover_thinking(block.thinking, block.signature))
                case types.ToolUse():
                    calls.append(self._read_call(block))
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

    def _read_call(self, block: types.ToolUse) -> dict[str, Any]:
        id = block.id.removeprefix(ID_PREFIX)
        self._tool_names[id] = block.name
        function = {"name": block.name, "arguments": block.input}
        return {"id": id, "type": "function", "function": function}


# -- blocks ----------------------------------------------------------------------------------


class BlockReader:
    """Converter of content blocks to text, or to images if the message may hold them.

    Results of tools that run on Anthropic's servers, such as a web search in the history, become a
    text: the block's type, and its content as JSON. A reference to a tool becomes the tool's
    description. Methods take `where`, the place in the body of a block, or of a list of blocks, for
    errors.
    """

    def __init__(self, tools: Toolbox, images: ImageReader):
        self._tools = tools
        self._images = images

    def read_block(self, block: types.Block, where: str) -> list[Item]:
        """Return the texts and images that a content block adds to the prompt.

        `where` is the block's place in the body, for errors. Raises Unsupported for citations, and
        for an image if the model accepts none; BadRequest for other blocks that are not allowed.
        """
        if isinstance(block, types.Document):
            return self._read_document(block, where)
        if isinstance(block, types.Image) and self._images.supported:
            return [self._images.read_source(block.source, where)]
        return [self.read_text(block, where)]

    def read_items(self, content: types.Content, where: str) -> tuple[list[Item], bool]:
        """Return the texts and images of all blocks, and whether a block has `cache_control`.

        `where` is the place of `content` in the body, for errors. Raises
        Unsupported and BadRequest, as `read_block` does.
        """
        found = list(_read_blocks(content, where))
        items = [item for at, block in found for item in self.read_block(block, at)]
        return items, any(_has_mark(block) for _, block in found)

    def read_texts(self, content: types.Content, where: str) -> tuple[list[str], bool]:
        """Return the text of each block, and whether a block has `cache_control`.

        `where` is the place of `content` in the body, for errors. Raises
        Unsupported and BadRequest, as `read_text` does.
        """
        found = list(_read_blocks(content, where))
        texts = [self.read_text(block, at) for at, block in found]
        return texts, any(_has_mark(block) for _, block in found)

    def read_text(self, block: types.Block, where: str) -> str:
        """Return the text that a content block adds to a prompt, where only text is allowed.

        `where` is the block's place in the body, for errors. Raises Unsupported for citations, and
        for an image if the model accepts none; BadRequest for an image otherwise, and for other
        blocks that are not allowed there.
        """
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
                text = f"[{name}] {to_json(block.input)}"
            case types.ServerToolResult():
                text = self._read_server_result(block)
            case types.Image() if not self._images.supported:
                raise Unsupported(
                    f"{where}: content of type 'image' is not supported.", param=where
                )
            case _:
                raise BadRequest(f"{where}: a block of this type is not allowed here.", param=where)
        return text

    def _read_document(self, block: types.Document, where: str) -> list[Item]:
        _check_citations(block.citations, where)
        source = block.source
        if source.type not in ("text", "content"):
            kind = source.type[:64]
            message = f"{where}: documents with a source of type {kind!r} are not supported."
            raise Unsupported(message, param=where)
        inner = source.data if source.type == "text" else source.content
        items, _ = self.read_items(inner, f"{where}.source.content")
        return [block.title or "", block.context or "", *items]

    def _read_server_result(self, block: types.ServerToolResult) -> str:
        content = block.content
        if isinstance(content, dict) and isinstance(content.get("tool_references"), list):
            names = [r.get("tool_name") for r in content["tool_references"] if isinstance(r, dict)]
            texts = [self._tools.describe_loaded(name) for name in names if isinstance(name, str)]
            return _join(texts)
        return f"[{block.type}] {to_json(_without_encrypted(content))}"

    def _read_tool_change(self, block: types.ToolChange, where: str) -> str:
        if "definition" in block.tool:
            at = f"{where}.tool.definition"
            return self._tools.define(types.read_tool(block.tool["definition"], at), at)
        name = block.tool.get("name")
        if not isinstance(name, str):
            raise BadRequest(f"{where}.tool.name: a string is required.", param=where)
        if block.type == "tool_removal":
            return self._tools.remove(name)
        return self._tools.describe_loaded(name)


def _check_citations(citations: types.Citations | None, where: str) -> None:
    if citations is not None and citations.enabled:
        message = f"{where}.citations: citations are not supported: set `enabled` to false."
        raise Unsupported(message, param=f"{where}.citations")


def _only_texts(items: list[Item], where: str) -> list[str]:
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise BadRequest(f"{where}: a document with images is not allowed here.", param=where)
    return texts


def _read_blocks(content: types.Content, where: str) -> Iterator[tuple[str, types.Block]]:
    """Yield the place in the body and the block, for each block of `content`.

    `where` is the place of `content`, such as `system` or `messages[0].content`, of which the first
    block has the place `messages[0].content[0]`. A string is yielded as one text block with the
    place `where`. Raises the errors of `types.read_block`.
    """
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
