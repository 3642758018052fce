"""Output settings in Anthropic's request bodies: the reply's format, and which tools are called.

Sources: https://docs.anthropic.com/en/docs/build-with-claude/structured-outputs and
https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/implement-tool-use.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import Chat, OutputFormat, ToolChoice
from mlxcache.wire.anthropic_request import Function
from mlxcache.wire.anthropic_types import Conversation
from mlxcache.wire.formats import format_of_schema


def read_format(body: Conversation) -> OutputFormat | None:
    """Return the required format of the reply's text, or None for free text.

    `output_format` is the older name of `output_config.format`. Raises Unsupported for a type other
    than `json_schema`, and BadRequest if the schema is missing or both fields are set.
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
        message = f"{field}: {form.type[:64]!r} is not supported: use 'json_schema'."
        raise Unsupported(message, param=field)
    if form.schema is None:
        raise BadRequest(f"{field}.schema: a schema is required.", param=f"{field}.schema")
    return format_of_schema(form.schema, f"{field}.schema")


def check_not_continued(chat: Chat, form: OutputFormat | None) -> None:
    """Raise BadRequest if the last message shall be continued although a format is required.

    Anthropic's API does so too.
    """
    if form is not None and chat.continue_final:
        raise BadRequest(
            f"{form.param} is the format of a whole reply: the assistant's last message cannot be "
            "continued in it. Remove one of the two.",
            param=form.param,
        )


def read_tool_choice(body: Conversation, tools: Sequence[Function]) -> ToolChoice | None:
    """Return which of `tools` may or must be called; with None, calls are returned as text.

    Unlike in Anthropic's API, a forced call does not exclude thinking: the model thinks first.
    Raises BadRequest for an unknown type or tool, and for a forced call without tools.
    """
    choice = body.tool_choice
    kind = choice.type if choice else "auto"
    if kind == "none" or (kind == "auto" and not tools):
        return None
    if kind not in ("auto", "any", "tool"):
        raise BadRequest(
            f"tool_choice.type: {kind[:64]!r} is none of auto, any, tool, none.",
            param="tool_choice.type",
        )
    if not tools:
        raise BadRequest(
            f"tool_choice: {kind!r} needs tools, and there are none.", param="tool_choice"
        )
    if kind != "tool":
        return ToolChoice(required=kind == "any")
    name = choice.name if choice else None
    if not name:
        raise BadRequest("tool_choice.name: a name is required.", param="tool_choice.name")
    if all(tool["function"]["name"] != name for tool in tools):
        message = f"tool_choice.name: {name[:64]!r} is not one of tools."
        raise BadRequest(message, param="tool_choice.name")
    return ToolChoice(required=True, names=(name,))
