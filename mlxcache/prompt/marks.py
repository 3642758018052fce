"""Marks: token positions in a prompt at which a checkpoint is useful, the ends of its messages.

The control tokens that open and close a message are learned from the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mlxcache.errors import MlxcacheError
from mlxcache.prompt.incremental import ControlTokenFinder, Tokenised
from mlxcache.prompt.renderer import Renderer
from mlxcache.prompt.template import Message
from mlxcache.prompt.traits import A2, END, LONG_ID, NAME, R2, S2, U2, A, R, S, U

MARK_DISTANCE = 8
"""Least distance of two marks in tokens; a closer checkpoint would save too little computing."""


def learn_openers(renderer: Renderer, finder: ControlTokenFinder) -> frozenset[int]:
    """Return the ids of the control tokens with which the template opens a message.

    Several control tokens can be between the texts of two messages. The one that opens the second
    message is the first control token of the generation prompt, if it is among them, else the last
    of them. The result is empty if there are no control tokens between messages.
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
    """Return the text of the control token with which the template ends a reply.

    It is empty if there is none.
    """
    words = ((U, "user"), (A, "assistant"), (END, "user"))
    try:
        messages: list[Message] = [{"role": role, "content": word} for word, role in words]
        text = renderer.probe(messages, tools=False)
    except MlxcacheError:
        return ""
    start, end = text.find(A), text.find(END)
    found = finder.find_all(text, start, end) if 0 <= start < end else []
    return found[0].group() if found else ""


def _conversations() -> list[tuple[tuple[str, ...], list[Message], bool]]:
    """Return test conversations, each as (words, messages, whether to render an example tool too).

    `words`: texts of consecutive messages, by which these are found in the rendered conversation.
    """

    def call(number: int) -> Message:
        function = {"name": NAME, "arguments": {}}
        return {"id": f"{LONG_ID}{number}", "type": "function", "function": function}

    def result(number: int, text: str) -> Message:
        return {"role": "tool", "content": text, "tool_call_id": f"{LONG_ID}{number}"}

    user, reply = {"role": "user", "content": U}, {"role": "assistant", "content": A}
    system, again = {"role": "system", "content": S}, {"role": "user", "content": U2}
    calls = {"role": "assistant", "content": A2, "tool_calls": [call(1), call(2)]}
    last: Message = {"role": "system", "content": S2}
    end = {"role": "user", "content": END}
    return [
        ((S, U, A, U2), [system, user, reply, again], False),
        ((S, U, A, U2), [system, user, reply, again], True),
        ((U, S2, A), [user, last, reply, end], False),
        ((U, A2, R, R2, A), [user, calls, result(1, R), result(2, R2), reply, end], True),
    ]


def find_marks(prompt: Tokenised, openers: frozenset[int], generation_at: int) -> tuple[int, ...]:
    """Return the token positions at which messages and the generation prompt start, ascending.

    Position 0, the prompt's length, and positions among the control tokens that begin the text are
    left out. So is a position fewer than `MARK_DISTANCE` tokens after the one before it in the
    result, or before the generation prompt. `openers`: ids of tokens that open a message.
    `generation_at`: token position at which the generation prompt starts.
    """
    ids = prompt.ids
    opens = np.isin(ids[prompt.at], list(openers)) if openers else np.zeros(0, dtype=bool)
    found = prompt.at[opens].tolist() if openers else []
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

    0 leading messages stand for tools and system prompt, which end at the first mark. Any other
    hint ends at `breakpoint`, the token position of the cache breakpoint, or at the last mark if
    that is None. Hints without such a position are left out; a single mark is not taken for the end
    of the system prompt. `placed`: token positions of the marks, ascending.
    """
    head = placed[0] if len(placed) > 1 else 0
    rest = breakpoint if breakpoint is not None else next(iter(placed[-1:]), 0)
    found = ((rest if leading else head, seconds) for leading, seconds in keeps)
    return tuple((position, seconds) for position, seconds in found if position)
