"""Guides: what decides which tokens a reply may continue with."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bitmask = npt.NDArray[np.int32]
"""Allowed tokens, shape (ceil(vocabulary / 32),): bit i % 32 of word i // 32 is token i."""


class Guide(Protocol):
    """The state of one reply's guidance, advanced by each token that is drawn.

    Any thread, one at a time. None of the methods calls MLX.
    """

    def accept(self, token: int) -> None:
        """Advance by a token of the reply. Raises ValueError for one that was not allowed."""

    def forced(self) -> int | None:
        """The only token that may follow, or None where there are several."""

    def mask(self) -> Bitmask | None:
        """The tokens that may follow, or None where all may."""

    def copy(self) -> Guide:
        """An independent guide in the same state."""
