"""Parsing of tool-call blocks to calls that clients can run."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.types import ToolCall

log = logging.getLogger(__name__)

Parse = Callable[[str, list[dict[str, Any]]], Any]
"""One of mlx-lm's tool parsers: block text and tools to a dict or a list of dicts."""

# the parsers use json, ast and regular expressions on the model's text, and do not catch errors
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


def parse_json(text: str, _: object = None) -> Any:
    """Parse `{"name": ..., "arguments": {...}}`, or a list of these.

    Models whose template has no tools are instructed to write this form.
    """
    return json.loads(text)


def read_calls(
    parse: Parse, text: str, tools: Sequence[Mapping[str, Any]], first: int, taken: set[str]
) -> list[ToolCall]:
    """Parse the calls in one block, numbered from `first`; none if any part is malformed.

    `taken` holds the ids used in this reply, and is added to. A name that is not one of `tools` is
    accepted: the client reports it to the model.
    """
    known = [_plain(tool) for tool in tools]
    try:
        parsed = parse(text, known)
        found = parsed if isinstance(parsed, list) else [parsed]
        ids = set(taken)
        calls = [_call(raw, first + i, ids) for i, raw in enumerate(found)]
        _refuse_guess(text, calls, known)
    except _MALFORMED as error:
        log.warning(
            "malformed tool call of %d characters returned as text: %s: %s",
            len(text),
            type(error).__name__,
            str(error)[:200],
        )
        return []
    taken.update(ids)
    return calls


def _plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Add empty `parameters` to a tool without: some parsers look them up."""
    return {**tool, "function": {"parameters": {}, **(tool.get("function") or {})}}


def _call(raw: Any, index: int, taken: set[str]) -> ToolCall:
    function = raw.get("function")
    body = function if isinstance(function, dict) else raw
    name = body.get("name", function)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("the call has no name")
    name.encode()  # raises for half a surrogate pair, which cannot be sent
    arguments = _arguments(body.get("arguments", body.get("parameters")))
    given = raw.get("id")
    if not isinstance(given, str) or not given or given in taken:
        given = f"call_{secrets.token_hex(12)}"
    taken.add(given)
    return ToolCall(index=index, id=given, name=name.strip(), arguments=arguments)


def _arguments(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        value = json.loads(value)
    if value is None or value == "":
        value = {}
    if not isinstance(value, dict):
        raise ValueError("the arguments are not a JSON object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= c <= "\udfff" for c in text):
        return json.dumps(value, allow_nan=False)
    return text


def _refuse_guess(text: str, calls: list[ToolCall], tools: list[dict[str, Any]]) -> None:
    """Raise ValueError for a call of mlx-lm's GLM parser that holds unread text as `raw`."""
    names = {tool["function"].get("name") for tool in tools}
    for call in calls:
        if call.name not in names and list(json.loads(call.arguments)) == ["raw"]:
            raise ValueError(f"no tool call found in {text[:80]!r}")
