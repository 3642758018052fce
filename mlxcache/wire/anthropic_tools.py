"""The tools of a Messages request: which the head describes, and which only a reference loads.

A tool with `defer_loading` is not described in the head: a `tool_reference` in a tool's result, or
a `tool_addition` in a system message, describes it where it stands. So the head does not change
when a tool is loaded later, wherever the client puts it in `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire.anthropic_types import Tool

Function = Mapping[str, Any]
"""A tool as chat templates take it."""


class Toolbox:
    """A request's tools, in the client's order.

    `head` are those that the prompt begins with; `all` may be called.
    Raises Unsupported for a tool that Anthropic's own servers would run, and BadRequest for one
    without a name or a schema.
    """

    def __init__(self, tools: Iterable[Tool]):
        self.head: list[Function] = []
        self.all: list[Function] = []
        self._deferred: dict[str, Function] = {}
        for i, tool in enumerate(tools):
            function = self._add(tool, f"tools[{i}]")
            if not tool.defer_loading:
                self.head.append(function)

    def loaded(self, name: str) -> str:
        """The text that a reference to the tool `name` stands for; the same whenever it is sent."""
        if name in self._deferred:
            return _offer(name, self._deferred[name])
        if any(function["function"]["name"] == name for function in self.head):
            return f"The tool {name} can be called from now on."
        return f"The tool {name} is not available."

    def define(self, tool: Tool, where: str) -> str:
        """The text for a tool that a message defines; it may be called from then on."""
        function = self._add(tool, where)
        self._deferred[tool.name] = function
        return _offer(tool.name, function)

    def _add(self, tool: Tool, where: str) -> Function:
        function = _function(tool, where)
        self.all.append(function)
        if tool.defer_loading:
            self._deferred[tool.name] = function
        return function


def _offer(name: str, function: Function) -> str:
    text = json.dumps(function, ensure_ascii=False)
    return f"The tool {name} can be called from now on:\n{text}"


def _function(tool: Tool, where: str) -> Function:
    description, schema = tool.description or "", tool.input_schema
    if tool.type not in (None, "custom"):
        family = tool.type.rpartition("_")[0]
        if family not in _CLIENT_TOOLS:
            raise Unsupported(
                f"{where}: tools of type {tool.type[:64]!r} are not supported.", param=where
            )
        description, schema = _CLIENT_TOOLS[family]
    if not tool.name:
        raise BadRequest(f"{where}.name: a name is required.", param=f"{where}.name")
    if schema is None:
        raise BadRequest(
            f"{where}.input_schema: a schema is required.", param=f"{where}.input_schema"
        )
    body = {"name": tool.name, "description": description, "parameters": schema}
    return {"type": "function", "function": body}


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
"""Tools whose schema Anthropic's models know by heart, and a client does not send.

Source: https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview.
"""
