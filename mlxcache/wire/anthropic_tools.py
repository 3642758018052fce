"""Tools of Anthropic's request bodies: those described at the start, and those loaded later.

Source: https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire import anthropic_types as types

Function = Mapping[str, Any]
"""A tool in the form that chat templates take."""


class Toolbox:
    """Tools of one request, in the client's order, as functions for the chat template.

    `head` holds the tools that are described at the start of the prompt, `all` holds every tool.
    In `all`, a function may also have `strict`, which is not rendered. A tool with `defer_loading`
    is not in `head`: it is described where a `tool_reference` in a tool result or a `tool_addition`
    in a system message loads it, so that the start of the prompt stays the same.

    Raises Unsupported for a tool that runs on Anthropic's servers, or that only code there may
    call, and BadRequest for a tool without a name or a schema.
    """

    def __init__(self, tools: Iterable[types.Tool]):
        self.head: list[Function] = []
        self.all: list[Function] = []
        self._deferred: dict[str, Function] = {}
        self._removed: set[str] = set()
        for i, tool in enumerate(tools):
            function = self._add(tool, f"tools[{i}]")
            if not tool.defer_loading:
                self.head.append(function)

    def describe_loaded(self, name: str) -> str:
        """Return the text that replaces a reference to the tool `name` in the prompt.

        From there on the tool can be called. If the request has no tool of this name, the text says
        so. Each reference to a tool gets the same text.
        """
        self._removed.discard(name)
        if name in self._deferred:
            return _describe(name, self._deferred[name])
        if any(function["function"]["name"] == name for function in self.head):
            return f"The tool {name} can be called from now on."
        return f"The tool {name} is not available."

    def remove(self, name: str) -> str:
        """Remove the tool `name` until a message adds it again.

        Returns the text for the prompt that says that the tool can no longer be called.
        """
        self._removed.add(name)
        return f"The tool {name} can no longer be called."

    def callable(self) -> tuple[Function, ...]:
        """Return the tools that may be called after the messages read so far."""
        return tuple(f for f in self.all if f["function"]["name"] not in self._removed)

    def define(self, tool: types.Tool, where: str) -> str:
        """Add a tool that a message defines, and return the text that describes the tool.

        `where` is the definition's place in the body, for errors. Raises Unsupported and BadRequest
        for the same tools as the constructor.
        """
        function = self._add(tool, where)
        self._deferred[tool.name] = function
        self._removed.discard(tool.name)
        return _describe(tool.name, function)

    def _add(self, tool: types.Tool, where: str) -> Function:
        function = _function(tool, where)
        self.all.append(_with_strict(function) if tool.strict else function)
        if tool.defer_loading:
            self._deferred[tool.name] = function
        return function


def to_json(value: Any) -> str:
    """Return `value` as JSON text in one line, with characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False)


def _describe(name: str, function: Function) -> str:
    return f"The tool {name} can be called from now on:\n{to_json(function)}"


def _function(tool: types.Tool, where: str) -> Function:
    description, schema = tool.description or "", tool.input_schema
    if tool.type not in (None, "custom"):
        family = tool.type.rpartition("_")[0]
        if family not in _CLIENT_TOOLS:
            raise Unsupported(
                f"{where}: tools of type {tool.type[:64]!r} are not supported.", param=where
            )
        description, schema = _CLIENT_TOOLS[family]
        if tool.max_characters is not None:
            description += f" A view shows at most {tool.max_characters} characters of a file."
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise Unsupported(
            f"{where}.allowed_callers: no code runs on this server, so a tool needs the caller "
            "'direct'.",
            param=f"{where}.allowed_callers",
        )
    if not tool.name:
        raise BadRequest(f"{where}.name: a name is required.", param=f"{where}.name")
    if schema is None:
        raise BadRequest(
            f"{where}.input_schema: a schema is required.", param=f"{where}.input_schema"
        )
    if tool.input_examples:
        examples = [to_json(example) for example in tool.input_examples]
        listed = "\n".join(["Examples of the input:", *examples])
        description = f"{description}\n\n{listed}" if description else listed
    body = {"name": tool.name, "description": description, "parameters": schema}
    return {"type": "function", "function": body}


def _with_strict(function: Function) -> Function:
    return {**function, "function": {**function["function"], "strict": True}}


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
"""Description and schema of tools that a client sends without a schema, by the tool's `type`.

The `type` is without its version (`bash_20250124` is `bash`). Anthropic's models know the schemas
from training.
Source: https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview.
"""
