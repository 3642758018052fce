"""Tokens per second: decoding of one reply and of several at once, and prefill by pass length."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from mlxcache.bench.checks import Check
from mlxcache.bench.client import Client, Messages, Reply
from mlxcache.bench.measure import by, middle
from mlxcache.bench.own import OwnTime
from mlxcache.bench.process import OURS, THEIRS, Lives
from mlxcache.bench.prove.context import Context, NotApplicable, settle
from mlxcache.bench.prove.findings import Unchecked
from mlxcache.command_buffers import LARGE, OWN

DECODE = "Decoding"
BUFFERS = "Decoding with command buffers of two sizes"
PREFILL = "Prefill of one prompt"
GENERATE = "mlx_lm.generate"
SHARE = 0.97
"""Minimum tokens/s of one reply, relative to mlx_lm.generate at the same length."""

LAST_TOKENS = 64
PLEA = "Go on with such lines for as long as you can, and do not end."
"""End of each prompt, which makes trained models write replies of full length."""

Pair = tuple[float, float]


def decode(context: Context) -> None:
    """Measure the speed of decoding with mlxcache, mlx_lm.generate and mlx_lm.server.

    The servers are also measured with several replies at once.
    """
    for tokens in context.scale.decode:
        what = f"decoding at {tokens:,} tokens"
        if not context.fits(what, tokens):
            continue
        began = time.monotonic()
        _beside_generate(context, tokens)
        took = time.monotonic() - began
        if context.in_time(f"{what}, {THEIRS}", took):
            with context.theirs() as lives:
                _play(context, tokens, lives, None)


def _beside_generate(context: Context, tokens: int) -> None:
    name = f"tokens/s at {tokens:,} tokens, by {GENERATE}'s"
    with ExitStack() as stack:
        lives = stack.enter_context(context.serving())
        try:
            if not context.fits(f"{GENERATE} at {tokens:,} tokens", tokens, processes=2):
                raise NotApplicable("memory is short for two processes")
            own = stack.enter_context(context.own_time())
        except NotApplicable as why:
            context.found.unchecked.append(Unchecked(name, str(why), None, SHARE, least=True))
            own = None
        pairs = _play(context, tokens, lives, own)
    ratio = middle(by(*pair) for pair in pairs)
    if ratio is not None:
        check = Check(name, ratio, SHARE, least=True)
        quick = "replies of a quick run are too short" if context.scale.quick else None
        context.found.hold([check], why_not=quick)


def _play(context: Context, tokens: int, lives: Lives, own: OwnTime | None) -> list[Pair]:
    """Measure decoding after prompts of `tokens` tokens at the server of `lives`.

    The figures are written to the findings of `context`. Returns, per repetition, the server's
    tokens per second and those of mlx_lm.generate, which `own` measures; empty if `own` is None.
    """
    found, scale = context.found, context.scale
    row = f"{tokens:,} tokens, {lives.name}"
    texts = endless_prompts(context, tokens)
    client = context.client(lives)
    pairs: list[Pair] = []
    context.on_step(f"{row}: the prompt")
    client.chat(next(texts), 2)  # computes the prefix that all prompts share
    for _ in range(scale.runs):
        context.on_step(f"{row}: one reply")
        reply = _checked(client.chat(next(texts), scale.reply), scale.reply)
        rate = reply.decode_rate or 0.0
        found.add(DECODE, row, "one reply", "tokens/s", rate)
        if own is not None:
            settle(client)
            theirs, peak = own.decode(reply.prompt_tokens or tokens, scale.reply)
            beside = f"{tokens:,} tokens, {GENERATE}"
            found.add(DECODE, beside, "one reply", "tokens/s", theirs)
            found.add(DECODE, beside, "peak beyond the first token's memory", "bytes", peak)
            pairs.append((rate, theirs))
    for count in scale.crowds:
        if not context.fits(f"{row}: {count} at once", tokens, rows=count):
            continue
        for _ in range(scale.runs):
            context.on_step(f"{row}: {count} at once")
            prompts = [next(texts) for _ in range(count)]
            rate = rate_together(client, prompts, scale.reply)
            found.add(DECODE, row, f"{count} at once, all", "tokens/s", rate)
    return pairs


def endless_prompts(context: Context, tokens: int) -> Iterator[Messages]:
    """Yield an endless sequence of prompts of about `tokens` tokens.

    They differ only in their last messages.
    """
    system = context.filler.text(max(16, tokens - LAST_TOKENS), f"decode/{tokens}")
    number = 0
    while True:
        number += 1
        last = f"{number}: {context.filler.text(LAST_TOKENS // 2, f'last {number}')}\n{PLEA}"
        yield [{"role": "system", "content": system}, {"role": "user", "content": last}]


def _checked(reply: Reply, asked: int) -> Reply:
    """Return `reply` if it is long enough to measure its speed.

    Raises ValueError if it has less than half of the `asked` tokens, or fewer than 2.
    """
    if reply.generated_tokens < max(2, asked // 2):
        raise ValueError(f"a reply ended after {reply.generated_tokens} of {asked} tokens")
    return reply


def command_buffers(context: Context) -> None:
    """Measure decoding with large command buffers and with MLX's own, in turn, on a Mac."""
    if sys.platform != "darwin":
        raise NotApplicable("only Metal has command buffers")
    scale, tokens = context.scale, context.scale.decode[0]
    if not context.fits("servers with two sizes of command buffers", tokens, processes=2):
        return
    texts = endless_prompts(context, tokens)
    with ExitStack() as stack:
        clients = {
            column: context.client(stack.enter_context(context.serving(variables=variables)))
            for column, variables in (("large", LARGE), ("MLX's own", OWN))
        }
        for client in clients.values():
            client.chat(next(texts), 2)
        for _ in range(scale.runs):
            for column, client in clients.items():
                settle(client)
                context.on_step(f"command buffers: {column}")
                reply = _checked(client.chat(next(texts), scale.reply), scale.reply)
                rate = reply.decode_rate or 0.0
                context.found.add(BUFFERS, f"{tokens:,} tokens", column, "tokens/s", rate)


def rate_together(client: Client, prompts: Sequence[Messages], reply: int) -> float:
    """Return the tokens per second of simultaneous replies, from the first request to the last end.

    `reply` is the maximum length of each in tokens. Blocks. Raises Refused if a request fails, and
    ValueError if a reply has less than half of that length.
    """
    replies: list[Reply] = []
    failed: list[Exception] = []

    def ask(messages: Messages) -> None:
        try:
            replies.append(_checked(client.chat(messages, reply), reply))
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(one,), daemon=True) for one in prompts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(one.generated_tokens for one in replies) / (time.perf_counter() - began)


def prefill(context: Context) -> None:
    """Measure the speed of prefill: mlx-lm's in passes of several lengths, and mlxcache's."""
    scale, found = context.scale, context.found
    row = f"{scale.prompt:,} tokens"
    if not context.fits("prefill", scale.prompt):
        return
    with context.own_time() as own:
        for step in scale.passes:
            context.on_step(f"passes of {step}")
            own.prefill(2 * step, step)  # compiles the kernels
            for _ in range(scale.runs):
                rate = own.prefill(scale.prompt, step)
                found.add(PREFILL, row, f"passes of {step}", "tokens/s", rate)
    with context.serving() as lives:
        for run in range(scale.runs):
            context.on_step("as served")
            text = context.filler.text(scale.prompt, f"prefill/{run}")
            reply = context.client(lives).chat([{"role": "user", "content": text}], 1)
            if reply.fed_tokens is not None:
                rate = reply.fed_tokens / reply.first_s
                found.add(PREFILL, row, f"as {OURS} serves", "tokens/s", rate)
