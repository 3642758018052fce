"""Rules that repeat earlier requests: `tool_order`, `argument_order`, `cleared_results`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.draft import Draft, History
from mlxcache.types import ToolCall

Orders = LRU[bytes, tuple[bytes, ...]]
"""Orders of sets of tools: digests of the tools in order, by the same digests sorted and joined."""

Calls = LRU[bytes, tuple[Mapping[str, Any], int]]
"""Arguments and their length in characters, by a digest of the call's id and the tool's name."""

Results = LRU[bytes, str]
"""Tool results, by a digest of the messages before each and the id of its call."""

CLEARED = "[Old tool result content cleared]"
"""Text that clients put in place of a result, to send fewer tokens; here its KV is cached."""

LEAST = 200


def keep_tool_order(draft: Draft, orders: Orders) -> bool:
    """Put the tools into the order that the first request with the same tools had."""
    if len(draft.tools) < 2:
        return False
    texts = (json.dumps(tool, default=repr).encode() for tool in draft.tools)
    digests = tuple(hashlib.blake2b(text, digest_size=16).digest() for text in texts)
    order = orders.setdefault(b"".join(sorted(digests)), digests)
    if order == digests:
        return False
    tools = dict(zip(digests, draft.tools, strict=True))
    draft.tools = tuple(tools[digest] for digest in order)
    return True


def remember_call(call: ToolCall, calls: Calls) -> None:
    """Add a call's arguments to `calls`, as the model wrote them, if they are a JSON object."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return
    if isinstance(arguments, dict):
        calls.put(_key(call.id, call.name), (arguments, len(call.arguments)))


def _key(*parts: Any) -> bytes:
    """Return a digest, which is short: a client may give a call an id of megabytes."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def keep_arguments(draft: Draft, calls: Calls) -> bool:
    """Replace the arguments of calls by those remembered, if their values are equal.

    Clients may send a call back with other key order or number formats.
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
    key = _key(call.get("id"), function.get("name"))
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


def restore_results(draft: Draft, results: Results) -> bool:
    """Restore tool results that a client cleared, if an earlier request had them at the same place.

    That is after the same messages, for the same call.
    """
    if not any(message.get("role") == "tool" for message in draft.messages):
        return False
    history = History("results")
    found = False
    for at, message in enumerate(draft.messages):
        if message.get("role") == "tool":
            text = draft.text(at)
            key = _key(history.digest, message.get("tool_call_id"))
            if text == CLEARED:
                known = results.get(key)
                if known is not None:
                    draft.rewrite(at, known)
                    found = True
            elif len(text) >= LEAST:
                results.put(key, text)
        history.add(draft.messages[at])
    return found
