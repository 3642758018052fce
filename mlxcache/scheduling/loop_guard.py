"""Detection of replies that repeat the same tokens without end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

LONGEST = 1024  # longest period to detect, in tokens: about a hundred lines of code
BLOCK = 32  # number of tokens that are compared at once

NEAR = 3 * BLOCK
"""Number of tokens ahead: `LoopGuard.near` is true if a loop may be detected within them."""

OFTEN, OFTEN_TOKENS = 50, 1000
SELDOM, SELDOM_TOKENS = 8, 4000
"""A reply is a loop once it has repeated the same 1 to `LONGEST` tokens, with nothing between them,
so often and over so many tokens.

Intended repetition is shorter or less exact: rules and tables of a page (100 tokens), a board or
matrix of equal rows (32 x 32 zeros: 3,100 tokens in 32 rows), test output (the names differ), or a
hex dump (the addresses differ). The loops of models do not end before max_tokens.
"""


def _required() -> npt.NDArray[np.int32]:
    """Return, for each period, how many tokens must equal the one a period before."""
    period = np.arange(1, LONGEST + 1, dtype=np.int32)
    often = np.maximum(OFTEN * period, OFTEN_TOKENS)
    seldom = np.maximum(SELDOM * period, SELDOM_TOKENS)
    return (np.minimum(often, seldom) - period).astype(np.int32)


_REQUIRED = _required()


class LoopGuard:
    """Detects that a reply repeats the same 1 to `LONGEST` tokens many times; see `OFTEN`.

    Constant memory, and some microseconds per token. `period`: number of tokens that the detected
    loop repeats, or 0. `near`: a loop may be detected within the next `NEAR` tokens.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.period, self.near = 0, False
        self._new: list[int] = []
        self._recent = np.full(BLOCK + LONGEST, -1, np.int32)  # the newest first
        self._runs = np.zeros(LONGEST + 1, np.int32)  # by period: newest tokens that repeat

    def add(self, token: int) -> bool:
        """Add the reply's next token; return True if it is a loop, checked every `BLOCK` tokens."""
        self._new.append(token)
        if len(self._new) < BLOCK:
            return False
        self._recent[BLOCK:] = self._recent[:-BLOCK]
        self._recent[:BLOCK] = self._new[::-1]
        self._new.clear()
        return self._count()

    def _count(self) -> bool:
        """Compare the newest block with the tokens one period earlier, for every period."""
        block, earlier = self._recent[:BLOCK], sliding_window_view(self._recent, BLOCK)
        (periods,) = np.nonzero(self._recent[: LONGEST + 1] == block[0])
        periods = periods[1:]  # 0 is the newest token itself
        differs = earlier[periods] != block
        whole, since = ~differs.any(axis=1), differs.argmax(axis=1)
        runs = np.where(whole, self._runs[periods] + BLOCK, since)
        self._runs[:] = 0
        self._runs[periods] = runs
        required = _REQUIRED[periods - 1]
        found = periods[runs >= required]
        self.near = bool((runs >= required - NEAR).any())
        self.period = int(found[0]) if len(found) else 0
        return len(found) > 0
