"""Selection of the checkpoints of a path to drop. RAM, disk and prefill use the same rule.

After an edit of a prompt, the model computes all tokens from the last checkpoint before the edit
on. Far from the end, a checkpoint that is a little earlier adds relatively few tokens; near the end
it adds relatively many. The worth of a checkpoint is here the number of tokens between its two
neighbours, divided by the number of tokens from the later neighbour to the end of the path.
Removing the checkpoint with the lowest worth repeatedly leaves gaps that grow with the distance
from the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

NEWEST = 4
"""Number of checkpoints at a path's end that always stay: those of two turns with two messages
each.
"""

FEWEST = 8
"""Number of checkpoints that each path may have, whatever their size."""

BRANCH_WEIGHT = 8.0
"""Factor on the worth of a position where paths branch, because later paths branch there too."""

BUDGET_SHARE = 0.5
"""Share of a tier's bytes that all checkpoints together may take."""

PATH_SHARE = 1 / 64
"""Share of a tier's bytes that one path's checkpoints may take beyond what its length allows."""


def allowed(kv_bytes: int, checkpoint_bytes: int, limit: int) -> int:
    """Return the bytes that the checkpoints of one path may take in a tier of `limit` bytes."""
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
    """Choose which checkpoints of a path to drop so that at most `most` are left.

    `positions`: in tokens, ascending. `kept`: those that must stay. `parted`: those where other
    paths branch, which count as worth more. `worth`: only checkpoints worth less than this are
    dropped, even if more than `most` are then left. The first of `positions` and the last 4 always
    stay.
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
