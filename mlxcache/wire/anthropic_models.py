"""The served model in Anthropic's API: the model object, and the list of models.

Source: https://docs.anthropic.com/en/api/models-list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mlxcache.types import ModelInfo

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING_TYPES = ("adaptive", "between_tools", "disabled", "enabled")


def describe_model(info: ModelInfo, name: str | None = None) -> dict[str, Any]:
    """Return the model object of Anthropic's API. Its id is `name`, or `info.id` if that is None.

    Lengths are in tokens. `max_tokens`, the longest reply, is the whole context length; the length
    of the prompt is not subtracted. `context_length`, `max_context_length` and
    `loaded_context_length` are fields of other local servers, which clients look for.
    """
    return {
        "id": name or info.id,
        "type": "model",
        "display_name": info.id,
        "created_at": _time(info.created),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": info.context_length,
        "max_tokens": info.context_length,
        "capabilities": _capabilities(info),
        "context_length": info.context_length,
        "max_context_length": info.max_context_length,
        "loaded_context_length": info.context_length,
    }


def describe_unknown(name: str) -> dict[str, Any]:
    """Return the model object of a model that was never loaded.

    `name` is its id. `max_input_tokens`, `max_tokens` and `capabilities` are not known, so they are
    None; `created_at` is the start of 1970.
    """
    known = {"id": name, "type": "model", "display_name": name, "created_at": _time(0)}
    unknown = ("max_input_tokens", "max_tokens", "capabilities")
    return known | {"lifecycle": "active"} | dict.fromkeys(unknown)


def _time(seconds: int) -> str:
    """Return a time, in seconds since 1970, in the form `2026-01-31T23:59:59Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def list_models(infos: Sequence[ModelInfo], *, empty: bool) -> dict[str, Any]:
    """Return the list of models in Anthropic's API.

    All `infos` are on one page. With `empty`, returns a page without models: the answer to a
    request for models before the first one or after the last one.
    """
    data = [] if empty else [describe_model(info) for info in infos]
    ids = [one["id"] for one in data] or [None]
    return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def _capabilities(info: ModelInfo) -> Mapping[str, Any]:
    thinks = info.has_thinking
    return {
        "batch": _is(False),
        "citations": _is(False),
        "code_execution": _is(False),
        "context_management": _is(
            False,
            clear_thinking_20251015=_is(False),
            clear_tool_uses_20250919=_is(False),
            compact_20260112=_is(False),
        ),
        "effort": _is(thinks, **{effort: _is(thinks) for effort in _EFFORTS}),
        "image_input": _is(info.has_images),
        "pdf_input": _is(False),
        "server_tools": _is(False, code_execution=_is(False), web_search=_is(False)),
        "structured_outputs": _is(True),
        # Every type is accepted, whatever the model.
        "thinking": _is(thinks, types={kind: _is(True) for kind in _THINKING_TYPES}),
    }


def _is(supported: bool, **more: Any) -> dict[str, Any]:
    return {"supported": supported, **more}
