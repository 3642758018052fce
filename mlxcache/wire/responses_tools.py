"""Tools of the Responses API as functions, and calls of functions as output items.

Chat templates support only functions. A custom tool becomes a function with one string argument,
`input`. A tool of the type `namespace` is a named group of tools, which become separate functions.

Sources: https://platform.openai.com/docs/guides/function-calling and
https://platform.openai.com/docs/api-reference/responses/create#responses-create-tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import ToolCall, ToolChoice
from mlxcache.wire import responses_types as types
from mlxcache.wire.grammar_pattern import pattern_of_lark, pattern_of_regex
from mlxcache.wire.openai_output import ToolUse

Function = dict[str, Any]
"""A tool in the form of `Chat.tools`."""

INPUT = "input"
"""Name of the only argument of a custom tool's function."""

LEFT_OUT = frozenset({"web_search", "web_search_preview", "image_generation"})
"""Types of tools that only OpenAI's servers run, but that Codex sends by default.

They are left out of the prompt and named in the reply's metadata. Other such tools are refused.
"""

LOCAL_SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class Entry:
    """One callable tool: a function or, if `custom`, a custom tool.

    `rendered` is its name in the prompt, `name` its name for the client, and `namespace` the name
    of its group of tools, if any. With `strict`, calls always fit the function's schema. `pattern`
    is the regular expression that a custom tool's input must match, or None for any text.
    """

    rendered: str
    name: str
    namespace: str | None = None
    custom: bool = False
    strict: bool = False
    pattern: str | None = None


class Toolbox:
    """Tools of one request, in the client's order.

    `functions` holds the tools in the form of `Chat.tools`, except for those of the types in
    `LEFT_OUT`, which run only on OpenAI's servers but which Codex sends by default: their types are
    in `left_out`. Raises Unsupported for other tools that run only there and for grammars that are
    not supported, and BadRequest for malformed tools and for two with the same name.
    """

    def __init__(self, tools: Sequence[types.Tool]):
        self.functions: list[Function] = []
        self.left_out: list[str] = []
        self._entries: dict[str, Entry] = {}
        self._rendered: dict[tuple[str, str | None], str] = {}
        for at, tool, namespace in _flatten(tools):
            if tool.type in LEFT_OUT:
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
            raise BadRequest(f"{at}.name: a name is required.", param=f"{at}.name")
        rendered = tool.name
        if rendered in self._entries and namespace:
            rendered = f"{namespace}__{tool.name}"
        if rendered in self._entries:
            raise BadRequest(f"{at}: two tools are named {rendered[:64]!r}.", param=f"{at}.name")
        if tool.type == "custom":
            entry, function = _custom(tool, rendered, namespace, at)
        else:
            entry = Entry(rendered, tool.name, namespace, strict=bool(tool.strict))
            empty = {"type": "object", "properties": {}}
            parameters = empty if tool.parameters is None else tool.parameters
            function = _function(rendered, tool.description, parameters)
        self._entries[rendered] = entry
        self._rendered.setdefault((tool.name, namespace), rendered)
        self._rendered.setdefault((tool.name, None), rendered)
        self.functions.append(function)

    def rendered_name(self, name: str, namespace: str | None) -> str:
        """Return the name in the prompt of the tool that the client calls `name`.

        `namespace` is the name of its group of tools; None matches any group. An unknown name is
        returned unchanged.
        """
        return self._rendered.get((name, namespace), name)

    def find(self, rendered: str) -> Entry:
        """Return the tool that has the name `rendered` in the prompt.

        For an unknown name, returns an entry for a function with this name.
        """
        return self._entries.get(rendered) or Entry(rendered, rendered)

    def read_use(self, body: types.ResponsesRequest) -> ToolUse:
        """Return which tools may be called, and how, as the body's `tool_choice` asks for.

        Raises:
            Unsupported: `tool_choice` names a tool that runs only on OpenAI's servers.
            BadRequest: `tool_choice` is malformed, names an unknown tool, or asks for a call
                although the request has no tools.
        """
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
        return ToolUse(
            tools=tuple(self._callable()), choice=found, parallel=not single, named=named
        )

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
                    if tool.type not in LEFT_OUT
                ]
                return ToolChoice(asked.mode == "required", tuple(dict.fromkeys(names)))
            case "allowed_tools":
                message = "`tool_choice` of type 'allowed_tools' needs `tools`."
                raise BadRequest(message, param="tool_choice.tools")
        if asked.type in LEFT_OUT or asked.type in ("file_search", "code_interpreter", "mcp"):
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

    def _callable(self) -> Iterator[Mapping[str, Any]]:
        """Yield the functions with the restrictions on their arguments: `strict` and patterns.

        The restrictions limit the calls that the model can generate; they are not in the prompt.
        """
        for entry, function in zip(self._entries.values(), self.functions, strict=True):
            inner = function["function"]
            if entry.pattern is not None:
                parameters = _input_schema() | {
                    "properties": {INPUT: {"type": "string", "pattern": entry.pattern}}
                }
                yield {**function, "function": {**inner, "parameters": parameters, "strict": True}}
            elif entry.strict:
                yield {**function, "function": {**inner, "strict": True}}
            else:
                yield function


def _flatten(tools: Sequence[types.Tool]) -> Iterator[tuple[str, types.Tool, str | None]]:
    """Yield each tool's place in the body, such as `tools[0]`, the tool, and its group's name.

    A group is a tool of the type `namespace`; it is not yielded itself. The name is None for a tool
    outside of groups. Raises BadRequest for a group without a name and for a malformed tool in it.
    """
    for i, tool in enumerate(tools):
        if tool.type != "namespace":
            yield f"tools[{i}]", tool, None
            continue
        if not tool.name:
            raise BadRequest(f"tools[{i}].name: a name is required.", param=f"tools[{i}].name")
        for j, raw in enumerate(tool.tools or ()):
            at = f"tools[{i}].tools[{j}]"
            yield at, types.convert(raw, types.Tool, at), tool.name


def _function(name: str, description: str | None, parameters: Mapping[str, Any]) -> Function:
    body = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": body}


def _input_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _custom(
    tool: types.Tool, rendered: str, namespace: str | None, at: str
) -> tuple[Entry, Function]:
    name, form = tool.name or "", tool.format or types.CustomFormat()
    description, pattern = tool.description or "", None
    if form.type == "grammar":
        if not form.syntax or not form.definition:
            message = f"{at}.format: a grammar needs `syntax` and `definition`."
            raise BadRequest(message, param=f"{at}.format")
        read = pattern_of_lark if form.syntax == "lark" else pattern_of_regex
        pattern = read(form.definition, f"{at}.format.definition")
        kind = "Lark grammar" if form.syntax == "lark" else "regular expression"
        rule = f"`{INPUT}` must follow this {kind}:\n{form.definition}"
        description = f"{description}\n\n{rule}" if description else rule
    entry = Entry(rendered, name, namespace, custom=True, pattern=pattern)
    return entry, _function(rendered, description, _input_schema())


# -- calls -----------------------------------------------------------------------------------


def write_call(call: ToolCall, tools: Toolbox, id: str, status: str) -> dict[str, Any]:
    """Return the output item of a tool call.

    The type of the item is `custom_tool_call` for a call of a custom tool, else `function_call`.
    `id` and `status` (such as `completed`) are those of the item.
    """
    entry = tools.find(call.name)
    head: dict[str, Any] = {"id": id, "call_id": call.id, "name": entry.name, "status": status}
    if entry.namespace:
        head["namespace"] = entry.namespace
    if entry.custom:
        return {"type": "custom_tool_call", **head, "input": _read_input(call.arguments)}
    return {"type": "function_call", **head, "arguments": call.arguments}


def _read_input(arguments: str) -> str:
    """Return the input text of a custom tool's call.

    `arguments` is the call's arguments as JSON text, normally an object with only a string
    `input`. Otherwise the JSON text is returned as it is.
    """
    value = json.loads(arguments)
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
