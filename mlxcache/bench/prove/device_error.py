"""Check of replies on a device that fails unnoticed: each must be correct or end in an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlxcache.bench.device_faults import ERRORS, FailingDevice, failing
from mlxcache.bench.inside import Inside, running_inside
from mlxcache.bench.prove import equality
from mlxcache.bench.prove.equality import Heard, Unequal
from mlxcache.bench.prove.findings import Findings
from mlxcache.bench.prove.scale import Scale
from mlxcache.errors import GenerationFailed
from mlxcache.model.load import Loaded
from mlxcache.types import Tokens, join_ids

TITLE = "Injected device errors"
PROMPT, MORE = 300, 16
"""Tokens of the prompt, and tokens appended to it after an error."""


@dataclass(slots=True)
class Outcomes:
    """Counts of replies by outcome: right, failed with an error, or wrong.

    `apart` is the largest difference of log-probabilities from the correct reply, and `tolerance`
    the largest that is accepted. `wrong` describes each wrong reply.
    """

    tolerance: float
    right: int = 0
    failed: int = 0
    apart: float = 0.0
    wrong: list[str] = field(default_factory=list)


async def device_error(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Check replies to one prompt while a different evaluation of MLX fails in each.

    About 4 * `scale.runs` requests are made, each with an empty cache. After each, the same prompt
    with more tokens is sent, during which nothing fails; a wrong reply to it would show that wrong
    KV is left in the cache. All replies must equal those with an empty cache and no failure, or end
    in an error. `model` is the model's folder, `folder` gets the cache, and `found` the figures.
    Raises Unequal after all replies if one is wrong, and ValueError if no evaluation failed.
    """
    picked: set[int] = set()
    on = FailingDevice(picked.__contains__)

    def watched(loaded: Loaded) -> Loaded:
        return replace(loaded, model=on.watch(loaded.model))

    injected = 0
    with failing(on):
        async with running_inside(model, folder, "auto", watched) as inside:
            ids = equality.random_ids(PROMPT, seed=5)
            more = join_ids(ids, ids[:MORE])
            noise = await equality.rounding_of(inside, more)
            outcomes = Outcomes(equality.tolerance_for(noise))
            cold_more = await _cold(inside, more)
            before = on.evaluations
            cold = await _cold(inside, ids)
            for at in _spread(on.evaluations - before, 4 * scale.runs):
                await inside.clear()
                failures = on.failures
                picked.add(on.evaluations + at)
                await _ask(inside, ids, cold, outcomes, f"evaluation {at} fails")
                picked.clear()
                injected += on.failures - failures
                await _ask(inside, more, cold_more, outcomes, f"after evaluation {at}")
    if not injected:
        raise ValueError("no evaluation failed, so the check proves nothing")
    row = f"{PROMPT} tokens"
    found.add(TITLE, row, "errors", "", injected)
    found.add(TITLE, row, "right replies", "", outcomes.right)
    found.add(TITLE, row, "replies that ended in an error", "", outcomes.failed)
    found.add(TITLE, row, "wrong replies", "", len(outcomes.wrong))
    found.add(TITLE, row, "log-probabilities apart", "", outcomes.apart)
    found.add(TITLE, row, "tolerance", "", outcomes.tolerance)
    found.notes.append(f"This process injects the errors, with a message of Metal: {ERRORS[0]}")
    if outcomes.wrong:
        raise Unequal("; ".join(outcomes.wrong))


async def _cold(inside: Inside, ids: Tokens) -> Heard:
    await inside.clear()
    return await equality.hear(inside, ids)


async def _ask(inside: Inside, ids: Tokens, right: Heard, outcomes: Outcomes, what: str) -> None:
    """Request one reply to `ids`, compare it with the correct reply `right`, and count the outcome.

    `what` describes the request, for the text recorded if the reply is wrong.
    """
    try:
        heard = await equality.hear(inside, ids)
    except GenerationFailed:
        outcomes.failed += 1
        return
    apart, same = equality.compare(right.tokens, heard.tokens, outcomes.tolerance)
    outcomes.apart = max(outcomes.apart, apart)
    if apart > outcomes.tolerance or not same:
        outcomes.wrong.append(f"{what}: {apart:.3f} apart, tolerance {outcomes.tolerance:.3f}")
    else:
        outcomes.right += 1


def _spread(last: int, count: int) -> Sequence[int]:
    """Return about `count` evenly spaced numbers from 1 to `last`, both included."""
    return sorted({int(one) for one in np.linspace(1, max(1, last), count)})
