"""Parts of a `Chat` that the requests of every API are converted to, in the form of chat templates.

Source of the keep hints: https://platform.openai.com/docs/guides/prompt-caching
(`prompt_cache_retention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

from mlxcache.errors import BadRequest
from mlxcache.types import OutputFormat, ToolChoice
from mlxcache.wire.decode import decode

EFFORT_BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24_576}
"""Maximum tokens of thinking by effort; from `low` on as in Gemini's API for OpenAI's clients.

Source: https://ai.google.dev/gemini-api/docs/openai#thinking."""

_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Effort that a chat template gets, for efforts that many templates do not know."""

MINUTES_5, HOUR, DAY = 300.0, 3600.0, 86_400.0
"""Times for which prompts are kept, in seconds."""

_RETENTION = {"in_memory": MINUTES_5, "in-memory": MINUTES_5, "24h": DAY}

MOST_NAME = 512
"""Most characters of a tool's name where a few bytes of a body write it again."""

_RESERVED_ARGS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length"),
        "tokenizer_kwargs",
    }
)
"""Arguments that the server itself passes to a chat template, or that change its result's type."""


def check_template_args(args: Mapping[str, Any] | None) -> None:
    for key in args or ():
        if key in _RESERVED_ARGS:
            raise BadRequest(
                f"The template argument {key!r} is reserved for the server.",
                param=f"chat_template_kwargs.{key}",
            )


def effort_args(effort: str | None) -> dict[str, Any]:
    """Return the arguments of the chat template for an effort of reasoning; empty for None."""
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": _EFFORT.get(effort, effort)} if effort else {}


def keep_hints(retention: Any, messages: int) -> tuple[tuple[int, float], ...]:
    """Return the keep hint that a value of `prompt_cache_retention` asks for, if it is known.

    It is a pair: the number of `messages`, and the seconds to keep them after each use.
    """
    seconds = _RETENTION.get(retention) if isinstance(retention, str) else None
    return ((messages, seconds),) if seconds else ()


Function = Mapping[str, Any]
"""A tool in the form of `Chat.tools`, which chat templates take."""


def make_function(
    name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> Function:
    """Return a tool as a function; without `parameters` it takes none."""
    empty = {"type": "object", "properties": {}}
    body = {
        "name": name,
        "description": description or "",
        "parameters": empty if parameters is None else parameters,
    }
    return {"type": "function", "function": body}


def with_strict(function: Function) -> Function:
    """Return `function` with arguments that are always valid. It is not rendered so."""
    return {**function, "function": {**function["function"], "strict": True}}


def make_call(id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call in the form that chat templates take."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with the results of parallel calls in the order of their calls.

    A template that renders no ids shows only by the place to which call a result belongs.
    """
    found: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            found += sorted(run, key=lambda m: places.get(m.get("tool_call_id", ""), len(places)))
        else:
            found += run
            calls = found[-1].get("tool_calls", ())
            places = {call["id"]: i for i, call in enumerate(calls)}
    return found


def parse_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a tool call as the object that chat templates expect.

    Text that is not a JSON object becomes the value of the key `_raw`.
    """
    if not isinstance(text, str):
        return text or {}
    if not text.strip():
        return {}
    try:
        return decode(dict[str, Any], text.encode())
    except BadRequest:
        return {"_raw": text}


def format_of_schema(schema: Mapping[str, Any], param: str) -> OutputFormat:
    """Return the format for JSON that is valid by `schema`, keeping the order of the schema's keys.

    `param` is the field of the request that holds the schema, for errors.
    """
    return OutputFormat("json_schema", msgspec.json.encode(schema).decode(), param)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a reply may or must call, as in `Job`.

    `named`: the client forced one function by name, which is then called exactly once.
    """

    tools: tuple[Function, ...] | None = None
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    named: bool = False
