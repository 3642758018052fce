"""Scenarios that measure servers from outside: first tokens, tokens per second, churn, sleep."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from functools import partial

from mlxcache.bench.client import Client, Messages, Reply
from mlxcache.bench.context import WORKING_BYTES, Context, TimeUp, settle
from mlxcache.bench.findings import NotApplicable, by, middle
from mlxcache.bench.own_time import OwnTime
from mlxcache.bench.process import OURS, THEIRS, Server
from mlxcache.bench.turns import Visit, at_once
from mlxcache.command_buffers import LARGE, OWN
from mlxcache.config.settings import SETTINGS

# -- first tokens ----------------------------------------------------------------------------------

TIMES, FED = "First token", "Prompt tokens computed, of all"
OWN_TIME = 1.10
"""Maximum time of a warm first token, in multiples of mlx-lm's time for the same new tokens."""

BOUND_TOKENS = 50_000
"""Minimum prompt tokens for which OWN_TIME is checked; below, HTTP and rendering take too much."""

REPLY_TOKENS = 16
STOP_S = 120.0
GROWTH_POWER = 1.6
"""The time of attention grows with the square of the length, all else in proportion to it."""


def first_token(context: Context) -> None:
    _lengths(context, context.scale.short)


def first_token_long(context: Context) -> None:
    _lengths(context, context.scale.long)


def _lengths(context: Context, lengths: Sequence[int]) -> None:
    guess, before = 0.0, 1
    for tokens in lengths:
        what = f"first token at {tokens:,} tokens"
        if not context.fits(what, tokens):
            continue
        if context.in_time(what, guess * math.pow(tokens / before, GROWTH_POWER)):
            guess, before = _ours(context, tokens), tokens
            if context.in_time(f"{what}, {THEIRS}", 1.5 * guess):
                _theirs(context, tokens)


def _ours(context: Context, tokens: int) -> float:
    """Measure first tokens: cold, warm, and after restarts; return the cold seconds."""
    found = context.found
    row = f"{tokens:,} tokens, {OURS}"
    with ExitStack() as stack:
        server = stack.enter_context(context.serving())
        own = _own_beside(context, tokens, stack)
        visit = _visit(context, server, tokens)
        context.on_step(f"{tokens:,} tokens: cold")
        cold = visit.open("main")
        _note(context, row, "cold", cold)
        fed: list[tuple[int, int]] = []
        ratios: list[float | None] = []
        for _ in range(context.scale.runs):
            context.on_step(f"{tokens:,} tokens: warm")
            settle(server.client)
            reply = visit.go_on("main")
            _note(context, row, "warm", reply)
            fed.append((reply.cached_tokens or 0, reply.fed_tokens or 1))
            if own is not None and reply.cached_tokens:
                settle(server.client)
                own_s = own.ask(*fed[-1])[0]
                found.add(TIMES, row, "the model's own", "s", own_s)
                ratios.append(by(reply.first_s, own_s))
        _restarts(context, row, server, visit)
    if own is None:
        ratios = _own_after(context, row, fed)
    ratio, why_not = middle(ratios), None
    if ratio is None:
        why_not = "the model's own time was not measured"
    elif tokens < BOUND_TOKENS:
        why_not = f"prompts under {BOUND_TOKENS:,} tokens do not show it"
    name = f"warm first token at {tokens:,} tokens, by the model's own time"
    found.hold(name, ratio, OWN_TIME, why_not=why_not)
    return cold.first_s


def _own_beside(context: Context, tokens: int, stack: ExitStack) -> OwnTime | None:
    if context.subject.needed_bytes(tokens, processes=2) > context.usable_bytes:
        return None
    try:
        return stack.enter_context(context.own_time())
    except NotApplicable as why:
        context.found.notes.append(f"no time of the model's own: {why}")
        return None


def _own_after(context: Context, row: str, fed: Sequence[tuple[int, int]]) -> list[float | None]:
    """Time mlx-lm on the warm turns of a server that has ended; return ratios to its times.

    `fed` holds the numbers of cached and of new tokens of each turn.
    """
    try:
        with context.own_time() as own:
            times = [own.ask(*one)[0] for one in fed]
    except NotApplicable:
        return []
    context.found.notes.append(f"{row}: the model's own time was taken after the server's")
    context.found.add(TIMES, row, "the model's own", "s", *times)
    warm = context.found.tables[TIMES][row]["warm"].samples
    return [by(mine, own) for mine, own in zip(warm, times, strict=True)]


def _restarts(context: Context, row: str, server: Server, visit: Visit) -> None:
    runs = 1 if visit.tokens >= BOUND_TOKENS else context.scale.runs
    ends = {"restored": lambda: server.stop(STOP_S), "after kill -9": server.kill}
    for column, end in ends.items():
        for _ in range(runs):
            context.on_step(f"{visit.tokens:,} tokens: {column}")
            end()
            reply = visit.go_on("main")
            if not reply.cached_tokens:
                raise ValueError(f"{row}, {column}: nothing was restored from disk")
            _note(context, row, column, reply)


def _theirs(context: Context, tokens: int) -> None:
    row = f"{tokens:,} tokens, {THEIRS}"
    with context.theirs() as server:
        visit = _visit(context, server, tokens)
        context.on_step(f"{tokens:,} tokens: {THEIRS}")
        _note(context, row, "cold", visit.open("main"))
        for _ in range(context.scale.runs):
            _note(context, row, "warm", visit.go_on("main"))


def _visit(context: Context, server: Server, tokens: int) -> Visit:
    return Visit(server, context.filler, tokens, REPLY_TOKENS, f"prove/{tokens}")


def _note(context: Context, row: str, column: str, reply: Reply) -> None:
    context.found.add(TIMES, row, column, "s", reply.first_s)
    if reply.fed_tokens is not None:
        context.found.add(FED, row, column, "tokens", reply.fed_tokens)


# -- tokens per second -----------------------------------------------------------------------------

DECODE = "Decoding"
BUFFERS = "Decoding with command buffers of two sizes"
PREFILL = "Prefill of one prompt"
GENERATE = "mlx_lm.generate"
SHARE = 0.97  # minimum tokens/s of one reply, relative to mlx_lm.generate at the same length

LAST_TOKENS = 64
PLEA = "Go on with such lines for as long as you can, and do not end."
"""End of each prompt, which makes trained models write replies of full length."""


def decode(context: Context) -> None:
    for tokens in context.scale.decode:
        what = f"decoding at {tokens:,} tokens"
        if not context.fits(what, tokens):
            continue
        began = time.monotonic()
        _beside_generate(context, tokens)
        took = time.monotonic() - began
        if context.in_time(f"{what}, {THEIRS}", took):
            with context.theirs() as server:
                _decode_at(context, tokens, server, None)


def _beside_generate(context: Context, tokens: int) -> None:
    why_not = "replies of a quick run are too short" if context.scale.quick else None
    own: OwnTime | None = None
    with ExitStack() as stack:
        server = stack.enter_context(context.serving())
        if not context.fits(f"{GENERATE} at {tokens:,} tokens", tokens, processes=2):
            why_not = "memory is short for two processes"
        else:
            try:
                own = stack.enter_context(context.own_time())
            except NotApplicable as why:
                why_not = str(why)
        ratio = middle(_decode_at(context, tokens, server, own))
    name = f"tokens/s at {tokens:,} tokens, by {GENERATE}'s"
    context.found.hold(name, ratio, SHARE, least=True, why_not=why_not)


def _decode_at(
    context: Context, tokens: int, server: Server, own: OwnTime | None
) -> list[float | None]:
    """Measure decoding at one server; return its speeds by those of mlx_lm.generate."""
    found, scale = context.found, context.scale
    row = f"{tokens:,} tokens, {server.name}"
    texts = endless_prompts(context, tokens)
    client = server.client
    ratios: list[float | None] = []
    context.on_step(f"{row}: the prompt")
    client.chat(next(texts), 2)  # computes the prefix that all prompts share
    for _ in range(scale.runs):
        context.on_step(f"{row}: one reply")
        reply = _long_reply(client, next(texts), scale.reply)
        rate = reply.decode_rate or 0.0
        found.add(DECODE, row, "one reply", "tokens/s", rate)
        if own is not None:
            settle(client)
            theirs, peak = own.decode(reply.prompt_tokens or tokens, scale.reply)
            beside = f"{tokens:,} tokens, {GENERATE}"
            found.add(DECODE, beside, "one reply", "tokens/s", theirs)
            found.add(DECODE, beside, "peak beyond the first token's memory", "bytes", peak)
            ratios.append(by(rate, theirs))
    for count in scale.crowds:
        if not context.fits(f"{row}: {count} at once", tokens, rows=count):
            continue
        for _ in range(scale.runs):
            context.on_step(f"{row}: {count} at once")
            rate = rate_together(client, [next(texts) for _ in range(count)], scale.reply)
            found.add(DECODE, row, f"{count} at once, all", "tokens/s", rate)
    return ratios


def endless_prompts(context: Context, tokens: int) -> Iterator[Messages]:
    system = context.filler.text(max(16, tokens - LAST_TOKENS), f"decode/{tokens}")
    number = 0
    while True:
        number += 1
        last = f"{number}: {context.filler.text(LAST_TOKENS // 2, f'last {number}')}\n{PLEA}"
        yield [{"role": "system", "content": system}, {"role": "user", "content": last}]


def _long_reply(client: Client, prompt: Messages, asked: int) -> Reply:
    """Request a reply; ValueError if it is too short to measure its speed."""
    reply = client.chat(prompt, asked)
    if reply.generated_tokens < max(2, asked // 2):
        raise ValueError(f"a reply ended after {reply.generated_tokens} of {asked} tokens")
    return reply


def rate_together(client: Client, prompts: Sequence[Messages], reply: int) -> float:
    """Return the tokens per second of simultaneous replies of up to `reply` tokens each."""
    made = at_once([partial(_long_reply, client, one, reply) for one in prompts])
    return sum(one.generated_tokens for one in made.replies) / made.wall_s


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
            column: stack.enter_context(context.serving(**variables)).client
            for column, variables in (("large", LARGE), ("MLX's own", OWN))
        }
        for client in clients.values():
            client.chat(next(texts), 2)
        for _ in range(scale.runs):
            for column, client in clients.items():
                settle(client)
                context.on_step(f"command buffers: {column}")
                rate = _long_reply(client, next(texts), scale.reply).decode_rate or 0.0
                context.found.add(BUFFERS, f"{tokens:,} tokens", column, "tokens/s", rate)


def prefill(context: Context) -> None:
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
    with context.serving() as server:
        for run in range(scale.runs):
            context.on_step("as served")
            text = context.filler.text(scale.prompt, f"prefill/{run}")
            reply = server.client.chat([{"role": "user", "content": text}], 1)
            if reply.fed_tokens is not None:
                rate = reply.fed_tokens / reply.first_s
                found.add(PREFILL, row, f"as {OURS} serves", "tokens/s", rate)


# -- churn -----------------------------------------------------------------------------------------

CHURN = "Two streams of new prompts under a small budget"
LASTING_S, QUICK_S = 1800.0, 3.0
SPARE_S = 60.0  # seconds of the run's time limit that are left for the last requests

STREAMS = 2
HELD = 3  # prompts whose KV the budget has room for: those of both streams, and one to evict


def churn(context: Context) -> None:
    """Send two streams of new prompts for half an hour, under a budget that holds three of them.

    Under such a load wired memory has led to kernel panics; a machine that panics writes no report.
    Source: https://github.com/ml-explore/mlx/issues/3186
    """
    scale, found, subject = context.scale, context.found, context.subject
    if not context.fits("churn", scale.prompt + scale.reply, rows=HELD):
        return
    budget = WORKING_BYTES + HELD * subject.kv_bytes_per_token * scale.prompt
    end_s = min(QUICK_S if scale.quick else LASTING_S, max(0.0, context.clock.left_s - SPARE_S))
    serving = context.serving("--ram", str(budget), "--disk", "off")
    # the server's end ends the streams
    with ThreadPoolExecutor(STREAMS) as pool, serving as server:
        client, filler = server.client, context.filler
        context.on_step(f"two streams for {end_s / 60:.0f} minutes")
        began, ended = time.monotonic(), list[int]()

        def stream(number: int) -> None:
            turn = 0
            while time.monotonic() - began < end_s:
                short = turn % 2
                text = filler.text(scale.prompt // (1 + short), f"churn/{number}/{turn}")
                client.chat([{"role": "user", "content": text}], 4 if short else scale.reply)
                turn += 1
                ended.append(number)

        streams = [pool.submit(stream, number) for number in range(STREAMS)]
        with suppress(TimeUp):  # a last request that outlasts the limit takes no figure away
            for one in as_completed(streams):
                one.result()
        lasted = time.monotonic() - began
        evicted = sum(client.get("/v1/cache")["evictions"].values())
    row = f"--wire {os.environ.get(SETTINGS['wire'].variable, SETTINGS['wire'].default)}"
    found.add(CHURN, row, "lasted", "s", lasted)
    found.add(CHURN, row, "replies", "", len(ended))
    found.add(CHURN, row, "evicted", "", evicted)
    why_not = "a quick run is too short" if scale.quick else None
    found.hold("entries evicted", evicted, 1, least=True, why_not=why_not)


# -- sleep -----------------------------------------------------------------------------------------

CAFFEINATE = re.compile(r"pid (\d+)\(caffeinate\)")
POLL_S = 0.1
PATIENCE_S = 90.0
"""Maximum seconds for which sleep may still be prevented after a request. The server waits a while
for the next request before it allows sleep."""

AWAKE_PROMPT, AWAKE_REPLY = 2_000, 512


def awake(context: Context) -> None:
    """Check that `caffeinate` prevents a Mac's sleep during a request, and ends after it.

    Source: man pmset, man caffeinate.
    """
    if sys.platform != "darwin":
        raise NotApplicable("only macOS puts a machine to sleep during unattended work")
    with ThreadPoolExecutor(1) as pool, context.serving() as server:
        client = server.client
        before = asserting()
        text = context.filler.text(AWAKE_PROMPT, "awake")
        request = pool.submit(client.chat, [{"role": "user", "content": text}], AWAKE_REPLY)
        held: set[int] = set()
        while not (request.done() or held):
            held = asserting() - before
            time.sleep(POLL_S)
        request.result()
        if not held:
            raise ValueError("`pmset -g assertions` showed no caffeinate while a request ran")
        deadline = time.monotonic() + PATIENCE_S
        while asserting() & held:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the assertion was still held {PATIENCE_S:.0f} s after the request"
                )
            time.sleep(POLL_S)
    context.found.notes.append(
        "caffeinate held an assertion while a request ran, and ended after it"
    )


def asserting() -> set[int]:
    done = subprocess.run(
        ["pmset", "-g", "assertions"], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise ValueError(f"`pmset -g assertions` ended with status {done.returncode}")
    return {int(found) for found in CAFFEINATE.findall(done.stdout)}
