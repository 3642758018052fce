"""Output settings in Anthropic's request bodies: format, tools to call, thinking and effort.

Sources: https://docs.anthropic.com/en/docs/build-with-claude/structured-outputs and
https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/implement-tool-use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import Chat, OutputFormat, ToolChoice
from mlxcache.wire.anthropic_tools import Function
from mlxcache.wire.anthropic_types import Conversation, Effort, Message, Request, ThinkingConfig
from mlxcache.wire.formats import format_of_schema
from mlxcache.wire.openai_request import EFFORT_BUDGETS, effort_args


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
    """Raise BadRequest if a format is required and the assistant's last message is to be continued.

    Anthropic's API refuses this too.
    """
    if form is not None and chat.continue_final:
        raise BadRequest(
            f"{form.param} is the format of a whole reply: the assistant's last message cannot be "
            "continued in it. Remove one of the two.",
            param=form.param,
        )


def read_tool_choice(body: Conversation, tools: Sequence[Function]) -> ToolChoice | None:
    """Return which of `tools` may or must be called, or None if none may be.

    With None, calls that the model writes anyway are returned as text.
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


def template_args(body: Conversation) -> Mapping[str, Any]:
    """Return the chat template's arguments for thinking and effort, by name.

    They are `enable_thinking` and `reasoning_effort`, each only if the request sets it.
    """
    args = effort_args(read_effort(body))
    if body.thinking is not None:
        args["enable_thinking"] = _may_think(body.thinking)
    return args


def _may_think(config: ThinkingConfig | None) -> bool:
    return config is None or config.type not in ("disabled", "between_tools")


def read_thinking_budget(body: Request, *, takes_effort: bool) -> int | None:
    """Return the maximum tokens of thinking, or None if there is no limit.

    It is `thinking.budget_tokens` if the request has it and `thinking.type` is `enabled`. Otherwise
    an effort of `low` or `medium` becomes a number of tokens (`EFFORT_BUDGETS`), unless thinking is
    off or `takes_effort`: the chat template uses the effort itself.
    """
    config = body.thinking
    if config is not None and config.type == "enabled" and config.budget_tokens is not None:
        return config.budget_tokens
    effort = read_effort(body)
    if takes_effort or effort == "high" or not _may_think(config):
        return None
    return EFFORT_BUDGETS.get(effort or "")


def read_effort(body: Conversation) -> Effort | None:
    """Return the effort of the reply, or None if the request has none.

    It is the effort of the newest system message whose effort applies already, else that of the
    request's `output_config`. An effort in a system message applies at once if the message follows
    new input of the user (more than tool results), otherwise from the next such input on.
    Source: https://platform.claude.com/docs/en/build-with-claude/effort-per-message.
    """
    effort = body.output_config.effort if body.output_config else None
    later: Effort | None = None
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


def _has_input(message: Message) -> bool:
    content = message.content or ""
    return isinstance(content, str) or any(raw.get("type") != "tool_result" for raw in content)


def shows_thinking(body: Request) -> bool:
    """Return whether reasoning is sent to the client.

    It is not sent if `thinking.display` is `omitted`. It is not sent for `updates` either, with
    which Anthropic's models show only short notes between tool calls; local models write such notes
    as text.
    """
    return body.thinking is None or body.thinking.display not in ("omitted", "updates")
