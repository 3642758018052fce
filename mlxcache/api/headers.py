"""Request headers that all APIs read: session label, client name, retry count and time limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from mlxcache import typed
from mlxcache.errors import BadRequest
from mlxcache.names import clean_label
from mlxcache.owner import OWNER
from mlxcache.types import Arrival

_SECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")
_OLD_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{8,})$")


def read_job_options(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields `retry` and `timeout_s` of a Job, from the headers of its request.

    `retry` is True if the SDK of OpenAI or Anthropic reports an earlier attempt. `timeout_s` is the
    value of X-Request-Timeout in seconds, or None. Raises BadRequest if that is not a number above
    0.
    """
    attempts = headers.get("x-stainless-retry-count", "")
    return {"retry": attempts.isdecimal() and int(attempts) > 0, "timeout_s": _timeout(headers)}


def _timeout(headers: Mapping[str, str]) -> float | None:
    text = headers.get("x-request-timeout")
    if text is None:
        return None
    if not _SECONDS.fullmatch(text.strip()) or not float(text):
        raise BadRequest(
            "The header X-Request-Timeout must be a number of seconds above 0.",
            param="X-Request-Timeout",
        )
    return float(text)


def read_arrival(
    headers: Mapping[str, str], id: str, api: str, session: str | None = None
) -> Arrival:
    """Return what is known of a request before its prompt is rendered.

    The client's name and the time limit are read from `headers`. `id`: request id. `api`: name of
    the API, such as `chat` or `messages`. `session`: session label, or None. Raises BadRequest if
    X-Request-Timeout is not a number above 0.
    """
    timeout_s = read_job_options(headers)["timeout_s"]
    return Arrival(id, api, session, read_client_name(headers), OWNER.get(), timeout_s)


def read_session_label(
    headers: Mapping[str, str],
    *,
    metadata_user_id: str | None = None,
    prompt_cache_key: str | None = None,
) -> str | None:
    """Return the session label of a request, or None if it has none.

    The first of these is used: X-Session-Id, X-Claude-Code-Session-Id, the `session_id` in
    Anthropic's `metadata.user_id` (JSON, or the older form `..._session_<uuid>`), OpenAI's
    `prompt_cache_key`; see `clean_label`.
    """
    candidates = (
        headers.get("x-session-id"),
        headers.get("x-claude-code-session-id"),
        _metadata_session(metadata_user_id),
        prompt_cache_key,
    )
    return next(filter(None, (clean_label(label or "") for label in candidates)), None)


def _metadata_session(user_id: str | None) -> str | None:
    if not user_id:
        return None
    try:
        return typed.decode(_UserId, user_id).session_id
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        match = _OLD_USER_ID.search(user_id)
        return match[1] if match else None


class _UserId(msgspec.Struct):
    session_id: str | None = None


def read_client_name(headers: Mapping[str, str]) -> str | None:
    """Return the client program from User-Agent, such as `claude-cli/2.1.329`; None if missing."""
    words = clean_label(headers.get("user-agent", "")).split()
    if not words:
        return None
    versioned = any(c.isdigit() for c in words[0])
    name = words[0] if versioned or len(words) < 2 or not words[1][0].isdigit() else words[:2]
    return (name if isinstance(name, str) else " ".join(name))[:80]
