"""When to write again after a disk error, and which paths are then to be written."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxcache.tree.node import Node
from mlxcache.types import Tokens, join_ids

FIRST_RETRY_S, RETRY_S = 1.0, 30.0
"""Pause after a disk error, in seconds: the first one, and the longest. Each pause doubles."""


class RetryBackoff:
    """Pauses in writing after disk errors, and the list of paths to write afterwards.

    The paths are not locked in RAM: a path that is evicted or merged into a longer one is removed
    from the list. `wake_in(seconds)` is called when a pause begins, and is to wake the MLX thread
    after so many seconds. `failing` is True from an error until the next write that succeeds.
    """

    def __init__(
        self, wake_in: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ):
        self.failing = False
        self._wake_in = wake_in
        self._clock = clock
        self._nodes: dict[Node, None] = {}
        self._pause = 0.0
        self._retry_at = self._failed_at = float("-inf")

    def note_failure(self, least: float = FIRST_RETRY_S) -> None:
        """Record a disk error, and begin a pause unless one is in progress.

        `least`: minimum length of the pause in seconds. Consecutive pauses get longer.
        """
        now = self._clock()
        self.failing = True
        if now < self._retry_at:
            return
        recent = now - self._failed_at < 2 * RETRY_S
        self._pause = max(least, min(2 * self._pause, RETRY_S) if recent else FIRST_RETRY_S)
        self._failed_at, self._retry_at = now, now + self._pause
        self._wake_in(self._pause)

    def note_success(self) -> None:
        """Record that a write succeeded: the disk works again, and any pause ends."""
        self.failing = False
        self.end_pause()

    def end_pause(self) -> None:
        """End the pause, so that the next write may be tried now."""
        self._retry_at = float("-inf")

    @property
    def paused(self) -> bool:
        """True if a pause is in progress, during which no write may be tried."""
        return self._clock() < self._retry_at

    @property
    def due(self) -> bool:
        """True if the list of paths to write is not empty, and no pause prevents a write."""
        return bool(self._nodes) and not self.paused

    @property
    def tokens(self) -> int:
        """Number of tokens of all paths in the list, shared ones once; some may be on disk."""
        parts = {part for node in self._nodes if not node.detached for part in node.path()}
        return sum(len(part.tokens) for part in parts)

    def add(self, node: Node) -> None:
        """Add the path that ends at `node` to the list of paths to write later."""
        if not node.detached:
            self._nodes[node] = None

    def take(self) -> tuple[Node, Tokens] | None:
        """Remove the oldest path from the list of paths to write, and return it.

        Returns the node at its end and its token ids, or None if the list is empty.
        """
        while self._nodes:
            node = next(iter(self._nodes))
            del self._nodes[node]
            if not node.detached:
                return node, join_ids(*(each.tokens for each in node.path()))
        return None
