"""Bodies of Anthropic's Messages API, and the chats that they become."""

from __future__ import annotations

from typing import Any

import msgspec

from mlxcache.types import Chat
from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_request import to_chat

MARK = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}

FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text(b) if isinstance(b, str) else b for b in blocks]}


def assistant(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return user(*blocks) | {"role": "assistant"}


def use(id: str = "toolu_1", name: str = "Read", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(content: Any = "done", id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "input_schema": SCHEMA, **more}


def convert(body: dict[str, Any], *, strict: bool = True) -> tuple[Chat, tuple[Any, ...]]:
    """Convert a body to its chat and its tools."""
    return to_chat(msgspec.convert(body, wire.Conversation), strict=strict)


def read(*messages: dict[str, Any], strict: bool = True, **body: Any) -> Chat:
    request = {"model": "m", "messages": list(messages) or [user("hi")], **body}
    return convert(request, strict=strict)[0]


def rendered(chat: Chat) -> tuple[Any, ...]:
    """Everything in a chat that reaches the prompt; the breakpoint does not."""
    return chat.messages, chat.tools, chat.template_args, chat.continue_final
