"""Check that warm and restored replies equal cold ones, in the model's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mlxcache.bench.inside import Inside, drained
from mlxcache.bench.prove.findings import Findings
from mlxcache.bench.prove.scale import Scale
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.model.own_time import rounding
from mlxcache.types import Finished, Text, TokenLogprob, Tokens, join_ids, token_ids

TITLE = "Difference of log-probabilities from cold"
TOKEN_IDS = 256
"""Exclusive maximum of the random token ids."""

TAIL, REPLY, TOP = 24, 24, 20
LEAST_TOLERANCE = 0.125
"""Minimum tolerance: two units in the last place of a bfloat16 between 8 and 16."""

TOLERANCE = 2.0
"""Largest accepted difference, in multiples of mlx-lm's own when a prompt is fed in two ways."""

WARM, BESIDE, RESTORED = "warm", "warm beside three others", "restored"
ROWS = 4


class Unequal(Exception):
    """Error raised if a reply differs from the correct one, or if comparing it proves nothing.

    It proves nothing if the reply made no use of what is checked, such as cached tokens.
    """


@dataclass(frozen=True, slots=True)
class Heard:
    """A reply: each token with its likeliest alternatives, and the event that ended it."""

    tokens: Sequence[TokenLogprob]
    last: Finished


def random_ids(count: int, seed: int) -> Tokens:
    """Return `count` random token ids that every vocabulary has."""
    return token_ids(np.random.default_rng(seed).integers(0, TOKEN_IDS, count, np.int32))


async def matrix(inside: Inside, scale: Scale, found: Findings) -> None:
    """Compare replies that use the cache in three ways with the cold reply to the same prompt.

    The ways: from RAM, from RAM beside other requests, and restored from disk. Does so for each
    prompt length in `scale.equal`, and adds the largest difference of log-probabilities of each
    comparison to `found`. Raises Unequal at the end if a difference is above the tolerance or the
    tokens do not agree (see `compare`), and at once if a reply reused no tokens.
    """
    wrong: list[str] = []
    for length in scale.equal:
        ids = random_ids(length + TAIL, seed=length)
        noise = await rounding_of(inside, ids)
        tolerance = tolerance_for(noise)
        row = f"{length:,} tokens"
        found.add(TITLE, row, "mlx-lm's own rounding", "", noise)
        found.add(TITLE, row, "tolerance", "", tolerance)
        await inside.clear()
        cold = await hear(inside, ids)
        for way in (WARM, BESIDE, RESTORED):
            heard = await _after(inside, ids, way)
            _check_reuse(heard, way)
            apart, same = compare(cold.tokens, heard.tokens, tolerance)
            found.add(TITLE, row, way, "", apart)
            if apart > tolerance or not same:
                wrong.append(f"{way} at {row}: {apart:.3f} apart, tolerance {tolerance:.3f}")
    if wrong:
        raise Unequal("; ".join(wrong))


async def rounding_of(inside: Inside, ids: Tokens) -> float:
    """Return the largest difference of mlx-lm's log-probabilities between two ways to feed `ids`.

    They are those of the token after `ids`, of the whole vocabulary. The second way has one more
    cut between two passes, before the last `TAIL` tokens, so the difference is due to rounding
    alone.
    """
    return await inside.engine.call(partial(_noise, ids))


def tolerance_for(noise: float) -> float:
    """Return the largest accepted difference of log-probabilities.

    `noise`: the difference that is due to rounding alone, a result of `rounding_of`.
    """
    return max(LEAST_TOLERANCE, TOLERANCE * noise)


def _noise(ids: Tokens, runtime: ModelRuntime) -> float:
    return rounding(runtime.loaded.model, ids, len(ids) - TAIL)


async def _after(inside: Inside, ids: Tokens, way: str) -> Heard:
    """Cache the KV of all but the last `TAIL` tokens of `ids`, then reply to all of `ids`.

    With `way` `RESTORED`, that KV is read from disk, otherwise from RAM. With `BESIDE`, other
    requests run at the same time as the reply.
    """
    await inside.clear()
    await drained(await inside.ask(ids[:-TAIL], 1))
    if way == RESTORED:
        await inside.written()
        await inside.forget()
    if way != BESIDE:
        return await hear(inside, ids)
    others = [join_ids(ids[:-TAIL], ids[-TAIL:][::-1], ids[:row]) for row in range(1, ROWS)]
    streams = [await inside.ask(other, REPLY) for other in others]
    heard = await hear(inside, ids)
    for stream in streams:
        await drained(stream)
    return heard


def _check_reuse(heard: Heard, way: str) -> None:
    """Raise Unequal if the reply reused no tokens, because comparing it would then prove nothing.

    `way` is as in `_after`: with `RESTORED`, tokens must have come from disk.
    """
    if not heard.last.cached_tokens or (way == RESTORED and not heard.last.restored_tokens):
        raise Unequal(f"{way}: no token of {heard.last.prompt_tokens} was reused")


async def hear(inside: Inside, ids: Tokens) -> Heard:
    """Generate a greedy reply of at most `REPLY` tokens to the prompt `ids`, and return it.

    Each of its tokens has the `TOP` likeliest tokens at that place, with their log-probabilities.
    Raises MlxcacheError if the request fails.
    """
    stream = await inside.ask(ids, REPLY, top=TOP)
    tokens: list[TokenLogprob] = []
    async for event in stream:
        if isinstance(event, Text):
            tokens += event.logprobs
        elif isinstance(event, Finished):
            return Heard(tokens, event)
    raise ValueError("a reply ended without a Finished event")


def compare(
    cold: Sequence[TokenLogprob], other: Sequence[TokenLogprob], tolerance: float
) -> tuple[float, bool]:
    """Return the largest difference of log-probabilities between replies, and True if they agree.

    They agree if their tokens are equal, or if these first differ where the log-probabilities of
    the two likeliest tokens of `cold` are at most `tolerance` apart. Nothing after that place is
    compared, because the contexts differ.
    """
    apart = 0.0
    for mine, theirs in zip(cold, other, strict=False):
        known = {id: logprob for _, id, logprob in theirs.top}
        both = [abs(logprob - known[id]) for _, id, logprob in mine.top if id in known]
        apart = max([apart, *both])
        if mine.token_id != theirs.token_id:
            close = mine.top[0][2] - mine.top[1][2] <= tolerance
            return apart, close
    return apart, len(cold) == len(other)
