"""Twenty growing conversations that exceed the memory budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mlxcache.bench.checks import Check, Measured
from mlxcache.bench.client import Client, Refused
from mlxcache.bench.process import Server
from mlxcache.bench.text import Filler
from tests.proofs.memory import Watch, watching

RAM = "200MB"
RAM_BYTES = 200_000_000
OBSERVED, OBSERVED_BYTES = "1GB", 1_000_000_000
OVER = 0.05
"""Largest excess over weights and budget, as a share of both."""
TALKERS, TURNS = 20, 4
DEMAND = 1.5
"""KV of all conversations together, as a multiple of the budget."""

RESIDENT = 1.25
"""Largest resident growth, as a multiple of the budget: Python and the allocator take the rest."""

PATIENCE_S = 600.0


@dataclass(slots=True)
class Tally:
    """Outcomes of requests."""

    answered: int = 0
    told_to_wait: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another tally."""
        self.answered += other.answered
        self.told_to_wait += other.told_to_wait
        self.wrong += other.wrong


def observed(server: Server, filler: Filler, kv_bytes: float) -> Measured:
    """Play twenty conversations under --ram 1GB, and measure the process's memory.

    Allowed are weights, budget, and the memory of the idle server without MLX's part. The operating
    system's figure is sampled 20 times a second.
    """
    mlx = server.client.get("/v1/cache")["mlx"]
    base = server.idle_bytes - mlx["active_bytes"] - mlx["pool_bytes"]
    weights = server.weights_bytes
    tally, watch = _play(server, filler, kv_bytes, OBSERVED_BYTES)
    limit = server.client.get("/v1/cache")["ram"]["limit_bytes"]
    over = server.peak_bytes - base - weights - limit
    return Measured(
        {
            "base_bytes": base,
            "weights_bytes": weights,
            "most_bytes": server.peak_bytes,
            "taken_bytes": watch.taken,
            "overshoot": over / (limit + weights),
            "answered": tally.answered,
        },
        [
            Check("beyond weights and budget, as a part of both", over / (limit + weights), OVER),
            Check("budget that was taken, as a part of it", watch.taken / limit, 0.9, least=True),
            Check("requests neither answered nor told to wait", len(tally.wrong), 0),
            Check("requests answered", tally.answered, TALKERS * TURNS, least=True),
        ],
    )


def _play(server: Server, filler: Filler, kv_bytes: float, ram: int) -> tuple[Tally, Watch]:
    """Play twenty conversations of four turns at once, whose KV together exceeds `ram` bytes."""
    grow = max(16, round(DEMAND * ram / kv_bytes / TALKERS / TURNS))
    tally = Tally()
    with watching(server.client) as watch, ThreadPoolExecutor(TALKERS) as pool:
        texts = [
            [filler.text(grow, f"{i}/{turn}") for turn in range(TURNS)] for i in range(TALKERS)
        ]
        for one in pool.map(lambda said: _talk(server.client, said), texts):
            tally.add(one)
    return tally, watch


def crowded(server: Server, filler: Filler, kv_bytes: float) -> Measured:
    """Play twenty conversations, four turns each, at once, under --ram 200MB.

    Every request must be answered, or refused with a Retry-After, after which it is sent again.
    """
    tally, watch = _play(server, filler, kv_bytes, RAM_BYTES)
    grown = server.peak_bytes - server.idle_bytes
    limit = server.client.get("/v1/cache")["ram"]["limit_bytes"]
    return Measured(
        {
            "taken_bytes": watch.taken,
            "resident_growth_bytes": grown,
            "answered": tally.answered,
            "told_to_wait": tally.told_to_wait,
            "samples": watch.samples,
        },
        [
            Check(f"limit under --ram {RAM}", limit, RAM_BYTES, "bytes"),
            Check("taken by twenty growing conversations", watch.taken, limit, "bytes"),
            Check("resident memory grown", grown, RESIDENT * RAM_BYTES, "bytes"),
            Check("requests neither answered nor told to wait", len(tally.wrong), 0),
            Check("requests answered", tally.answered, TALKERS * TURNS, least=True),
            *watch.alive(),
        ],
    )


def _talk(client: Client, texts: Sequence[str]) -> Tally:
    """Play one conversation, a turn for each text; stop at the first wrong answer."""
    tally = Tally()
    messages: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE_S
    for text in texts:
        messages.append({"role": "user", "content": text})
        reply = _patiently(client, messages, tally, deadline)
        if reply is None:
            break
        messages.append({"role": "assistant", "content": reply})
    return tally


def _patiently(client: Client, messages: list[Any], tally: Tally, deadline: float) -> str | None:
    """Ask, and wait as often as the server requires; the reply's text, None on a failure."""
    while time.monotonic() < deadline:
        try:
            reply = client.chat(messages, 16)
        except Refused as refused:
            if refused.status != 503 or refused.retry_after is None:
                tally.wrong.append(str(refused))
                return None
            tally.told_to_wait += 1
            time.sleep(refused.retry_after)
        else:
            tally.answered += 1
            return reply.text
    tally.wrong.append("still told to wait at the end")
    return None
