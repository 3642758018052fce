"""Output settings in OpenAI's request bodies: the reply's format, and which tools are called.

Sources: https://platform.openai.com/docs/guides/structured-outputs and
https://platform.openai.com/docs/guides/function-calling. Extensions are listed in `openai_types`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import OutputFormat, ToolChoice
from mlxcache.wire import openai_types as types
from mlxcache.wire.decode import decode
from mlxcache.wire.formats import format_of_schema

_UNSUPPORTED_OPTIONS = (
    *("structural_tag", "whitespace_pattern"),
    *("disable_any_whitespace", "disable_additional_properties"),
)
_FORMATS = ("json", "regex", "choice", "grammar", "json_object")


# -- format ----------------------------------------------------------------------------------


def read_format(body: types.Generation) -> OutputFormat | None:
    """Return the required format of the reply, or None for free text.

    Raises:
        Unsupported: the kind of format, or an option of vLLM, is not supported.
        BadRequest: a field is incomplete, or two fields require a format.
    """
    found = list(_formats(body))
    if len(found) > 1:
        one, other = found[0].param, found[1].param
        message = f"A reply has one format: use `{one}` or `{other}`, not both."
        raise BadRequest(message, param=other)
    return found[0] if found else None


def _formats(body: types.Generation) -> Iterator[OutputFormat]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _structured_outputs(body.structured_outputs)
    yield from _constraints(
        ("json_schema", "guided_json", body.guided_json),
        ("regex", "guided_regex", body.guided_regex),
        ("choice", "guided_choice", body.guided_choice),
        ("grammar", "guided_grammar", body.guided_grammar),
        ("json_schema", "json_schema", body.json_schema),
        ("grammar", "grammar", body.grammar),
    )


def _response_format(form: types.Format) -> Iterator[OutputFormat]:
    at = "response_format"
    match form.type:
        case "text":
            return
        case "json_object" if form.schema is not None:
            yield format_of_schema(form.schema, f"{at}.schema")
        case "json_object":
            yield OutputFormat("json_object", param=at)
        case "json_schema" if form.json_schema is not None:
            yield format_of_schema(form.json_schema.schema, f"{at}.json_schema.schema")
        case "json_schema":
            raise BadRequest(
                f"`{at}` of type 'json_schema' needs `json_schema` with `name` and `schema`.",
                param=f"{at}.json_schema",
            )
        case other:
            raise Unsupported(
                f"`{at}` {other[:64]!r} is not supported: use 'json_schema', 'json_object' or "
                "'text', or a field of `structured_outputs`.",
                param=at,
            )


def _structured_outputs(asked: types.StructuredOutputs) -> Iterator[OutputFormat]:
    at = "structured_outputs"
    for option in _UNSUPPORTED_OPTIONS:
        if getattr(asked, option):
            raise Unsupported(f"`{at}.{option}` is not supported.", param=f"{at}.{option}")
    if all(getattr(asked, name) is None for name in _FORMATS):
        names = ", ".join(f"`{name}`" for name in _FORMATS)
        raise BadRequest(f"`{at}` has no format: give it one of {names}.", param=at)
    if asked.json_object:
        yield OutputFormat("json_object", param=f"{at}.json_object")
    yield from _constraints(
        ("json_schema", f"{at}.json", asked.json),
        ("regex", f"{at}.regex", asked.regex),
        ("choice", f"{at}.choice", asked.choice),
        ("grammar", f"{at}.grammar", asked.grammar),
    )


def _constraints(
    *given: tuple[Literal["json_schema", "regex", "choice", "grammar"], str, Any],
) -> Iterator[OutputFormat]:
    """Yield the output format for each field in `given` that the request sets.

    A field is given as the kind of format, the field's name, and its value. An empty string counts
    as not set, because some clients always send the field. Raises BadRequest for a schema that is
    not a JSON object and for an empty list of choices.
    """
    for kind, name, value in given:
        if value is None or value == "":
            continue
        match kind:
            case "json_schema":
                yield format_of_schema(_parse_schema(value, name), name)
            case "choice":
                yield OutputFormat(kind, _encode_choices(value, name), name)
            case _:
                yield OutputFormat(kind, value, name)


def _parse_schema(value: str | dict[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(value, str):
        return value
    try:
        return decode(dict[str, Any], value.encode())
    except BadRequest as error:
        raise BadRequest(f"`{field}` is not a JSON object: {error}", param=field) from error


def _encode_choices(choices: Sequence[str], field: str) -> str:
    if not choices:
        raise BadRequest(f"`{field}` needs at least one string.", param=field)
    return msgspec.json.encode(choices).decode()


# -- tools -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a reply may or must call, as in `Job`.

    If `tools` is None, calls are returned as text. `choice` says whether one must be called.
    `parallel` allows several calls in one reply. `named` is True if the client forced one function
    by name, which is then called exactly once.
    """

    tools: tuple[Mapping[str, Any], ...] | None = None
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    named: bool = False


def read_tool_use(body: types.ChatRequest, rendered: Sequence[Mapping[str, Any]]) -> ToolUse:
    """Return which tools may be called, and how, as the body's `tool_choice` asks for.

    `rendered` are the body's tools in the form of `Chat.tools`, in order. All are in the prompt,
    without `strict`, whatever `tool_choice` is, so that the beginning of the prompt stays the same.

    Raises:
        Unsupported: the type of `tool_choice` is not supported.
        BadRequest: `tool_choice` is malformed or names an unknown tool, or it asks for a call
            although the request has no tools.
    """
    choice = body.tool_choice or "auto"
    asked = types.ToolChoice(choice) if isinstance(choice, str) else choice
    if asked.type == "none" or (asked.type == "auto" and not rendered):
        return ToolUse()
    known = [tool["function"]["name"] for tool in rendered]
    found = _tool_choice(asked)
    if not known:
        raise BadRequest("`tool_choice` needs `tools`, and there are none.", param="tool_choice")
    for name in found.names:
        if name not in known:
            raise BadRequest(
                f"`tool_choice` names {name[:64]!r}, which is not one of `tools`.",
                param="tool_choice",
            )
    named = asked.type == "function"
    return ToolUse(
        tools=tuple(_with_strict(body.tools or (), rendered)),
        choice=found,
        parallel=not named and body.parallel_tool_calls is not False,
        named=named,
    )


def _tool_choice(asked: types.ToolChoice) -> ToolChoice:
    match asked.type:
        case "auto":
            return ToolChoice()
        case "required" | "any":
            return ToolChoice(required=True)
        case "function" if name := _name(asked):
            return ToolChoice(required=True, names=(name,))
        case "function":
            raise BadRequest(
                "`tool_choice` of type 'function' needs the function's name.", param="tool_choice"
            )
        case "allowed_tools":
            return _allowed_tools(asked.allowed_tools)
        case "custom" | "tool":
            message = f"`tool_choice` {asked.type!r} is not supported: use 'function'."
            raise Unsupported(message, param="tool_choice")
    raise BadRequest(
        "`tool_choice` must be 'auto', 'none', 'required', or an object of type 'function' or "
        "'allowed_tools'.",
        param="tool_choice",
    )


def _allowed_tools(allowed: types.AllowedTools | None) -> ToolChoice:
    at = "tool_choice.allowed_tools"
    if allowed is None or not allowed.tools:
        raise BadRequest(f"`{at}` needs `mode`, and `tools` with at least one function.", param=at)
    names: list[str] = []
    for i, tool in enumerate(allowed.tools):
        name = _name(tool)
        if tool.type != "function" or not name:
            where = f"{at}.tools[{i}]"
            raise BadRequest(f"`{where}` must be a function with its name.", param=where)
        names.append(name)
    return ToolChoice(required=allowed.mode == "required", names=tuple(dict.fromkeys(names)))


def _name(tool: types.ToolChoice | types.AllowedTool) -> str | None:
    return tool.function.name if tool.function else tool.name


def _with_strict(
    tools: Iterable[types.Tool], rendered: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    for tool, shown in zip(tools, rendered, strict=True):
        strict = tool.function is not None and tool.function.strict
        yield {**shown, "function": {**shown["function"], "strict": True}} if strict else shown
