"""What a request's headers say of how it is to be handled, whichever API it came by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlxcache.errors import BadRequest

_SECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")


def terms(headers: Mapping[str, str]) -> dict[str, Any]:
    """What a request says of its own handling, as fields of a Job.

    `retry` by the header that OpenAI's and Anthropic's SDKs count their tries with, `timeout_s` by
    X-Request-Timeout. Raises BadRequest where that is no number of seconds.
    """
    tries = headers.get("x-stainless-retry-count", "")
    return {"retry": tries.isdecimal() and int(tries) > 0, "timeout_s": _timeout(headers)}


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
