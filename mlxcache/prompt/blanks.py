"""White space at the edges of a reply's text blocks, which clients strip, add or replace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxcache.types import TEXTS

SEPARATOR = "\n\n"
"""Text put between two text blocks that have no white space where they meet."""

_RUNS = re.compile(r"(\s+)|\S+")


def join_blocks(blocks: Iterable[str]) -> str:
    """Join text blocks, with a blank line between two that have no white space where they meet.

    Blocks that consist only of white space are left out.
    """
    joined = ""
    for block in blocks:
        if not block.strip():
            continue
        touching = joined and not joined[-1].isspace() and not block[0].isspace()
        joined += SEPARATOR + block if touching else block
    return joined


def equal_blocks(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return whether two texts are equal except for white space at the edges of their blocks.

    `a`, `b`: the blocks of each text. White space inside a block must be equal, unless the other
    text has the edge of a block at that place.
    """
    mine, theirs = _stripped(a), _stripped(b)
    if mine == theirs:
        return True
    if len(mine) <= 1 and len(theirs) <= 1:
        return False
    solid, gaps, edges = _split_blanks(mine)
    other, other_gaps, other_edges = _split_blanks(theirs)
    return solid == other and all(
        gaps.get(at) == other_gaps.get(at)
        for at in gaps.keys() | other_gaps.keys()
        if at not in edges and at not in other_edges
    )


def message_blocks(message: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the text blocks of an assistant message as the client sent them.

    A content that is one text, or missing, is one block. Returns None if the content is not text.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        return None
    blocks = message.get(TEXTS)
    return (content,) if blocks is None else tuple(blocks)


def _stripped(blocks: Iterable[str]) -> list[str]:
    return [text for block in blocks if (text := block.strip())]


def _split_blanks(blocks: Sequence[str]) -> tuple[str, dict[int, str], set[int]]:
    """Separate the white space of blocks from their other characters.

    Returns the other characters as one string, the white space inside blocks by position, and the
    positions at which blocks begin. A position is the number of other characters before it.
    `blocks` have no white space at their ends.
    """
    words: list[str] = []
    gaps: dict[int, str] = {}
    edges: set[int] = set()
    at = 0
    for block in blocks:
        edges.add(at)
        for run in _RUNS.finditer(block):
            if run.group(1):
                gaps[at] = run.group()
            else:
                words.append(run.group())
                at += len(run.group())
    return "".join(words), gaps, edges
