"""Measurement of guesses from the conversation: costs of passes, equality of text, and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlxcache.bench.checks import Check
from mlxcache.bench.inside import Inside, NotPlain, running_inside
from mlxcache.bench.prove import equality
from mlxcache.bench.prove.equality import Unequal
from mlxcache.bench.prove.findings import Findings
from mlxcache.bench.prove.scale import Scale
from mlxcache.guess.rule import LENGTHS, PassCosts
from mlxcache.scheduling.pass_costs import FAR, NEAR
from mlxcache.scheduling.speculation import Speculation
from mlxcache.types import Finished, RequestRecord, Sampling, Text, TokenLogprob, Tokens

COSTS = "Cost of a pass, in passes over one token"
SAME = "Greedy text with guesses, compared with the text without"
SPEED = "Speed with guesses"
SHOWN = (2, 4, 8, 12, 16, 32)
"""Tokens of the passes whose cost is reported."""

AGAIN, NEW = "text that was said before", "new text"
ALIKE, PARTING = 4, 0.15
"""Replies given before that are nearly the greedy one, and the factor of their temperature."""

LEAST = 0.97
"""Least speed of new text with guesses, by that without."""


def free_costs() -> PassCosts:
    """Return costs by which a pass over many tokens takes hardly longer than over one token.

    With them long guesses are checked on any device, even unlikely ones.
    """
    return PassCosts({1: [(tokens, 1e-6 * (1 + 1e-3 * tokens)) for tokens in LENGTHS]})


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: its tokens with their likeliest alternatives, and the record of its request.

    `tokens` is empty if no alternatives were asked for.
    """

    tokens: Sequence[TokenLogprob]
    record: RequestRecord

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.record.generated_tokens / max(1e-9, self.record.timing["decode_s"])

    @property
    def per_pass(self) -> float:
        """Tokens per pass of the model."""
        tokens = self.record.generated_tokens
        return tokens / max(1, tokens - self.record.accepted_tokens)


async def speculation(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Measure costs of passes, check that guesses change no text, and measure their speed.

    Adds to `found`: the costs of passes as a server with `--speculate auto` measures them; the
    difference between greedy replies with guesses and without, in the model's own dtype; and the
    speed of replies that were given before and of new ones, with and without guesses. Raises
    Unequal at the end if a reply differs by more than rounding explains (see `equality.compare`) or
    if no guess was right, and NotPlain if the model's cache cannot be rewound, so that nothing is
    guessed.
    """
    async with running_inside(model, folder, "auto", speculate="auto") as inside:
        guesses = inside.core.speculation
        if guesses is None:
            raise NotPlain("this model's cache cannot be rewound: nothing is guessed")
        _add_costs(guesses.costs, found)
        wrong = await _compare(inside, guesses, scale, found)
        for run in range(scale.runs):
            await _measure_speed(inside, scale, run, found)
    ratio = found.figure(SPEED, NEW, "by that without guesses")
    assert ratio is not None
    check = Check("new text with guesses, by its speed without", ratio.median, LEAST, least=True)
    found.hold([check], why_not="a quick run's replies are too short" if scale.quick else None)
    if wrong:
        raise Unequal("; ".join(wrong))


def _add_costs(costs: PassCosts, found: Findings) -> None:
    for cached in (NEAR, FAR):
        row = f"after {cached:,} tokens"
        found.add(COSTS, row, "one token", "s", costs.seconds(cached))
        for tokens in SHOWN:
            found.add(COSTS, row, f"{tokens} tokens", "", costs.at(cached)(tokens))


async def _compare(
    inside: Inside, guesses: Speculation, scale: Scale, found: Findings
) -> Sequence[str]:
    """Compare two greedy replies that use guesses with one that does not; return failures as text.

    Does so for each prompt length in `scale.equal`. `guesses` chooses the guesses of the engine
    `inside`. Some replies drawn at a low temperature come before the two, so that guesses of the
    first are taken from texts that resemble it but are not equal to it. The second repeats the text
    of the first, so that nearly all its guesses are right. Failures: a reply that differs by more
    than rounding explains (see `equality.compare`), and a second reply without a right guess.
    """
    measured, wrong = guesses.costs, list[str]()
    for length in scale.equal:
        ids = equality.random_ids(length, seed=length)
        noise = await equality.rounding_of(inside, ids)
        tolerance, row = equality.tolerance_for(noise), f"{length:,} tokens"
        plain = await _reply(inside, ids, scale.reply, guess=False, top=True)
        await inside.engine.call(lambda _: guesses.set_costs(free_costs()))
        for seed in range(ALIKE):
            await _reply(inside, ids, scale.reply, seed=seed, temperature=_temperature(plain))
        replies = [await _reply(inside, ids, scale.reply, top=True) for _ in range(2)]
        await inside.engine.call(lambda _: guesses.set_costs(measured))
        found.add(SAME, row, "tolerance", "", tolerance)
        for name, reply in zip(("first reply", "same reply again"), replies, strict=True):
            apart, same = equality.compare(plain.tokens, reply.tokens, tolerance)
            ties = first_difference(plain.tokens, reply.tokens) is not None
            found.add(SAME, row, f"{name}: apart", "", apart)
            found.add(SAME, row, f"{name}: parted at a tie", "", float(ties))
            found.add(SAME, row, f"{name}: guessed", "tokens", reply.record.drafted_tokens)
            found.add(SAME, row, f"{name}: right", "tokens", reply.record.accepted_tokens)
            if apart > tolerance or not same:
                wrong.append(f"{name} at {row}: {apart:.3f} apart, tolerance {tolerance:.3f}")
        if not replies[1].record.accepted_tokens:
            wrong.append(f"{row}: no guess was right, so the comparison proves nothing")
    return wrong


def _temperature(plain: Reply) -> float:
    """Return a temperature at which most tokens drawn, but not all, are the likeliest ones.

    It is `PARTING` times the median difference of log-probability between the two likeliest tokens
    of `plain`, the greedy reply, and at least 0.001.
    """
    return max(1e-3, PARTING * median(one.top[0][2] - one.top[1][2] for one in plain.tokens))


def first_difference(one: Sequence[TokenLogprob], other: Sequence[TokenLogprob]) -> int | None:
    """Return the index of the first token that differs; None if there is none.

    If one reply is longer, its tokens beyond the other's length are ignored.
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (mine, theirs) in pairs if mine.token_id != theirs.token_id), None)


async def _measure_speed(inside: Inside, scale: Scale, run: int, found: Findings) -> None:
    """Add the speeds of a new reply and of one that was given before to `found`.

    Each is generated with guesses and without, all with the same seed. `run` is the number of the
    repetition: it selects the prompts, and the order of with and without changes with it.
    """
    tokens = 4 * scale.reply
    for kind in (NEW, AGAIN):
        ids = equality.random_ids(scale.decode[0], seed=1000 + 2 * run + (kind == AGAIN))
        if kind == AGAIN:
            await _reply(inside, ids, tokens, seed=run)
        replies: dict[bool, Reply] = {}
        for guess in (True, False) if run % 2 else (False, True):
            replies[guess] = await _reply(inside, ids, tokens, guess=guess, seed=run)
        found.add(SPEED, kind, "without guesses", "tokens/s", replies[False].speed)
        found.add(SPEED, kind, "with guesses", "tokens/s", replies[True].speed)
        ratio = replies[True].speed / replies[False].speed
        found.add(SPEED, kind, "by that without guesses", "", ratio)
        found.add(SPEED, kind, "tokens a pass", "", replies[True].per_pass)


async def _reply(
    inside: Inside,
    ids: Tokens,
    tokens: int,
    *,
    guess: bool = True,
    top: bool = False,
    seed: int | None = None,
    temperature: float = 1.0,
) -> Reply:
    """Generate a reply of `tokens` tokens to the prompt `ids`.

    It is greedy, or with `seed` drawn at `temperature`. `guess`: use guesses. `top`: report the
    likeliest tokens at each position.
    """
    sampling = Sampling() if seed is None else Sampling(temperature=temperature, seed=seed)
    stream = await inside.ask(
        ids,
        tokens,
        endless=True,
        top=equality.TOP if top else None,
        sampling=sampling,
        speculate=guess,
    )
    said: list[TokenLogprob] = []
    async for event in stream:
        if isinstance(event, Text):
            said += event.logprobs
        elif isinstance(event, Finished):
            return Reply(said, stream.record)
    raise ValueError("a reply ended without a Finished event")
