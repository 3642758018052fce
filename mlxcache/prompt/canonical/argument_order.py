"""Rule `argument_order`: render a call's arguments with the key order that the model wrote.

Clients may send a call back with other key order or number formats. The server remembers the
arguments when the model writes them, or when it sees a call of a client for the first time.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.draft import Draft
from mlxcache.types import ToolCall

Calls = LRU[Hashable, tuple[Mapping[str, Any], int]]
"""Arguments and their length in characters, by the call's id and the tool's name."""


def remember_call(call: ToolCall, calls: Calls) -> None:
    """Add the arguments of a call to `calls`, as the model wrote them, if they are a JSON object.

    The key in `calls` is (id of the call, name of the tool).
    """
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return
    if isinstance(arguments, dict):
        calls.put((call.id, call.name), (arguments, len(call.arguments)))


def apply(draft: Draft, calls: Calls) -> bool:
    """Replace the arguments of calls in `draft` by those remembered, if their values are equal.

    `calls`: remembered arguments, by (id of the call, name of the tool). The arguments of a call
    in `draft` without an entry are added to `calls`. Returns whether any call was changed.
    """
    found = False
    for at, message in enumerate(draft.messages):
        given = message.get("tool_calls")
        if not given:
            continue
        shown = [_as_known(call, calls) for call in given]
        if any(new is not old for new, old in zip(shown, given, strict=True)):
            draft.messages[at] = {**message, "tool_calls": shown}
            found = True
    return found


def _as_known(call: Mapping[str, Any], calls: Calls) -> Mapping[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    text = json.dumps(arguments, default=repr)
    key = (call.get("id"), function.get("name"))
    known, _ = calls.setdefault(key, (arguments, len(text)))
    if json.dumps(known, default=repr) == text or not equal_values(known, arguments):
        return call
    return {**call, "function": {**function, "arguments": known}}


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal; 1 equals 1.0 but not true."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_values, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
