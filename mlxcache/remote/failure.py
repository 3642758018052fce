"""Failures of operations on the remote, from obstore's errors, and when to skip it for them."""

from __future__ import annotations

import re
import time

_STATUS = re.compile(r"status code: (\d+)(?: ([A-Za-z ]+))?")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_SLOW_DOWN = (408, 425, 429)

_CAUSES = {
    "connection refused": "connection refused",
    "dns error": "its host name is unknown",
    "connection reset": "connection reset",
    "connection closed": "connection closed",
    "certificate": "its certificate is not valid",
    "permission denied": "permission denied",
    "read-only file system": "it is read-only",
    "no space left": "the share is full",
    "quota exceeded": "the share is full",
    "timed out": "it does not answer",
    "invalid http": "its answers are not HTTP",
}
"""Reasons by a part of obstore's text, in lower case."""

_LOCAL = ("permission denied", "it is read-only", "the share is full")
"""Reasons of `_CAUSES` that end writing only: reading may still work."""


class Failure(Exception):
    """Error of one operation on the remote; its text is a short reason without secrets.

    `grave`: the next operations of this kind (reading or writing) would fail too, so they are
    skipped until a probe succeeds. `gone`: the next operations of both kinds would fail too.
    """

    def __init__(self, reason: str, *, grave: bool, gone: bool = False):
        super().__init__(reason)
        self.grave = grave
        self.gone = gone


class WrongKey(Failure):
    """Failure: the remote's marker is of another key than this server's, or of another format.

    To have no key counts as a key of its own.
    """

    def __init__(self, reason: str):
        super().__init__(reason, grave=True, gone=True)


def describe_failure(error: Exception) -> Failure:
    """Return the failure that stands for an error of obstore.

    The error's own text is not passed on: it holds URLs, which may be signed. After a failure that
    is `grave` the remote is skipped at once; after others, such as status 503, only if three come
    in a row, because they may be the provider's way to slow a client down. Grave are: the statuses
    4xx except 408, 425 and 429, and every error without a status. One that shows that the remote
    cannot be reached, such as a refused connection, is `gone` as well.
    """
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        words = [status[1], (status[2] or "").strip(), f"({code[1]})" if code else ""]
        number = int(status[1])
        reason = "it answered " + " ".join(filter(None, words))
        return Failure(reason, grave=400 <= number < 500 and number not in _SLOW_DOWN)
    lower = text.lower()
    for sign, reason in _CAUSES.items():
        if sign in lower:
            return Failure(reason, grave=True, gone=reason not in _LOCAL)
    return Failure(f"{type(error).__name__} of the storage", grave=True)


def too_slow() -> Failure:
    """Return the failure of an operation that exceeded its deadline."""
    return Failure("it is too slow, or does not answer", grave=True)


FAILURES = 3
"""Failures in a row that open a breaker, if none of them is grave."""

MOST_PROBE_S = 30.0
"""Most seconds between two probes."""

STEADY_S = 60.0
"""Seconds after the end of a skipped period from which the next one begins with `probe_s` again."""


class Breaker:
    """Decision to try or to skip the reads, or the writes, of the remote.

    While operations are skipped, a probe is made from time to time: an operation in the background
    that shows if the remote works again. `is_open`: operations are skipped. `reason`: why; None if
    they are not. `errors`: number of failed operations since the start. `wait_s`: seconds to wait
    before the next probe; doubled by each probe that fails, up to `MOST_PROBE_S`. `probe_s`: the
    first `wait_s` of a skipped period, unless another one ended less than `STEADY_S` before.
    Methods are called on one thread; any thread may read attributes.
    """

    def __init__(self, probe_s: float):
        self._probe_s = probe_s
        self.is_open = False
        self.reason: str | None = None
        self.errors = 0
        self.wait_s = probe_s
        self._in_a_row = 0
        self._closed_at = -STEADY_S

    def succeed(self) -> None:
        """Record a success: operations are tried again if they were skipped."""
        self._in_a_row = 0
        if self.is_open:
            self._closed_at = time.monotonic()
            self.is_open, self.reason = False, None

    def fail(self, reason: str, *, grave: bool) -> None:
        """Record a failure, with a short `reason` for the log.

        Operations are skipped from then on if the failure is `grave`, that is, if the next
        operations would fail too, or if `FAILURES` operations in a row have failed.
        """
        self.errors += 1
        self._in_a_row += 1
        if not self.is_open and (grave or self._in_a_row >= FAILURES):
            steady = time.monotonic() - self._closed_at >= STEADY_S
            self.wait_s = self._probe_s if steady else min(2 * self.wait_s, MOST_PROBE_S)
            self.is_open, self.reason = True, reason

    def postpone(self, reason: str) -> None:
        """Record a failed probe with its `reason`: the time before the next probe doubles."""
        self.wait_s = min(2 * self.wait_s, MOST_PROBE_S)
        self.reason = reason
