"""Choice of the checkpoints of a path to drop: one rule for RAM, disk and prefill.

An edit far back makes everything after it be fed again, so a restart a little before it costs
little more; near the end every message counts. A checkpoint's worth is therefore the gap that its
removal would leave, as a share of what a restart there feeds anyway. Removing the least worthy one
repeatedly leaves gaps that grow with the distance to the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

NEWEST = 4
"""Checkpoints at a path's end that stay: those of two turns with two messages each."""

FEWEST = 8
"""Checkpoints that each path may have regardless of their size."""

BRANCH_WEIGHT = 8.0
"""Factor on the worth of a position where paths branch: later ones will branch there too."""

BUDGET_SHARE = 0.5
"""Share of a tier's bytes that all checkpoints together may take."""

PATH_SHARE = 1 / 64
"""Share of a tier's bytes that one path's checkpoints may take beyond what its length allows."""


def allowed(kv_bytes: int, checkpoint_bytes: int, limit: int) -> int:
    """Bytes that the checkpoints of one path may take in a tier of `limit` bytes.

    A few checkpoints plus the bytes of its KV, so the allowance grows with the path's tokens.
    """
    return FEWEST * checkpoint_bytes + kv_bytes + int(limit * PATH_SHARE)


def checkpoints_to_drop(
    positions: Sequence[int],
    end: int,
    most: int,
    *,
    kept: Collection[int] = (),
    parted: Collection[int] = (),
    worth: float = float("inf"),
) -> list[int]:
    """Choose the positions to drop, in order, so that at most `most` are left.

    `positions` ascend, in tokens, on a path that ends at `end`. The first stays (the head's), and
    so do the newest 4 and those in `kept`; of the others only those worth less than `worth` are
    dropped, even if more than `most` are left then. `parted`: positions where other paths branch.
    """
    count, last = len(positions), len(positions) - NEWEST
    before = [i - 1 for i in range(count)]
    after = [i + 1 for i in range(count)]

    def value(i: int) -> float:
        following = positions[after[i]]
        gap = (following - positions[before[i]]) / max(1, end - following)
        return gap * BRANCH_WEIGHT if positions[i] in parted else gap

    heap = [(value(i), i) for i in range(1, last) if positions[i] not in kept]
    heapify(heap)
    gone: list[int] = []
    while heap and count - len(gone) > most:
        was, i = heappop(heap)
        now = value(i)
        if now > was:  # a neighbour was dropped meanwhile
            heappush(heap, (now, i))
        elif now >= worth:
            break
        else:
            gone.append(positions[i])
            before[after[i]] = before[i]
            after[before[i]] = after[i]
    return gone
