"""The grid on which runs are shared: names of objects, and the search for those of a prompt.

A prompt is divided into cells of a fixed number of tokens, counted from token 0. An object of a run
is named after the digest of a prefix of whole blocks, its end; it holds the KV from the start of
the cell that contains its last block. It may hold up to 63 tokens beyond its end, those of an
incomplete block. A whole cell is named after the cell's end, the tail of a turn after the turn's
last whole block. So the names depend on token ids only, and two servers that computed the same
prompt agree on them. Pure functions.
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
    """Return the tokens of a cell: the largest power of two of blocks within `CELL_BYTES`.

    At least one block, and at most `CELL_TOKENS`. `bytes_per_token`: those of all layers' KV.
    """
    tokens = BLOCK
    while tokens < CELL_TOKENS and 2 * tokens * bytes_per_token <= CELL_BYTES:
        tokens *= 2
    return tokens


def cell_start(end: int, cell: int) -> int:
    """Return the first token of an object of a run that is named after the prefix of `end` tokens.

    `cell`: tokens of a cell.
    """
    return (end - 1) // cell * cell


def run_name(chain: Chain, end: int) -> str:
    """Return the name of the object of a run named after the first `end` tokens of the chain.

    `end` is a positive multiple of the block size.
    """
    return f"{VERSION}/{chain.namespace}/run/{chain.whole[end // BLOCK].hex()}"


def checkpoint_prefix(chain: Chain, position: int, cell: int) -> str:
    """Return the beginning of the names of all checkpoints in the cell of `position`.

    They are those after as many tokens as `position` and in the same cell, of prompts with the same
    tokens before the cell. `cell`: tokens of a cell.
    """
    start = chain.whole[position // cell * cell // BLOCK]
    return f"{VERSION}/{chain.namespace}/ckpt/{start.hex()}/"


def checkpoint_name(chain: Chain, position: int, cell: int) -> str:
    """Return the name of the checkpoint after the first `position` tokens of the chain."""
    return f"{checkpoint_prefix(chain, position, cell)}{position}-{chain.at(position).hex()}"


def checkpoint_positions(chain: Chain, names: Sequence[str], most: int) -> list[int]:
    """Return the positions, up to `most`, of those of `names` that are checkpoints of the chain.

    `names`: names of objects, or the parts of them after the last slash. Other names are ignored.
    The positions are ascending.
    """
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
    """Return the positions, ascending, at which the tail of a turn may end after cell `start`.

    `start`: end of the last whole cell that was found. `known`: tokens that are known without a
    tail. `length`: tokens of the prompt. `cell`: tokens of a cell.
    """
    first = max(start, known // BLOCK * BLOCK) + BLOCK
    return list(range(first, min(length // BLOCK * BLOCK, start + cell - BLOCK) + 1, BLOCK))


def find_last(low: int, high: int, exist: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Return the last number of [low, high] that exists, if all numbers below it exist too.

    `low` is known to exist. `exist(numbers)` tells of each number whether it exists; it is called
    with at most `PROBES` numbers at a time, about log(high - low) / log(PROBES) times.
    """
    while low < high:
        step = -(-(high - low) // PROBES)
        probes = [*range(low + step, high, step), high]
        held = exist(probes)
        count = next((n for n, one in enumerate(held) if not one), len(probes))
        low = probes[count - 1] if count else low
        high = probes[count] - 1 if count < len(probes) else high
    return low
