"""Names of the objects of runs and checkpoints, and the search for those of a prompt.

A prompt is divided into cells of a fixed number of tokens, counted from token 0. The object of a
run holds the KV from the start of a cell up to its end, and is named after the digest of all tokens
up to that end. The end is a multiple of the block size: that of the cell or, for the tail of a turn
in an incomplete cell, that of the turn's last whole block. The object of a tail may also hold up to
63 tokens of an incomplete block after its end. So the names depend on token ids only, and two
servers that computed the same prompt agree on them. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxcache.store.digests import BLOCK, Chain

CELL_BYTES = 32 << 20
"""Most bytes of a cell's KV: large enough for the full bandwidth of object storage."""

CELL_TOKENS = 2048
"""Most tokens of a cell. It bounds the number of places where the tail of a turn may end."""

PROBES = 8
"""Number of cells that are probed at once while the last known one is searched for."""

VERSION = "v1"


def cell_tokens(bytes_per_token: int) -> int:
    """Return the number of tokens of a cell.

    It is the largest whose KV takes at most `CELL_BYTES`, out of one block, two, four and so on up
    to `CELL_TOKENS`; one block if none is. `bytes_per_token`: those of all layers' KV.
    """
    tokens = BLOCK
    while tokens < CELL_TOKENS and 2 * tokens * bytes_per_token <= CELL_BYTES:
        tokens *= 2
    return tokens


def cell_start(end: int, cell: int) -> int:
    return (end - 1) // cell * cell


def run_name(chain: Chain, end: int) -> str:
    return f"{VERSION}/{chain.namespace}/run/{chain.whole[end // BLOCK].hex()}"


def checkpoint_prefix(chain: Chain, position: int, cell: int) -> str:
    start = chain.whole[position // cell * cell // BLOCK]
    return f"{VERSION}/{chain.namespace}/ckpt/{start.hex()}/"


def checkpoint_name(chain: Chain, position: int, cell: int) -> str:
    return f"{checkpoint_prefix(chain, position, cell)}{position}-{chain.at(position).hex()}"


def checkpoint_positions(chain: Chain, names: Sequence[str], most: int) -> list[int]:
    """Return the positions of those of `names` that are checkpoints of the chain, ascending."""
    found = set()
    for name in names:
        position, _, digest = name.rpartition("/")[2].partition("-")
        if not position.isdecimal() or len(position) > 9:
            continue
        at = int(position)
        if 0 < at <= min(most, len(chain.ids)) and chain.at(at).hex() == digest:
            found.add(at)
    return sorted(found)


def tail_ends(start: int, known: int, length: int, cell: int) -> list[int]:
    """Return the positions, ascending and after `known`, at which a tail from `start` may end."""
    first = max(start, known // BLOCK * BLOCK) + BLOCK
    return list(range(first, min(length // BLOCK * BLOCK, start + cell - BLOCK) + 1, BLOCK))


def find_last(low: int, high: int, exist: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Return the last number of [low, high] that exists, if all numbers below it exist too.

    `low` is known to exist. `exist(numbers)` returns for each number whether it exists; it is
    called with at most `PROBES` numbers at a time, about log(high - low) / log(PROBES) times.
    """
    while low < high:
        step = -(-(high - low) // PROBES)
        probes = [*range(low + step, high, step), high]
        held = exist(probes)
        count = next((n for n, one in enumerate(held) if not one), len(probes))
        low = probes[count - 1] if count else low
        high = probes[count] - 1 if count < len(probes) else high
    return low
