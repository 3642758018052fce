"""Pace of a reply, and wait of a short prompt, while a long prompt is computed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

from mlxcache.bench.checks import Check, Measured
from mlxcache.bench.client import Client, Refused
from mlxcache.bench.process import Server
from mlxcache.bench.text import Filler
from tests.proofs.memory import SAMPLE_S

LONG_TOKENS, SHORT_TOKENS, TALK_TOKENS = 60_000, 200, 300
REPLY, TIMES = 200, 4
PACE, CHUNKS = 0.5, 3
"""PACE: least share of the speed that a reply has alone. CHUNKS: most chunks until the first token
of a short prompt, its own one included."""


class Progress:
    """Times at which chunks of one request ended, sampled from `GET /v1/requests/ID`."""

    def __init__(self, client: Client, id: str):
        self._client, self._path = client, f"/v1/requests/{id}"
        self._times: list[float] = []
        self.status = "prefill"
        self.fed = 0

    @property
    def prefills(self) -> bool:
        """True while the prompt is being computed."""
        return self.status == "prefill"

    def look(self) -> None:
        """Sample once."""
        record: dict[str, Any] = self._client.get(self._path)
        self.status = record["status"]
        if record["fed_tokens"] > self.fed:
            self.fed = record["fed_tokens"]
            self._times.append(time.perf_counter())

    def chunks(self, began: float, ended: float) -> int:
        """Number of chunks that ended between two times."""
        return bisect_right(self._times, ended) - bisect_right(self._times, began)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample 20 times a second while the block lasts."""
        over = threading.Event()

        def loop() -> None:
            while not over.wait(SAMPLE_S):
                self.look()

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def long_prefill(
    server: Server, filler: Filler, kv_bytes: float, tokens: int = LONG_TOKENS
) -> Measured:
    """Measure replies and short prompts while a prompt of 60,000 tokens is computed.

    Once enough is measured, the long prompt ends with the server.
    """
    client = server.client
    alone = [_rate(client, filler, f"alone {i}") for i in range(TIMES)]
    waits: list[int] = []
    beside: list[float] = []
    _begin(client, filler.text(tokens, "long"))
    progress = Progress(client, _newest(client, tokens // 2))
    with progress.watched():
        while progress.prefills and len(beside) < 2 * TIMES:
            rate = _rate(client, filler, f"beside {len(beside)}")
            began = time.perf_counter()
            asked = _user(filler.text(SHORT_TOKENS, f"short {len(waits)}"))
            reply = client.chat([asked], 2)
            if progress.prefills:
                beside.append(rate)
                waits.append(1 + progress.chunks(began, began + reply.first_s))
    figures = {
        "alone_tokens_s": alone,
        "beside_tokens_s": beside,
        "chunks_until_short": waits,
        "fed_of_long": progress.fed,
    }
    share = median(beside) / median(alone) if beside else 0.0
    return Measured(
        figures,
        [
            Check("speed of a reply beside a long prompt, by alone", share, PACE, least=True),
            Check("chunks until a short prompt's first token", max(waits, default=99), CHUNKS),
            Check("replies measured beside it", len(beside), 2, least=True),
        ],
    )


def _begin(client: Client, text: str) -> None:
    """Send a prompt in a thread, without waiting for the reply."""

    def ask() -> None:
        with suppress(Refused):  # the server ends first
            client.chat([_user(text)], 2)

    threading.Thread(target=ask, daemon=True).start()


def _rate(client: Client, filler: Filler, seed: str) -> float:
    """Measure the tokens per second of a reply to a new prompt."""
    return client.chat([_user(filler.text(TALK_TOKENS, seed))], REPLY).decode_rate or 0.0


def _newest(client: Client, least: int) -> str:
    """Wait for a request with a prompt of at least `least` tokens; its id."""
    while True:
        for record in client.get("/v1/requests?limit=5")["data"]:
            if record["prompt_tokens"] >= least and record["fed_tokens"]:
                return str(record["id"])
        time.sleep(SAMPLE_S)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
