"""Replies compared with cold ones, in the model's own dtype, and the speed of guessing.

Compared are replies from the cache, on a device that fails unnoticed, and with guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.bench.context import Scale
from mlxcache.bench.device_faults import ERRORS, FailingDevice, failing
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.own_engine import GREEDY, Inside, drained, running_inside
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.errors import GenerationFailed
from mlxcache.guess.rule import LENGTHS, PassCosts
from mlxcache.model.load import Loaded
from mlxcache.scheduling.short_passes import MOST_EQUAL, PASSES_FAR, PASSES_NEAR
from mlxcache.scheduling.speculation import HeadsOfModel, Speculation
from mlxcache.types import (
    Finished,
    RequestRecord,
    Sampling,
    TokenLogprob,
    Tokens,
    join_ids,
    token_ids,
)

TITLE = "Difference of log-probabilities from cold"
TOKEN_IDS = 256  # exclusive maximum of the random token ids

TAIL, REPLY, TOP = 24, 24, 20
LEAST_TOLERANCE = 0.125
"""Minimum tolerance: two units in the last place of a bfloat16 between 8 and 16."""

TOLERANCE = 2.0
"""Largest accepted difference, in multiples of mlx-lm's own when a prompt is fed in two ways."""

WARM, BESIDE, RESTORED = "warm", "warm beside three others", "restored"
ROWS = 4

Said = Sequence[TokenLogprob]
"""Tokens of a reply, each with its likeliest alternatives."""


class Unequal(Exception):
    """Error raised if a reply differs from the correct one, or if comparing it proves nothing."""


def random_ids(count: int, seed: int) -> Tokens:
    return token_ids(np.random.default_rng(seed).integers(0, TOKEN_IDS, count, np.int32))


def compare(right: Said, other: Said, tolerance: float) -> tuple[float, bool, bool]:
    """Return the largest difference of log-probabilities, and whether two replies agree and part.

    They agree if their tokens are equal, or first differ where the two likeliest of `right` are at
    most `tolerance` apart. Nothing after that place is compared, because the contexts differ.
    """
    apart = 0.0
    for mine, theirs in zip(right, other, strict=False):
        known = {id: logprob for _, id, logprob in theirs.top}
        both = [abs(logprob - known[id]) for _, id, logprob in mine.top if id in known]
        apart = max([apart, *both])
        if mine.token_id != theirs.token_id:
            return apart, mine.top[0][2] - mine.top[1][2] <= tolerance, True
    return apart, len(right) == len(other), False


class Comparison:
    def __init__(self) -> None:
        self.wrong: list[str] = []

    def add(self, right: Said, other: Said, tolerance: float, what: str) -> tuple[float, bool]:
        apart, same, parted = compare(right, other, tolerance)
        if apart > tolerance or not same:
            self.wrong.append(f"{what}: {apart:.3f} apart, tolerance {tolerance:.3f}")
        return apart, parted

    def end(self) -> None:
        if self.wrong:
            raise Unequal("; ".join(self.wrong))


def rounding(model: Any, tokens: Tokens, split: int) -> float:
    """Measure how much the last log-probabilities change if a prompt is fed in other passes."""
    ends = [list(range(2048, len(tokens), 2048)), [*range(2048, split, 2048), split]]
    rows = []
    for cuts in ends:
        cache = make_prompt_cache(model)
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            logits = model(mx.array(tokens[start:end])[None], cache=cache)[0, -1]
            mx.eval(logits, [layer.state for layer in cache])
        rows.append(logits - mx.logsumexp(logits))
    first, second = (np.array(row.astype(mx.float32)) for row in rows)
    return float(np.abs(first - second).max())


async def tolerance_of(inside: Inside, ids: Tokens) -> tuple[float, float]:
    """Return mlx-lm's own rounding, and the difference that is tolerated because of it.

    The rounding is the largest difference of its log-probabilities between two ways to feed `ids`,
    of which the second has one more cut between two passes.
    """

    def noise(runtime: ModelRuntime) -> float:
        return rounding(runtime.loaded.model, ids, len(ids) - TAIL)

    found = await inside.engine.call(noise)
    return found, max(LEAST_TOLERANCE, TOLERANCE * found)


async def hear(inside: Inside, ids: Tokens) -> tuple[Said, Finished]:
    return await drained(await inside.ask(ids, REPLY, top=TOP))


# -- from the cache --------------------------------------------------------------------------------


async def equality(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Compare replies that use the cache in three ways with the cold reply to the same prompt.

    Raises Unequal at the end if a reply differs, and at once if it reused no tokens.
    """
    compared = Comparison()
    async with running_inside(model, folder, "auto") as inside:
        for length in scale.equal:
            ids, row = random_ids(length + TAIL, seed=length), f"{length:,} tokens"
            noise, tolerance = await tolerance_of(inside, ids)
            found.add(TITLE, row, "mlx-lm's own rounding", "", noise)
            found.add(TITLE, row, "tolerance", "", tolerance)
            await inside.clear()
            cold, _ = await hear(inside, ids)
            for way in (WARM, BESIDE, RESTORED):
                said, last = await _after(inside, ids, way)
                if not last.cached_tokens or (way == RESTORED and not last.restored_tokens):
                    raise Unequal(f"{way}: no token of {last.prompt_tokens} was reused")
                apart, _ = compared.add(cold, said, tolerance, f"{way} at {row}")
                found.add(TITLE, row, way, "", apart)
    compared.end()


async def _after(inside: Inside, ids: Tokens, way: str) -> tuple[Said, Finished]:
    """Cache the KV of all but the last `TAIL` tokens of `ids`, then reply to all of `ids`."""
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


# -- on a failing device ---------------------------------------------------------------------------

ERRORS_TITLE = "Injected device errors"
PROMPT, MORE = 300, 16  # tokens of the prompt, and tokens appended to it after an error


async def device_error(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Check replies to one prompt while a different evaluation of MLX fails in each.

    After each, the same prompt with more tokens is sent, during which nothing fails; a wrong reply
    to it would show that wrong KV is left in the cache. Raises Unequal after all replies if one
    neither is right nor ends in an error, and ValueError if no evaluation failed.
    """
    picked: set[int] = set()
    on = FailingDevice(picked.__contains__)
    compared, apart = Comparison(), [0.0]
    failed = injected = 0

    def watched(loaded: Loaded) -> Loaded:
        return replace(loaded, model=on.watch(loaded.model))

    async def ask(ids: Tokens, right: Said, what: str) -> None:
        nonlocal failed
        try:
            said, _ = await hear(inside, ids)
        except GenerationFailed:
            failed += 1
        else:
            apart.append(compared.add(right, said, tolerance, what)[0])

    with failing(on):
        async with running_inside(model, folder, "auto", watched) as inside:
            ids = random_ids(PROMPT, seed=5)
            more = join_ids(ids, ids[:MORE])
            _, tolerance = await tolerance_of(inside, more)
            await inside.clear()
            cold_more, _ = await hear(inside, more)
            before = on.evaluations
            await inside.clear()
            cold, _ = await hear(inside, ids)
            for at in spread(on.evaluations - before, 4 * scale.runs):
                await inside.clear()
                failures = on.failures
                picked.add(on.evaluations + at)
                await ask(ids, cold, f"evaluation {at} fails")
                picked.clear()
                injected += on.failures - failures
                await ask(more, cold_more, f"after evaluation {at}")
    if not injected:
        raise ValueError("no evaluation failed, so the check proves nothing")
    row, wrong = f"{PROMPT} tokens", len(compared.wrong)
    for column, value in (
        ("errors", injected),
        ("right replies", len(apart) - 1 - wrong),
        ("replies that ended in an error", failed),
        ("wrong replies", wrong),
        ("log-probabilities apart", max(apart)),
        ("tolerance", tolerance),
    ):
        found.add(ERRORS_TITLE, row, column, "", value)
    found.notes.append(f"This process injects the errors, with a message of Metal: {ERRORS[0]}")
    compared.end()


def spread(last: int, count: int) -> Sequence[int]:
    return sorted({int(one) for one in np.linspace(1, max(1, last), count)})


# -- with guesses ----------------------------------------------------------------------------------

COSTS = "Cost of a pass, in passes over one token"
EQUAL = "Passes that give the bits of passes over one token"
SAME = "Greedy text with guesses, compared with the text without"
SPEED = "Speed with guesses"
DRAFTS = "Drafts of the model's heads"
SHOWN = (2, 4, 8, 12, 16, 32)  # tokens of the passes whose cost is reported

AGAIN, NEW = "text that was said before", "new text"
ALIKE, PARTING = 4, 0.25
"""Replies given before that are nearly the greedy one, and the factor of their temperature."""

LEAST = 0.97  # least speed of new text with guesses, by that without


def free_costs() -> PassCosts:
    """Return costs by which long guesses are checked on any device, even unlikely ones."""
    return PassCosts({1: [(tokens, 1e-6 * (1 + 1e-3 * tokens)) for tokens in LENGTHS]})


async def speculation(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Measure costs of passes, check that guesses change no text, and measure their speed.

    Raises Unequal at the end if a reply differs or if no guess was right, and NotApplicable if
    the model's cache cannot be rewound.
    """
    async with running_inside(model, folder, "auto", speculate="auto") as inside:
        guesses = inside.core.speculation
        if guesses is None:
            raise NotApplicable("this model's cache cannot be rewound: nothing is guessed")
        costs = guesses.costs
        for cached in (PASSES_NEAR, PASSES_FAR):
            row = f"after {cached:,} tokens"
            found.add(COSTS, row, "one token", "s", costs.seconds(cached))
            for tokens in SHOWN:
                found.add(COSTS, row, f"{tokens} tokens", "", costs.at(cached)(tokens))
        for tokens in range(2, MOST_EQUAL + 1):
            found.add(EQUAL, "1 if equal", f"{tokens} tokens", "", float(tokens in guesses.equal))
        compared = await _compare_guessed(inside, guesses, scale, found)
        for run in range(scale.runs):
            await _measure_speed(inside, scale, run, found)
        for source in guesses.sources:
            if isinstance(source, HeadsOfModel):
                _report_heads(source, found)
    ratio = found.tables[SPEED][NEW]["by that without guesses"].median
    short = "a quick run's replies are too short" if scale.quick else None
    found.hold(
        "new text with guesses, by its speed without", ratio, LEAST, least=True, why_not=short
    )
    compared.end()


def _report_heads(heads: HeadsOfModel, found: Findings) -> None:
    """Add the cost of passes that check drafts, and how often all tokens of these were right."""
    for count, chance in enumerate(heads.survival.chances(0, heads.most), 1):
        row = f"{count} tokens"
        found.add(DRAFTS, row, "all right", "%", 100 * chance)
        for cached in (PASSES_NEAR, PASSES_FAR):
            cost = heads.costs.at(cached)(1 + count)
            found.add(DRAFTS, row, f"passes over one token, after {cached:,}", "", cost)


async def _compare_guessed(
    inside: Inside, guesses: Speculation, scale: Scale, found: Findings
) -> Comparison:
    """Compare two greedy replies that use guesses with one that does not.

    Some replies drawn at a low temperature come before the two, so that guesses of the first are
    taken from texts that resemble it but are not equal to it. The second repeats the text of the
    first, so that nearly all its guesses are right; none that is right is a fault too.
    """
    measured, tokens, compared = guesses.costs, scale.reply, Comparison()
    for length in scale.equal:
        ids, row = random_ids(length, seed=length), f"{length:,} tokens"
        _, tolerance = await tolerance_of(inside, ids)
        plain, _ = await _reply(inside, ids, tokens, guess=False, top=True)
        # most tokens drawn, but not all, are the likeliest ones
        margin = median(one.top[0][2] - one.top[1][2] for one in plain)
        temperature = max(1e-3, PARTING * margin)
        await inside.engine.call(lambda _: guesses.set_costs(free_costs()))
        for seed in range(ALIKE):
            sampling = Sampling(temperature=temperature, seed=seed)
            await _reply(inside, ids, tokens, sampling=sampling)
        replies = [await _reply(inside, ids, tokens, top=True) for _ in range(2)]
        await inside.engine.call(lambda _: guesses.set_costs(measured))
        found.add(SAME, row, "tolerance", "", tolerance)
        for name, (said, record) in zip(("first reply", "same reply again"), replies, strict=True):
            apart, ties = compared.add(plain, said, tolerance, f"{name} at {row}")
            found.add(SAME, row, f"{name}: apart", "", apart)
            found.add(SAME, row, f"{name}: parted at a tie", "", float(ties))
            found.add(SAME, row, f"{name}: guessed", "tokens", record.drafted_tokens)
            found.add(SAME, row, f"{name}: right", "tokens", record.accepted_tokens)
        if not record.accepted_tokens:
            compared.wrong.append(f"{row}: no guess was right, so the comparison proves nothing")
    return compared


async def _measure_speed(inside: Inside, scale: Scale, run: int, found: Findings) -> None:
    tokens, sampling = 4 * scale.reply, Sampling(temperature=1.0, seed=run)
    for kind in (NEW, AGAIN):
        ids = random_ids(scale.decode[0], seed=1000 + 2 * run + (kind == AGAIN))
        if kind == AGAIN:
            await _reply(inside, ids, tokens, sampling=sampling)
        speeds = dict[bool, float]()
        for guess in (True, False) if run % 2 else (False, True):
            _, record = await _reply(inside, ids, tokens, guess=guess, sampling=sampling)
            made = record.generated_tokens
            speeds[guess] = made / max(1e-9, record.timing["decode_s"])
            if guess:
                per_pass = made / max(1, made - record.accepted_tokens)
        found.add(SPEED, kind, "without guesses", "tokens/s", speeds[False])
        found.add(SPEED, kind, "with guesses", "tokens/s", speeds[True])
        found.add(SPEED, kind, "by that without guesses", "", speeds[True] / speeds[False])
        found.add(SPEED, kind, "tokens a pass", "", per_pass)


async def _reply(
    inside: Inside,
    ids: Tokens,
    tokens: int,
    *,
    guess: bool = True,
    top: bool = False,
    sampling: Sampling = GREEDY,
) -> tuple[Said, RequestRecord]:
    likeliest = TOP if top else None
    stream = await inside.ask(
        ids, tokens, endless=True, top=likeliest, sampling=sampling, speculate=guess
    )
    said, _ = await drained(stream)
    return said, stream.record
