"""Failures of single operations, and short reasons made from the errors of obstore."""

from __future__ import annotations

import re

_STATUS = re.compile(r"status code: (\d+)(?: ([A-Za-z ]+))?")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")

_CAUSES = {
    "connection refused": "connection refused",
    "dns error": "its host name is unknown",
    "connection reset": "connection reset",
    "connection closed": "connection closed",
    "certificate": "its certificate is not valid",
    "permission denied": "permission denied",
    "no space left": "the share is full",
    "timed out": "it does not answer",
}


class Failure(Exception):
    """Error of one operation; its text is a short reason without secrets.

    `grave`: the next operations would fail too.
    """

    def __init__(self, reason: str, *, grave: bool):
        super().__init__(reason)
        self.grave = grave


def describe_failure(error: Exception) -> Failure:
    """Return the failure for an error of obstore.

    Its own text is not used: it holds URLs, which may be signed. Answers such as 503 are not grave,
    because they may be the provider's way to slow a client down; a refusal (4xx) is.
    """
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        words = [status[1], (status[2] or "").strip(), f"({code[1]})" if code else ""]
        number = int(status[1])
        return Failure(
            "it answered " + " ".join(filter(None, words)),
            grave=400 <= number < 500 and number not in (408, 429),
        )
    lower = text.lower()
    for sign, reason in _CAUSES.items():
        if sign in lower:
            return Failure(reason, grave=True)
    return Failure(f"{type(error).__name__} of the storage", grave=True)
