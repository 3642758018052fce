"""From a Messages body to the chat that a template renders.

Every rule here looks at a block and at what is left of it, never at what follows, at whether a text
came as a string or in a list, or at cache_control: the same conversation, a turn longer, begins
with the same messages. The texts of one message are joined by a blank line, empty ones left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import Chat
from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_text import Reader, blocks, join, marked_by
from mlxcache.wire.anthropic_tools import Function, Toolbox
from mlxcache.wire.images import Inlet, Item
from mlxcache.wire.images import content as joined
from mlxcache.wire.retention import of_marks
from mlxcache.wire.signatures import recover

ID_PREFIX = "toolu_"
"""What tool call ids begin with on this API; chats have them without."""

SHOWN_BELOW = "The result is an image; it follows."
"""What stands for a tool's result that is nothing but an image."""


def to_chat(
    body: wire.Conversation, *, strict: bool = True, images: bool = False
) -> tuple[Chat, tuple[Function, ...]]:
    """The chat that `body` asks for, and every tool that may be called, deferred ones included.

    A last message of the assistant's is to be continued. Where that cannot be (it ends in a tool
    call, in reasoning or in white space), `strict` raises BadRequest, else it is taken as closed.
    `images`: the model takes them; if it does not, they are refused.

    Raises:
        Unsupported: something that would change the answer cannot be done.
        BadRequest: a block is malformed, or stands where it cannot.
    """
    _refuse(body)
    try:
        tools = Toolbox(body.tools or ())
        writer = _Writer(tools, Inlet(images))
        writer.begin(body)
        for i, message in enumerate(body.messages):
            writer.write(message, f"messages[{i}]")
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error
    if body.cache_control is not None:
        writer.breakpoint = len(writer.messages)
    continues = body.messages[-1].role == "assistant" and _continues(writer, strict)
    chat = Chat(
        messages=tuple(writer.messages),
        tools=tuple(tools.head),
        template_args=_template_args(body.thinking),
        breakpoint=writer.breakpoint,
        continue_final=continues,
        keeps=of_marks(body, writer.breakpoint),
    )
    return chat, tuple(tools.all)


def _refuse(body: wire.Conversation) -> None:
    if body.tool_choice is not None and body.tool_choice.type not in ("auto", "none"):
        name = body.tool_choice.type[:64]
        raise Unsupported(f"tool_choice: {name!r} is not supported.", param="tool_choice")
    form = body.output_config.format if body.output_config else None
    asked = {
        "output_config.format": form,
        "output_format": body.output_format,
        "mcp_servers": body.mcp_servers,
        "compaction": body.compaction,
        "thread": body.thread,
    }
    for name, value in asked.items():
        if value:
            raise Unsupported(f"{name} is not supported.", param=name)


def _template_args(config: wire.ThinkingConfig | None) -> Mapping[str, Any]:
    return {} if config is None else {"enable_thinking": config.type != "disabled"}


def _continues(writer: _Writer, strict: bool) -> bool:
    """Whether the last message, an assistant's, can be continued; an empty one is taken away."""
    last = writer.messages[-1]
    content = last["content"]
    if "tool_calls" in last:
        reason = "ends in tool_use: send the tool's result"
    elif not content and "reasoning_content" in last:
        reason = "ends in thinking, which cannot be continued"
    elif content != content.rstrip():
        reason = "ends in white space, which cannot be continued"
    else:
        if not content:
            writer.drop_last()
        return bool(content)
    if strict:
        raise BadRequest(f"messages: the final assistant message {reason}.", param="messages")
    return False


class _Writer:
    """The messages so far, and how many of them the last cache_control mark covers."""

    def __init__(self, tools: Toolbox, inlet: Inlet):
        self.messages: list[dict[str, Any]] = []
        self.breakpoint: int | None = None
        self._read = Reader(tools, inlet)
        self._names: dict[str, str] = {}

    def begin(self, body: wire.Conversation) -> None:
        texts, marked = self._read.texts(body.system or "", "system")
        if any(texts):
            self.messages.append({"role": "system", "content": join(texts)})
        if marked or any(tool.cache_control is not None for tool in body.tools or ()):
            self.breakpoint = 0

    def write(self, message: wire.Message, where: str) -> None:
        if message.role == "assistant":
            self._assistant(message.content, where)
        elif message.role == "user":
            self._user(message.content, where)
        else:
            texts, marked = self._read.texts(message.content, where)
            self._put({"role": "system", "content": join(texts)}, marked)

    def drop_last(self) -> None:
        self.messages.pop()
        if self.breakpoint is not None:
            self.breakpoint = min(self.breakpoint, len(self.messages))

    def _put(self, message: dict[str, Any], marked: bool) -> None:
        self.messages.append(message)
        if marked:
            self.breakpoint = len(self.messages)

    def _user(self, content: wire.Content, where: str) -> None:
        """Texts and images between tools' results, which keep their text; theirs come after all."""
        before = len(self.messages)
        items: list[Item] = []
        shown: list[Item] = []
        marked = False
        for at, block in blocks(content, where):
            if isinstance(block, wire.ToolResult):
                self._put_items(items, marked)
                items, marked = [], False
                shown += self._tool_result(block, at)
            else:
                items.append(self._read.item(block, at))
                marked |= marked_by(block)
        items = shown + items
        if before == len(self.messages) and not any(items):
            self._put({"role": "user", "content": ""}, marked)
        else:
            self._put_items(items, marked)

    def _put_items(self, items: list[Item], marked: bool) -> None:
        if any(items):
            self._put({"role": "user", "content": joined(items, "\n\n")}, marked)
        elif marked:
            self.breakpoint = len(self.messages)

    def _tool_result(self, block: wire.ToolResult, where: str) -> list[Item]:
        """Put a tool's result; its images are returned, for templates take none there."""
        items, marked = self._read.items(block.content or "", where)
        images = [item for item in items if not isinstance(item, str)]
        content = join([item for item in items if isinstance(item, str)])
        if images and not content:
            content = SHOWN_BELOW
        id = block.tool_use_id.removeprefix(ID_PREFIX)
        message = {
            "role": "tool",
            "tool_call_id": id,
            "content": f"Error: {content}" if block.is_error else content,
        }
        if id in self._names:
            message["name"] = self._names[id]
        self._put(message, marked or marked_by(block))
        return [*images]

    def _assistant(self, content: wire.Content, where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        marked = False
        for at, block in blocks(content, where):
            marked |= marked_by(block)
            match block:
                case wire.Thinking():
                    thoughts.append(recover(block.thinking, block.signature))
                case wire.ToolUse():
                    calls.append(self._call(block))
                case wire.RedactedThinking() | wire.Fallback():
                    pass
                case _:
                    texts.append(self._read.text(block, at))
        message: dict[str, Any] = {"role": "assistant", "content": join(texts)}
        if any(thoughts):
            message["reasoning_content"] = join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._put(message, marked)

    def _call(self, block: wire.ToolUse) -> dict[str, Any]:
        id = block.id.removeprefix(ID_PREFIX)
        self._names[id] = block.name
        function = {"name": block.name, "arguments": block.input}
        return {"id": id, "type": "function", "function": function}
