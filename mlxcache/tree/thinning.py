"""Which checkpoints of a path are worth their bytes. The same rule for RAM, disk and prefill.

An edit far back has everything after it fed again, so a restart a little before it costs next to
nothing more; near the end every message counts. What a checkpoint is worth is therefore the gap
that it would leave, as a share of what is fed anyway by a restart there. Dropping the one that is
worth least again and again leaves gaps that grow with the distance to the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

NEWEST = 4
"""Checkpoints at a path's end that stay: of a turn's two messages, and of the turn before."""

FEWEST = 8
"""Checkpoints that each path may have, however large they are."""

PARTED = 8.0
"""By how much a place where paths part already counts more: others will part there too."""

BUDGET_SHARE = 0.5
"""The share of a tier's bytes that all checkpoints together may take."""

PATH_SHARE = 1 / 64
"""The share of a tier's bytes that one path's may take beyond what its length allows."""


def allowed(kv_bytes: int, checkpoint_bytes: int, limit: int) -> int:
    """Bytes that the checkpoints of one path may take in a tier of `limit` bytes.

    A few checkpoints, and as much again as its KV takes: so they grow with the path's tokens.
    """
    return FEWEST * checkpoint_bytes + kv_bytes + int(limit * PATH_SHARE)


def spared(
    positions: Sequence[int],
    end: int,
    most: int,
    *,
    kept: Collection[int] = (),
    parted: Collection[int] = (),
    worth: float = float("inf"),
) -> list[int]:
    """Those of `positions` to drop, in order, so that at most `most` are left.

    `positions` ascend, in tokens, on a path that ends at `end`. The first stays (the head's), so do
    the newest 4 and those in `kept`; of the others none that is worth `worth` or more goes, even if
    more than `most` are left then. `parted`: where other paths leave this one.
    """
    count, last = len(positions), len(positions) - NEWEST
    before = [i - 1 for i in range(count)]
    after = [i + 1 for i in range(count)]

    def value(i: int) -> float:
        following = positions[after[i]]
        gap = (following - positions[before[i]]) / max(1, end - following)
        return gap * PARTED if positions[i] in parted else gap

    heap = [(value(i), i) for i in range(1, last) if positions[i] not in kept]
    heapify(heap)
    gone: list[int] = []
    while heap and count - len(gone) > most:
        was, i = heappop(heap)
        now = value(i)
        if now > was:  # one beside it went
            heappush(heap, (now, i))
        elif now >= worth:
            break
        else:
            gone.append(positions[i])
            before[after[i]] = before[i]
            after[before[i]] = after[i]
    return gone
