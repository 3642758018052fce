"""The load under which wired memory has led to kernel panics: two streams, and much eviction.

Source: https://github.com/ml-explore/mlx/issues/3186
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from mlxcache.bench.checks import Check
from mlxcache.bench.prove.context import WORKING_BYTES, Context
from mlxcache.config.settings import SETTINGS

CHURN = "Two streams of new prompts under a small budget"
LASTING_S, QUICK_S = 1800.0, 3.0
SPARE_S = 60.0
"""Seconds of the run's time limit that are left for the last requests."""

STREAMS = 2
HELD = 3
"""Prompts whose KV the budget has room for: those of both streams, and one to evict."""


def churn(context: Context) -> None:
    """Send two streams of new prompts for half an hour, under a budget that holds three of them.

    Blocks. A machine that panics writes no report. Raises the error of a request.
    """
    scale, found, subject = context.scale, context.found, context.subject
    if not context.fits("churn", scale.prompt + scale.reply, rows=HELD):
        return
    budget = WORKING_BYTES + HELD * subject.kv_bytes_per_token * scale.prompt
    end_s = min(QUICK_S if scale.quick else LASTING_S, max(0.0, context.clock.left_s - SPARE_S))
    serving = context.serving("--ram", str(budget), "--disk", "off")
    with ThreadPoolExecutor(STREAMS) as pool, serving as lives:  # the server's end ends the streams
        client, filler = context.client(lives), context.filler
        context.on_step(f"two streams for {end_s / 60:.0f} minutes")
        began = time.monotonic()

        def stream(number: int) -> int:
            turn = 0
            while time.monotonic() - began < end_s:
                short = turn % 2
                text = filler.text(scale.prompt // (1 + short), f"churn/{number}/{turn}")
                client.chat([{"role": "user", "content": text}], 4 if short else scale.reply)
                turn += 1
            return turn

        streams = [pool.submit(stream, number) for number in range(STREAMS)]
        replies = sum(one.result() for one in as_completed(streams))
        evicted = sum(client.get("/v1/cache")["evictions"].values())
    row = f"--wire {os.environ.get(SETTINGS['wire'].variable, SETTINGS['wire'].default)}"
    found.add(CHURN, row, "lasted", "s", time.monotonic() - began)
    found.add(CHURN, row, "replies", "", replies)
    found.add(CHURN, row, "evicted", "", evicted)
    check = Check("entries evicted", evicted, 1, least=True)
    found.hold([check], why_not="a quick run is too short" if scale.quick else None)
