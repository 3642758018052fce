"""Checks of a server under load: memory held, the budget kept, and replies beside a long prompt."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mlxcache.bench.client import Client, Refused
from mlxcache.bench.findings import Findings
from mlxcache.bench.process import Server
from mlxcache.bench.turns import Filler
from tests.proofs.system_count import sampling

TITLE = "Under load"
SAMPLE_S, POLL_S = 0.05, 0.02
SHARED_TOKENS, SHARERS = 4000, 8
JOINED_TOKENS, JOINERS, JOINER_TOKENS = 18_500, 7, 200
LONG_REPLY, SHORT_REPLY = 400, 32
HELD_ONCE, PADDING = 1.02, 1.3


@dataclass(slots=True)
class Watch:
    """Largest figures of `GET /v1/cache`, in bytes: `held`, and `taken` with reservations."""

    client: Client
    samples: int = 0
    held: int = 0
    taken: int = 0
    active: int = 0
    failed: list[str] = field(default_factory=list)

    def look(self) -> None:
        try:
            figures: dict[str, Any] = self.client.get("/v1/cache")
        except Refused as refused:
            self.failed.append(str(refused))
            return
        active = figures["active_bytes"]
        held = figures["ram"]["used_bytes"] + active
        self.samples += 1
        self.active = max(self.active, active)
        self.held = max(self.held, held)
        self.taken = max(self.taken, held + figures.get("reserved_bytes", 0))

    def hold_alive(self, found: Findings) -> None:
        """Check that figures were read and changed, without which other bounds prove nothing."""
        found.hold("figures that could not be read", len(self.failed), 0)
        in_use = "bytes in use while requests ran"
        found.hold(in_use, self.active, 1, unit="bytes", least=True)


@contextlib.contextmanager
def watching(client: Client) -> Iterator[Watch]:
    """Sample `GET /v1/cache` every 50 ms while the block lasts."""
    watch = Watch(client)
    with sampling(watch.look, SAMPLE_S):
        yield watch


def shared_system(server: Server, filler: Filler, kv_bytes: float, found: Findings) -> None:
    """Check that eight conversations share one system prompt's KV. Raises Refused."""
    system = {"role": "system", "content": filler.text(SHARED_TOKENS, "shared")}
    replies = [
        server.client.chat([system, _user(filler.text(50, f"sharer {i}"))], 8)
        for i in range(SHARERS)
    ]
    used = server.client.get("/v1/cache")["ram"]["used_bytes"]
    apart = sum(reply.conversation_tokens for reply in replies)
    apart -= SHARED_TOKENS * (len(replies) - 1)
    most = HELD_ONCE * apart * kv_bytes
    found.hold("eight under one system prompt, held", used, most, unit="bytes")
    reused = min((reply.cached_tokens or 0) for reply in replies[1:])
    found.hold("tokens of it that each reused", reused, SHARED_TOKENS, least=True)


def joined(
    server: Server, filler: Filler, kv_bytes: float, found: Findings, tokens: int = JOINED_TOKENS
) -> None:
    """Check the KV of one long and seven short conversations decoding at once. Raises Refused."""
    client = server.client
    long: list[Any] = [_user(filler.text(tokens, "long"))]
    first = client.chat(long, 8)
    long += [{"role": "assistant", "content": first.text}, _user(filler.text(30, "long on"))]
    short = [[_user(filler.text(JOINER_TOKENS, f"short {i}"))] for i in range(JOINERS)]
    with watching(client) as watch, ThreadPoolExecutor(1 + JOINERS) as pool:
        host = pool.submit(client.chat, long, LONG_REPLY)
        await_decode(client, host)
        guests = [pool.submit(client.chat, messages, SHORT_REPLY) for messages in short]
        replies = [guest.result() for guest in guests]
        beside = not host.done()
        replies.append(host.result())
    total = sum(reply.conversation_tokens for reply in replies) * kv_bytes
    found.add(TITLE, "joined", "the long one", "tokens/s", replies[-1].decode_rate or 0)
    found.hold("a long one joined by seven short, held by their sum", watch.held / total, PADDING)
    found.hold("the long one went on beside them", float(beside), 1, least=True)
    watch.hold_alive(found)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def await_decode(client: Client, reply: Future[Any], model: str | None = None) -> None:
    """Wait until the newest request, which is that of `reply`, decodes or is over."""
    while not reply.done():
        (newest,) = client.get("/v1/requests?limit=1")["data"] or ({"status": None},)
        if newest["status"] == "decode" and model in (None, newest["model"]):
            return
        time.sleep(POLL_S)


# -- twenty growing conversations that exceed the budget -------------------------------------------

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

    def hold_all(self, found: Findings) -> None:
        found.hold("requests neither answered nor told to wait", len(self.wrong), 0)
        found.hold("requests answered", self.answered, TALKERS * TURNS, least=True)

    def add(self, other: Tally) -> None:
        self.answered += other.answered
        self.told_to_wait += other.told_to_wait
        self.wrong += other.wrong


def observed(server: Server, filler: Filler, kv_bytes: float, found: Findings) -> None:
    """Play twenty conversations under --ram 1GB, and measure the process's memory.

    Allowed are weights, budget, and the memory of the idle server without MLX's part. The operating
    system's figure is sampled 20 times a second.
    """
    mlx = server.client.get("/v1/cache")["mlx"]
    base = server.idle_bytes - mlx["active_bytes"] - mlx["pool_bytes"]
    weights = server.weights_bytes
    tally, watch = _play(server, filler, kv_bytes, OBSERVED_BYTES)
    limit = server.client.get("/v1/cache")["ram"]["limit_bytes"]
    over = (server.peak_bytes - base - weights - limit) / (limit + weights)
    sizes = {"base": base, "weights": weights, "most": server.peak_bytes, "taken": watch.taken}
    for name, size in sizes.items():
        found.add(TITLE, "observed", name, "bytes", size)
    found.hold("beyond weights and budget, as a part of both", over, OVER)
    found.hold("budget that was taken, as a part of it", watch.taken / limit, 0.9, least=True)
    tally.hold_all(found)


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


def crowded(server: Server, filler: Filler, kv_bytes: float, found: Findings) -> None:
    """Play twenty conversations, four turns each, at once, under --ram 200MB.

    Every request must be answered, or refused with a Retry-After, after which it is sent again.
    """
    tally, watch = _play(server, filler, kv_bytes, RAM_BYTES)
    grown = server.peak_bytes - server.idle_bytes
    limit = server.client.get("/v1/cache")["ram"]["limit_bytes"]
    found.add(TITLE, "crowded", "told to wait", "", tally.told_to_wait)
    found.hold(f"limit under --ram {RAM}", limit, RAM_BYTES, unit="bytes")
    found.hold("taken by twenty growing conversations", watch.taken, limit, unit="bytes")
    found.hold("resident memory grown", grown, RESIDENT * RAM_BYTES, unit="bytes")
    tally.hold_all(found)
    watch.hold_alive(found)


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


# -- beside a long prompt --------------------------------------------------------------------------

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
        return self.status == "prefill"

    def look(self) -> None:
        record: dict[str, Any] = self._client.get(self._path)
        self.status = record["status"]
        if record["fed_tokens"] > self.fed:
            self.fed = record["fed_tokens"]
            self._times.append(time.perf_counter())

    def chunks(self, began: float, ended: float) -> int:
        """Number of chunks that ended between two times."""
        return bisect_right(self._times, ended) - bisect_right(self._times, began)


def long_prefill(
    server: Server, filler: Filler, kv_bytes: float, found: Findings, tokens: int = LONG_TOKENS
) -> None:
    """Measure replies and short prompts while a prompt of 60,000 tokens is computed.

    Once enough is measured, the long prompt ends with the server.
    """
    client = server.client
    alone = [_rate(client, filler, f"alone {i}") for i in range(TIMES)]
    waits: list[int] = []
    beside: list[float] = []
    _begin(client, filler.text(tokens, "long"))
    progress = Progress(client, _newest(client, tokens // 2))
    with sampling(progress.look, SAMPLE_S):
        while progress.prefills and len(beside) < 2 * TIMES:
            rate = _rate(client, filler, f"beside {len(beside)}")
            began = time.perf_counter()
            asked = _user(filler.text(SHORT_TOKENS, f"short {len(waits)}"))
            reply = client.chat([asked], 2)
            if progress.prefills:
                beside.append(rate)
                waits.append(1 + progress.chunks(began, began + reply.first_s))
    found.add(TITLE, "long_prefill", "alone", "tokens/s", *alone)
    found.add(TITLE, "long_prefill", "beside", "tokens/s", *beside)
    found.add(TITLE, "long_prefill", "fed of the long one", "tokens", progress.fed)
    share = median(beside) / median(alone) if beside else 0.0
    found.hold("speed of a reply beside a long prompt, by alone", share, PACE, least=True)
    found.hold("chunks until a short prompt's first token", max(waits, default=99), CHUNKS)
    found.hold("replies measured beside it", len(beside), 2, least=True)


def _begin(client: Client, text: str) -> None:

    def ask() -> None:
        with contextlib.suppress(Refused):  # the server ends first
            client.chat([_user(text)], 2)

    threading.Thread(target=ask, daemon=True).start()


def _rate(client: Client, filler: Filler, seed: str) -> float:
    return client.chat([_user(filler.text(TALK_TOKENS, seed))], REPLY).decode_rate or 0.0


def _newest(client: Client, least: int) -> str:
    """Wait for a request with a prompt of at least `least` tokens; its id."""
    while True:
        for record in client.get("/v1/requests?limit=5")["data"]:
            if record["prompt_tokens"] >= least and record["fed_tokens"]:
                return str(record["id"])
        time.sleep(SAMPLE_S)
