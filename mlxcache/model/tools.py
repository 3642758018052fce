"""From the text of a tool-call block to calls that clients can run."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.types import ToolCall

log = logging.getLogger(__name__)

Parse = Callable[[str, list[dict[str, Any]]], Any]
"""mlx-lm's tool parsers: block text and tools to a dict or a list of dicts."""

# The parsers read what a model wrote, with json, ast and regular expressions, and let through
# whatever those raise.
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
    """Calls in the form that models without a tool template are told to write:
    `{"name": ..., "arguments": {...}}`, or a list of these."""
    return json.loads(text)


def read_calls(
    parse: Parse, text: str, tools: Sequence[Mapping[str, Any]], first: int, taken: set[str]
) -> list[ToolCall]:
    """The calls in one block, numbered from `first`; empty if the block is malformed in any part.

    `taken` are the ids given out in this reply, and is added to. A name that is none of `tools`
    is let through: the client knows best how to tell the model.
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
            "a tool call of %d characters is malformed and passed on as text (%s: %s)",
            len(text),
            type(error).__name__,
            str(error)[:200],
        )
        return []
    taken.update(ids)
    return calls


def _plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as every parser takes it: some look up `parameters`, which clients may leave out."""
    return {**tool, "function": {"parameters": {}, **(tool.get("function") or {})}}


def _call(raw: Any, index: int, taken: set[str]) -> ToolCall:
    function = raw.get("function")
    body = function if isinstance(function, dict) else raw
    name = body.get("name", function)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("the call has no name")
    name.encode()  # half a surrogate pair cannot be sent to anyone
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
        raise ValueError("the arguments are no JSON object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if any("\ud800" <= c <= "\udfff" for c in text):
        return json.dumps(value, allow_nan=False)
    return text


def _refuse_guess(text: str, calls: list[ToolCall], tools: list[dict[str, Any]]) -> None:
    """mlx-lm's GLM parser makes a call out of any text, keeping what it cannot read as `raw`."""
    names = {tool["function"].get("name") for tool in tools}
    for call in calls:
        if call.name not in names and list(json.loads(call.arguments)) == ["raw"]:
            raise ValueError(f"no call could be read from {text[:80]!r}")
