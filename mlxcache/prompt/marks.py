"""Token positions in a prompt at which a checkpoint is useful, the ends of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mlxcache.errors import MlxcacheError
from mlxcache.prompt.incremental import ControlTokenFinder, Tokenised
from mlxcache.prompt.renderer import Renderer
from mlxcache.prompt.template import (
    A2,
    END,
    LONG_ID,
    NAME,
    R2,
    S2,
    U2,
    A,
    Message,
    R,
    S,
    U,
    message_of,
)

MARK_DISTANCE = 8
"""Least distance of two marks in tokens; a closer checkpoint would save too little computing."""


def learn_openers(renderer: Renderer, finder: ControlTokenFinder) -> frozenset[int]:
    """Return the ids of the control tokens with which the template opens a message.

    Of several between two messages, that is the first one of the generation prompt, else the last.
    """
    prompt = renderer.generation_prompt()
    first = next((finder.id_of(match) for match in finder.find_all(prompt)), None)
    openers: set[int] = set()
    for words, messages, tools in _conversations():
        try:
            text = renderer.probe(messages, tools=tools)
        except MlxcacheError:
            continue
        for before, after in pairwise(words):
            start, end = text.find(before), text.find(after)
            if not 0 <= start < end:
                continue
            found = [finder.id_of(match) for match in finder.find_all(text[start:end])]
            if found:
                openers.add(first if first in found and first is not None else found[-1])
    return frozenset(openers)


def learn_closer(renderer: Renderer, finder: ControlTokenFinder) -> str:
    """Return the text of the control token with which the template ends a reply, or ""."""
    words = (("user", U), ("assistant", A), ("user", END))
    try:
        text = renderer.probe([message_of(role, word) for role, word in words], tools=False)
    except MlxcacheError:
        return ""
    start, end = text.find(A), text.find(END)
    found = finder.find_all(text, start, end) if 0 <= start < end else []
    return found[0].group() if found else ""


def _conversations() -> list[tuple[tuple[str, ...], list[Message], bool]]:
    def call(number: int) -> Message:
        function = {"name": NAME, "arguments": {}}
        return {"id": f"{LONG_ID}{number}", "type": "function", "function": function}

    def result(number: int, text: str) -> Message:
        return message_of("tool", text) | {"tool_call_id": f"{LONG_ID}{number}"}

    user, reply, end = message_of("user", U), message_of("assistant", A), message_of("user", END)
    turns = [message_of("system", S), user, reply, message_of("user", U2)]
    calls = message_of("assistant", A2) | {"tool_calls": [call(1), call(2)]}
    return [
        ((S, U, A, U2), turns, False),
        ((S, U, A, U2), turns, True),
        ((U, S2, A), [user, message_of("system", S2), reply, end], False),
        ((U, A2, R, R2, A), [user, calls, result(1, R), result(2, R2), reply, end], True),
    ]


def find_marks(prompt: Tokenised, openers: frozenset[int], generation_at: int) -> tuple[int, ...]:
    """Return the token positions at which messages and the generation prompt start, ascending.

    Position 0, the prompt's length, and positions among the control tokens that begin the text are
    left out, and those too near to the one before or to the generation prompt.
    """
    ids = prompt.ids
    found = prompt.at[np.isin(ids[prompt.at], list(openers))].tolist() if openers else []
    lead = 0
    while lead < len(prompt.at) and prompt.at[lead] == lead:
        lead += 1
    kept: list[int] = []
    for position in found:
        if position >= max(lead, 1) and (not kept or position >= kept[-1] + MARK_DISTANCE):
            kept.append(position)
    if 0 < generation_at < len(ids):
        kept = [p for p in kept if p + MARK_DISTANCE <= generation_at] + [generation_at]
    return tuple(p for p in kept if p < len(ids))


def keep_positions(
    keeps: Sequence[tuple[int, float]], placed: Sequence[int], breakpoint: int | None
) -> tuple[tuple[int, float], ...]:
    """Convert a client's keep hints, (leading messages, seconds), to (token position, seconds).

    0 leading messages stand for tools and system prompt, which end at the first mark, unless it is
    the only one. Any other hint ends at the cache breakpoint, or at the last mark.
    """
    head = placed[0] if len(placed) > 1 else 0
    rest = breakpoint if breakpoint is not None else next(iter(placed[-1:]), 0)
    found = ((rest if leading else head, seconds) for leading, seconds in keeps)
    return tuple((position, seconds) for position, seconds in found if position)
