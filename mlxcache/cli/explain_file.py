"""The file with a request that `mlxcache explain` is given, and what it is where it is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from mlxcache.errors import BadRequest, MlxcacheError

EXPECTED = (
    "Expected is the JSON body of a chat request, of OpenAI's chat completions or Anthropic's "
    "messages: an object with a list `messages`, such as `mlxcache serve --record DIR` keeps."
)
_SHOWN = 40
_MOST_KEYS = 5

# In the order in which they are looked for.
_OTHERS = (
    ("choices", "as a server's answer has, and not a request"),
    ("error", "as a server's answer has, and not a request"),
    ("input", "as a request of OpenAI's responses API has"),
    ("prompt", "as a text completion has"),
)


def read_request(file: Path) -> dict[str, Any]:
    """The chat request in `file`, or in the input for `-`.

    Raises MlxcacheError, with what was expected and what was found.
    """
    # Here and not above: msgspec and Starlette take a while.
    from mlxcache.api.bodies import chat_of, read_body  # noqa: PLC0415

    name = "The input" if str(file) == "-" else str(file)
    try:
        raw = typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise MlxcacheError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        request = read_body(raw)
    except BadRequest as error:
        found = what_is(raw) or str(error).rstrip(".")
        raise MlxcacheError(f"{name} is no chat request: {found}. {EXPECTED}") from error
    try:
        chat_of(request)
    except BadRequest as error:
        raise MlxcacheError(f"{name} is no chat request that can be rendered: {error}") from error
    return request


def what_is(raw: bytes) -> str | None:
    """What a file that is no request is, for a person; None where nothing seems wrong."""
    if not raw.strip():
        return "it is empty"
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return f"it is no text, but {len(raw):,} bytes of something else"
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    except ValueError as error:
        lines = _values(text)
        if lines > 1:
            return f"it has {lines:,} JSON values, one a line; put one of them into a file"
        return f"it is no JSON ({error}), and begins with {_cut(text.strip())!r}"
    return _object(value) if isinstance(value, dict) else f"it is {_kind(value)}"


def _object(value: dict[str, Any]) -> str | None:
    if "messages" in value:
        messages = value["messages"]
        if isinstance(messages, list):
            return None if messages else "its `messages` is empty"
        return f"its `messages` is {_kind(messages)}"
    for key, why in _OTHERS:
        if key in value:
            return f"it has `{key}` and no `messages`, {why}"
    for key, below in value.items():
        if isinstance(below, dict) and isinstance(below.get("messages"), list):
            return f"`messages` is below `{_cut(key)}`; put what is there into a file"
    if not value:
        return "it is an empty object"
    names = ", ".join(f"`{_cut(key)}`" for key in list(value)[:_MOST_KEYS])
    more = f" and {len(value) - _MOST_KEYS} more" if len(value) > _MOST_KEYS else ""
    return f"it is an object without `messages`, which has {names}{more}"


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the JSON text {_cut(value)!r}"
    if isinstance(value, list):
        return f"a JSON list of {len(value):,}"
    return "a JSON object" if isinstance(value, dict) else f"the JSON value {json.dumps(value)}"


def _values(text: str) -> int:
    """How many JSON values there are, one a line; 0 where a line is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        for line in lines:
            json.loads(line)
    except (ValueError, RecursionError):
        return 0
    return len(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
