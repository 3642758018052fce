"""Time to the first token: cold, warm, restored after a clean restart, and after kill -9."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from mlxcache.bench.checks import Check
from mlxcache.bench.client import Reply
from mlxcache.bench.measure import by, middle
from mlxcache.bench.own import OwnTime
from mlxcache.bench.process import OURS, THEIRS, Lives
from mlxcache.bench.prove.context import Context, NotApplicable, settle
from mlxcache.bench.prove.findings import Unchecked
from mlxcache.bench.scenarios import Conversation, Visit

TIMES, FED = "First token", "Prompt tokens computed, of all"
OWN_TIME = 1.10
"""Maximum time of a warm first token, in multiples of mlx-lm's time for the same new tokens."""

BOUND_TOKENS = 50_000
"""Minimum prompt tokens for which OWN_TIME is checked; below, HTTP and rendering take too much."""

REPLY_TOKENS = 16
STOP_S = 120.0
GROWTH_POWER = 1.6


def short(context: Context) -> None:
    """Measure times to the first token of mlxcache and mlx_lm.server for the shorter prompts.

    Their lengths are `context.scale.short`. The figures are added to `context.found`.
    """
    _lengths(context, context.scale.short)


def long(context: Context) -> None:
    """Measure times to the first token of mlxcache and mlx_lm.server for the longer prompts.

    Their lengths are `context.scale.long`. The figures are added to `context.found`.
    """
    _lengths(context, context.scale.long)


def _lengths(context: Context, lengths: Sequence[int]) -> None:
    rate: tuple[int, float] | None = None
    for tokens in lengths:
        what = f"first token at {tokens:,} tokens"
        if not context.fits(what, tokens):
            continue
        guess = _forecast(rate, tokens)
        if context.in_time(what, guess):
            cold_s = _ours(context, tokens)
            rate = (tokens, cold_s)
            if context.in_time(f"{what}, {THEIRS}", 1.5 * cold_s):
                _theirs(context, tokens)


def _forecast(known: tuple[int, float] | None, tokens: int) -> float:
    """Return the expected seconds of a cold first token, from one measured at another length.

    `known` is that length in tokens and its seconds; 0 is returned if it is None. The time is taken
    to grow with the length to the power of `GROWTH_POWER`: that of attention grows with the square,
    all else in proportion.
    """
    if known is None:
        return 0.0
    return known[1] * math.pow(tokens / known[0], GROWTH_POWER)


def _ours(context: Context, tokens: int) -> float:
    """Measure mlxcache's times to the first token for a conversation of `tokens` tokens.

    Its first turn is cold, later ones are warm or follow a restart. Returns the seconds of the cold
    one.
    """
    found, runs = context.found, context.scale.runs
    row = f"{tokens:,} tokens, {OURS}"
    with ExitStack() as stack:
        lives = stack.enter_context(context.serving())
        own = _own_beside(context, tokens, stack)
        visit = _visit(context, lives, tokens)
        context.on_step(f"{tokens:,} tokens: cold")
        cold = visit.open("main")
        talk = visit.talk("main")
        _note(context, row, "cold", cold)
        fed: list[tuple[int, int]] = []
        ratios: list[float | None] = []
        for _ in range(runs):
            context.on_step(f"{tokens:,} tokens: warm")
            settle(lives.server.client)
            reply = talk.ask(visit.words())
            _note(context, row, "warm", reply)
            fed.append((reply.cached_tokens or 0, reply.fed_tokens or 1))
            if own is not None and reply.cached_tokens:
                settle(lives.server.client)
                own_s = own.ask(*fed[-1])[0]
                found.add(TIMES, row, "the model's own", "s", own_s)
                ratios.append(by(reply.first_s, own_s))
        _restarts(context, row, lives, talk, visit)
    if own is None:
        ratios = _own_after(context, row, fed)
    _bound(context, tokens, middle(ratios))
    return cold.first_s


def _own_beside(context: Context, tokens: int, stack: ExitStack) -> OwnTime | None:
    """Return a process that times mlx-lm without a server, run beside the server under test.

    `tokens` is the length of the prompt. The process ends when `stack` is closed. Returns None if
    memory is short for both processes, or if the model cannot be measured without a server.
    """
    if context.subject.needed_bytes(tokens, processes=2) > context.usable_bytes:
        return None
    try:
        return stack.enter_context(context.own_time())
    except NotApplicable as why:
        context.found.notes.append(f"no time of the model's own: {why}")
        return None


def _own_after(context: Context, row: str, fed: Sequence[tuple[int, int]]) -> list[float | None]:
    """Time mlx-lm without a server on the warm turns of an mlxcache server that has ended.

    `row` is the row of the table `TIMES` that has the server's times; those of mlx-lm are added to
    it. `fed` holds the numbers of cached and of new tokens of each turn. Returns, for each turn,
    the server's time to the first token divided by that of mlx-lm, or None if the latter is 0. The
    list is empty if the model cannot be measured without a server.
    """
    try:
        with context.own_time() as own:
            times = [own.ask(*one)[0] for one in fed]
    except NotApplicable:
        return []
    context.found.notes.append(f"{row}: the model's own time was taken after the server's")
    context.found.add(TIMES, row, "the model's own", "s", *times)
    warm = context.found.figure(TIMES, row, "warm")
    assert warm is not None
    return [by(mine, own) for mine, own in zip(warm.samples, times, strict=True)]


def _restarts(context: Context, row: str, lives: Lives, talk: Conversation, visit: Visit) -> None:
    runs = 1 if visit.tokens >= BOUND_TOKENS else context.scale.runs
    for column in ("restored", "after kill -9"):
        for _ in range(runs):
            context.on_step(f"{visit.tokens:,} tokens: {column}")
            if column == "restored":
                lives.stop(STOP_S)
            else:
                lives.kill()
            talk.reconnect(context.client(lives))
            reply = talk.ask(visit.words())
            if not reply.cached_tokens:
                raise ValueError(f"{row}, {column}: nothing was restored from disk")
            _note(context, row, column, reply)


def _theirs(context: Context, tokens: int) -> None:
    """Measure mlx_lm.server's times to the first token, cold and warm, at `tokens` tokens."""
    row = f"{tokens:,} tokens, {THEIRS}"
    with context.theirs() as lives:
        visit = _visit(context, lives, tokens)
        context.on_step(f"{tokens:,} tokens: {THEIRS}")
        _note(context, row, "cold", visit.open("main"))
        for _ in range(context.scale.runs):
            _note(context, row, "warm", visit.talk("main").ask(visit.words()))


def _visit(context: Context, lives: Lives, tokens: int) -> Visit:
    return Visit(context.client(lives), context.filler, tokens, REPLY_TOKENS, f"prove/{tokens}")


def _note(context: Context, row: str, column: str, reply: Reply) -> None:
    context.found.add(TIMES, row, column, "s", reply.first_s)
    if reply.fed_tokens is not None:
        context.found.add(FED, row, column, "tokens", reply.fed_tokens)


def _bound(context: Context, tokens: int, ratio: float | None) -> None:
    name = f"warm first token at {tokens:,} tokens, by the model's own time"
    if ratio is None:
        why = "the model's own time was not measured"
        context.found.unchecked.append(Unchecked(name, why, None, OWN_TIME))
        return
    check = Check(name, ratio, OWN_TIME)
    short = f"prompts under {BOUND_TOKENS:,} tokens do not show it"
    context.found.hold([check], why_not=short if tokens < BOUND_TOKENS else None)
