"""Synthetic traces: conversations of coding agents with a common beginning, turns and pauses.

Numbers of tokens are log-normal around medians that are usual for coding agents: tools add much
text, people little, and most turns follow the one before within seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mlxcache.plan.trace import Ids, Request, Trace, path_of

BLOCK = 64

CONTEXT = 100_000
"""Tokens to which conversations grow if nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Shape of the conversations, in tokens and seconds.

    `head`: tools and system prompt, the same in all. `project`: what all conversations of one user
    share after that. `of_tools`: share of the turns that have the result of a tool. The other
    fields are medians. `asked`: new prompt tokens of a turn. `replied`: tokens of a reply.
    `tool_s`, `person_s`: the pause before a turn with the result of a tool, and before one that a
    person writes.
    """

    head: int = 16_000
    project: int = 4_000
    asked: int = 1_200
    replied: int = 300
    tool_s: float = 2.0
    person_s: float = 40.0
    of_tools: float = 0.75


def synthetic_trace(
    users: int, context: int, *, sessions: int = 3, seed: int = 0, agents: Agents | None = None
) -> Trace:
    """Make a trace of `users` users, each with `sessions` conversations one after another.

    Each conversation grows to a random length between half of `context` tokens and all of them. The
    same seed gives the same trace. `agents`: the shape of the conversations; None for that of
    `Agents()`.
    """
    ids, rng = Ids(), random.Random(seed)
    shape = agents or Agents()
    writer = _Writer(shape, rng, ids)
    head = min(shape.head, context // 4)
    project = min(shape.project, context // 8)
    made: list[Request] = []
    for number in range(sessions):
        for user in range(users):
            length = int(context * (0.5 + 0.5 * rng.random()))
            parts = [(ids.of("head"), head), (ids.of(("project", user)), project)]
            made += writer.conversation(f"{user}/{number}", parts, length)
    return Trace(tuple(made), "synthetic", BLOCK)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Maker of random conversations of one shape."""

    shape: Agents
    rng: random.Random
    ids: Ids

    def conversation(
        self, session: str, parts: list[tuple[int, int]], length: int
    ) -> list[Request]:
        """Return the turns of one conversation of at most `length` tokens.

        The first turn is returned even if it is longer. `session`: name of the session. `parts`:
        what the first prompt begins with, as pairs of an id and a number of tokens.
        """
        made: list[Request] = []
        shape, rng, head = self.shape, self.rng, parts[0][1]
        total, key = sum(tokens for _, tokens in parts), 0
        while True:
            asked = _drawn(rng, shape.asked, 1.1)
            replied = _drawn(rng, shape.replied, 0.9)
            if made and total + asked + replied > length:
                return made
            asked = max(8, min(asked, length - total - replied))
            prompt = [*parts, (self.ids.new(), asked)]
            key = key or total + asked
            parts = [*prompt, (self.ids.new(), replied)]
            total += asked + replied
            of_tool = rng.random() < shape.of_tools
            pause = _drawn(rng, shape.tool_s if of_tool else shape.person_s, 0.8, least=0.1)
            path = path_of(parts)
            delay = pause if made else None
            made.append(Request(0.0, session, *path, len(prompt), delay=delay, key=key, head=head))


def _drawn(rng: random.Random, median: float, spread: float, *, least: float = 8) -> int:
    """Draw a log-normal number around `median`, raised to `least` if it is less, and round it.

    `spread`: standard deviation of its logarithm.
    """
    return round(max(least, median * rng.lognormvariate(0.0, spread)))
