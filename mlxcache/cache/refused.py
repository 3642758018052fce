"""What a disk that fails did not take, and when it is tried again. MLX thread only."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mlxcache.tree.prefix_tree import Node
from mlxcache.types import Tokens

FIRST_S, RETRY_S = 1.0, 30.0
"""Seconds for which a disk that failed is left alone: at first, and at most; each time twice as
long, for what is wrong may be over at once or last for hours."""


class Refused:
    """Paths of the prefix tree that are to be written once the disk works again.

    Nothing is kept in RAM for them: what is evicted meanwhile, or was merged into a longer path, is
    no longer waited for. `wake_in` has the MLX thread look again in so many seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.failing = False
        self.wake_in: Callable[[float], None] = lambda seconds: None
        self._clock = clock
        self._nodes: dict[Node, None] = {}
        self._pause = 0.0
        self._retry_at = self._failed_at = float("-inf")

    def failed(self, least: float = FIRST_S) -> None:
        """The disk has failed: leave it alone for a while, `least` seconds or longer."""
        now = self._clock()
        self.failing = True
        if now < self._retry_at:
            return
        lately = now - self._failed_at < 2 * RETRY_S
        self._pause = max(least, min(2 * self._pause, RETRY_S) if lately else FIRST_S)
        self._failed_at, self._retry_at = now, now + self._pause
        self.wake_in(self._pause)

    def worked(self) -> None:
        """Something was written."""
        self.failing = False
        self.hurry()

    def hurry(self) -> None:
        """Try again now."""
        self._retry_at = float("-inf")

    @property
    def leaves_alone(self) -> bool:
        """Whether the disk is to be left alone now."""
        return self._clock() < self._retry_at

    @property
    def due(self) -> bool:
        """Whether there is something to try again with, and it may be now."""
        return bool(self._nodes) and not self.leaves_alone

    def add(self, node: Node) -> None:
        """The path to `node` is to be written later."""
        if not node.detached:
            self._nodes[node] = None

    def take(self) -> tuple[Node, Tokens] | None:
        """The path that waits longest, with its tokens; None if none is left in the tree."""
        while self._nodes:
            node = next(iter(self._nodes))
            del self._nodes[node]
            if not node.detached:
                return node, np.concatenate([each.tokens for each in node.path()])
        return None
