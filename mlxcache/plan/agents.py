"""Made traces of coding agents, drawn from the distributions of real sessions.

The numbers are those of forty sessions of Claude Code, 3,780 requests, from
https://github.com/callanjfox/kv-cache-tester (Apache-2.0). `python -m tests.proofs.agent_numbers
FOLDER` computes them.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence

from mlxcache.plan.trace import Ids, Part, Request, Trace, path_of

BLOCK = 64

CONTEXT = 160_000
"""Tokens at which conversations are compacted if nothing else is asked for."""

HEAD = 15_168
"""Tokens of tools and system prompt, the same in all conversations."""

SESSIONS = 3
"""Sessions of each user, one after another: about a day's."""

Quantiles = Sequence[float]
"""Values at the shares `AT`."""

AT = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

TURNS: Quantiles = (10, 26, 58, 72, 102, 200, 303, 317)
FIRST: Quantiles = (411, 642, 2812, 3774, 5703, 6680, 12922, 15104)
ADDED: Quantiles = (0, 2, 56, 349, 1359, 3397, 14739, 77613)
REPLIED: Quantiles = (6, 107, 139, 209, 371, 753, 3855, 16681)
PAUSE_S: Quantiles = (0, 4, 5, 10, 50, 256, 1977, 67434)
"""Requests of a session; tokens of its first message, of what a turn adds to the reply before it,
and of a reply; seconds from a reply to the next request.
"""

CHANGED, LOST = 178 / 3740, (108, 185, 233, 406, 14735, 87478, 146884, 155747)
"""Share of turns that change an earlier message, and tokens from there to the end of the path."""

NOT_SENT = 431 / 3740
"""Share of turns whose prompt does not have the reply before it as it was generated."""

SUMMARY: Quantiles = (6852, 9803, 12123, 21968, 29378, 38342, 62732, 66533)
"""Tokens behind the head after a compaction."""

SUBAGENTS, SUBAGENT_TURNS, SUBAGENT_FIRST = 1 / 3740, 11, 16_885
"""Share of turns that begin a sub-agent, its requests, and the tokens of its first prompt."""


def agents_trace(users: int, context: int, *, sessions: int = SESSIONS, seed: int = 0) -> Trace:
    """Make a trace of `users` users, each with `sessions` sessions one after another.

    A conversation that would grow beyond `context` tokens is compacted.
    """
    ids, rng = Ids(), random.Random(seed)
    made: list[Request] = []
    for number in range(sessions):
        for user in range(users):
            made += _Session(f"{user}/{number}", context, ids, rng, len(made)).requests()
    return Trace(tuple(made), "agents", BLOCK)


class _Session:
    """Maker of one session's requests, which are the trace's from position `first` on."""

    def __init__(self, name: str, context: int, ids: Ids, rng: random.Random, first: int):
        self._name = name
        self._context = context
        self._ids = ids
        self._rng = rng
        self._first = first
        self._head = min(HEAD, context // 4)
        self._made: list[Request] = []

    def requests(self) -> list[Request]:
        parts = [(self._ids.of("head"), self._head)]
        self._add(parts, self._drawn(FIRST, self._context // 8), (), self._head)
        for _ in range(int(self._drawn(TURNS)) - 1):
            after: tuple[int, ...] = (self._first + len(self._made) - 1,)
            if self._rng.random() < SUBAGENTS:
                after = (self._subagent(after),)
            self._add(parts, self._drawn(ADDED), after, self._head)
        return self._made

    def _subagent(self, after: tuple[int, ...]) -> int:
        """Add the requests of a sub-agent; return the position of its last one."""
        parts: list[Part] = []
        for turn in range(SUBAGENT_TURNS):
            new = self._drawn(ADDED) if turn else min(SUBAGENT_FIRST, self._context // 8)
            self._add(parts, new, after, 0)
            after = (self._first + len(self._made) - 1,)
        return after[0]

    def _add(self, parts: list[Part], new: int, after: tuple[int, ...], head: int) -> None:
        """Add a request that continues `parts` by `new` tokens, and its reply to both."""
        reply = self._drawn(REPLIED, self._context // 16)
        if after and head:
            new += self._changed(parts)
        if sum(tokens for _, tokens in parts) + new + reply > self._context:
            del parts[1 if head else 0 :]
            new = self._drawn(SUMMARY, self._context // 4)
        parts.append((self._ids.new(), max(1, new)))
        prompt = len(parts)
        parts.append((self._ids.new(), reply))
        key = sum(tokens for _, tokens in parts[:2])
        delay = self._drawn(PAUSE_S) if after else 0.0
        self._made.append(
            Request(0.0, self._name, *path_of(parts), prompt, after, delay, key=key, head=head)
        )

    def _changed(self, parts: list[Part]) -> int:
        """Remove from `parts` what the next prompt does not have; return the tokens of the rest."""
        chance = self._rng.random()
        if chance < NOT_SENT:
            return parts.pop()[1]
        if chance < NOT_SENT + CHANGED:
            lost = 0
            wanted = self._drawn(LOST)
            while len(parts) > 2 and lost < wanted:
                lost += parts.pop()[1]
            return lost
        return 0

    def _drawn(self, quantiles: Quantiles, most: int = 1 << 40) -> int:
        share = self._rng.random()
        at = min(bisect_right(AT, share), len(AT) - 1)
        low, high = quantiles[at - 1], quantiles[at]
        within = (share - AT[at - 1]) / (AT[at] - AT[at - 1])
        return min(most, round(low + (high - low) * within**2))
