"""Adaptation of a conversation to the features of a chat template.

Where a message is placed depends only on the messages before it. The beginning of a conversation
therefore renders the same, however the conversation continues.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcache.errors import BadRequest
from mlxcache.prompt.template import Message, Traits
from mlxcache.types import TEXTS, Image

Content = str | list[str | Image]

SEPARATE = "apart"
"""Key that marks a system message that must not be joined to the first one."""

ROLES = ("system", "developer", "user", "assistant", "tool")

GENERIC_TOOLS = """\
# Tools

You may call the functions described here, one JSON object per line:

{tools}

To call one, write its name and its arguments as JSON between these two marks, and then stop:

<tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>

For several calls, write one after the other. Each result comes back in the next message."""


def adapt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], traits: Traits
) -> list[Message]:
    """Return messages in OpenAI's form, adapted to a template with the given traits.

    No user text is dropped: a message that the template refuses in its place is joined to the one
    before it, or becomes a user message. Raises BadRequest for an unknown role or content.
    """
    placed = _Adapter(traits)
    if tools and not traits.tools:
        leading = leading_systems(messages)
        for message in messages[:leading]:
            placed.add(message)
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        placed.add({"role": "system", "content": GENERIC_TOOLS.format(tools=listed)})
        messages = messages[leading:]
    for message in messages:
        placed.add(message)
    return placed.messages


def leading_systems(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages at the start, before one with the key `SEPARATE`."""
    for i, message in enumerate(messages):
        if message.get("role") not in ("system", "developer") or message.get(SEPARATE):
            return i
    return len(messages)


class _Adapter:
    def __init__(self, traits: Traits):
        self.messages: list[Message] = []
        self._traits = traits
        self._names: dict[str, str] = {}

    def add(self, message: Mapping[str, Any]) -> None:
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"unknown role: {str(role)[:40]!r}; expected one of {', '.join(ROLES)}",
                param="messages",
            )
        text = _text(message.get("content"))
        if role in ("system", "developer"):
            self._system(str(role), text, apart=bool(message.get(SEPARATE)))
        elif role == "user":
            self._user({**message, "content": text})
        elif role == "assistant":
            whole = {key: value for key, value in message.items() if key != TEXTS}
            self._assistant({**whole, "content": text})
        else:
            self._result({**message, "content": text})

    @property
    def _last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _append(self, text: Content) -> None:
        last = self.messages[-1]
        self.messages[-1] = {**last, "content": _joined(last.get("content"), text)}

    def _system(self, role: str, text: Content, *, apart: bool) -> None:
        traits = self._traits
        role = role if traits.developer else "system"
        if len(self.messages) == 1 and self._last_role == role and not apart:
            self._append(text)
        elif traits.system_anywhere or (traits.system and not self.messages):
            self.messages.append({"role": role, "content": text})
        elif self._last_role in ("user", "tool"):
            # a separate user message would make templates drop the thinking of earlier replies
            self._append(text)
        else:
            self._user({"role": "user", "content": text})

    def _user(self, message: Message) -> None:
        merges = (self._last_role == "user" and self._traits.alternates) or (
            self._last_role == "tool" and not self._traits.user_after_tool
        )
        if merges:
            self._append(message["content"])
        else:
            self.messages.append(message)

    def _assistant(self, message: Message) -> None:
        traits = self._traits
        calls = [self._call(call) for call in message.pop("tool_calls", None) or ()]
        single = traits.calls_at_once or not traits.alternates or len(calls) == 1
        if calls and not (traits.tool_calls and single):
            for call in calls:
                message["content"] = _joined(message["content"], _written(call), "\n")
            calls = []
        groups = [calls] if traits.calls_at_once else [[call] for call in calls] or [[]]
        if calls and message["content"] and not traits.text_with_calls:
            groups.insert(0, [])
        if len(groups) > 1 and traits.alternates:
            # Such a template takes no text beside calls: the text is dropped.
            message, groups = {**message, "content": ""}, groups[1:]
        for i, group in enumerate(groups):
            part = message if i == 0 else {"role": "assistant", "content": ""}
            self._reply({**part, "tool_calls": group} if group else part)

    def _reply(self, message: Message) -> None:
        if self._last_role == "assistant" and self._traits.alternates:
            last = self.messages.pop()
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            text = _joined(last.get("content"), message["content"])
            message = {**last, "content": text, **({"tool_calls": calls} if calls else {})}
        if self._traits.absent_content and message.get("tool_calls") and not message["content"]:
            message = {key: value for key, value in message.items() if key != "content"}
        self.messages.append(message)

    def _call(self, call: Mapping[str, Any]) -> Message:
        function = call.get("function") or call
        name, arguments = str(function.get("name", "")), function.get("arguments")
        arguments = _object(arguments)
        if self._traits.string_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._names[str(call.get("id", ""))] = name
        return {
            "id": self._id(str(call.get("id", ""))),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _result(self, message: Message) -> None:
        call_id = str(message.get("tool_call_id", ""))
        if not self._traits.tool_role:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            self._user({"role": "user", "content": text})
            return
        message["tool_call_id"] = self._id(call_id)
        if not message.get("name") and call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    def _id(self, call_id: str) -> str:
        return _short(call_id) if self._traits.short_ids else call_id


def _text(content: Any) -> Content:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and any(isinstance(part, Image) for part in content):
        return content
    if isinstance(content, list | tuple):
        parts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        texts = list(parts)
        if all(isinstance(text, str) for text in texts):
            return "\n\n".join(str(text) for text in texts)
    raise BadRequest("a message's content must be text", param="messages")


def _joined(first: Content | None, second: Content, between: str = "\n\n") -> Content:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*_listed(first), between, *_listed(second)]


def _listed(content: Content) -> list[str | Image]:
    return [content] if isinstance(content, str) else content


def _object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return {} if arguments is None else arguments


def _written(call: Message) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": _object(function["arguments"])}
    return f"<tool_call>{json.dumps(body, ensure_ascii=False)}</tool_call>"


def _short(call_id: str) -> str:
    """Derive a call id of nine letters or digits, which some templates require, from any one."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    letters = string.ascii_letters + string.digits
    return "".join(letters[number // len(letters) ** i % len(letters)] for i in range(9))
