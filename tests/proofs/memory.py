"""Memory held by this server, by its own figures during requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mlxcache.bench.checks import Check, Measured
from mlxcache.bench.client import Client, Refused
from mlxcache.bench.process import Server
from mlxcache.bench.text import Filler

SAMPLE_S = 0.05
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
        """Sample once."""
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

    def alive(self) -> list[Check]:
        """Checks that figures were read and changed, without which other bounds prove nothing."""
        return [
            Check("figures that could not be read", len(self.failed), 0),
            Check("bytes in use while requests ran", self.active, 1, "bytes", least=True),
        ]


@contextlib.contextmanager
def watching(client: Client) -> Iterator[Watch]:
    """Sample `GET /v1/cache` every 50 ms while the block lasts."""
    watch, over = Watch(client), threading.Event()

    def loop() -> None:
        while not over.wait(SAMPLE_S):
            watch.look()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def shared_system(server: Server, filler: Filler, kv_bytes: float) -> Measured:
    """Check that eight conversations share one system prompt's KV. Raises Refused."""
    system = {"role": "system", "content": filler.text(SHARED_TOKENS, "shared")}
    replies = [
        server.client.chat([system, _user(filler.text(50, f"sharer {i}"))], 8)
        for i in range(SHARERS)
    ]
    figures: dict[str, Any] = server.client.get("/v1/cache")
    used = figures["ram"]["used_bytes"]
    apart = sum(reply.conversation_tokens for reply in replies)
    apart -= SHARED_TOKENS * (len(replies) - 1)
    reused = min((reply.cached_tokens or 0) for reply in replies[1:])
    return Measured(
        {"used_bytes": used, "segments": figures["segments"], "reused_tokens": reused},
        [
            Check(
                "eight under one system prompt, held", used, HELD_ONCE * apart * kv_bytes, "bytes"
            ),
            Check("tokens of it that each reused", reused, SHARED_TOKENS, least=True),
        ],
    )


def joined(
    server: Server, filler: Filler, kv_bytes: float, tokens: int = JOINED_TOKENS
) -> Measured:
    """Check the KV of one long and seven short conversations decoding at once. Raises Refused."""
    client = server.client
    long: list[Any] = [_user(filler.text(tokens, "long"))]
    first = client.chat(long, 8)
    long += [{"role": "assistant", "content": first.text}, _user(filler.text(30, "long on"))]
    short = [[_user(filler.text(JOINER_TOKENS, f"short {i}"))] for i in range(JOINERS)]
    with watching(client) as watch, ThreadPoolExecutor(1 + JOINERS) as pool:
        host = pool.submit(client.chat, long, LONG_REPLY)
        _await_decode(client, lambda: not host.done())
        guests = [pool.submit(client.chat, messages, SHORT_REPLY) for messages in short]
        replies = [guest.result() for guest in guests]
        beside = not host.done()
        replies.append(host.result())
    total = sum(reply.conversation_tokens for reply in replies) * kv_bytes
    return Measured(
        {
            "held_bytes": watch.held,
            "kv_bytes": total,
            "host_tokens_s": replies[-1].decode_rate or 0,
        },
        [
            Check(
                "a long one joined by seven short, held by their sum", watch.held / total, PADDING
            ),
            Check("the long one went on beside them", float(beside), 1, least=True),
            *watch.alive(),
        ],
    )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _await_decode(client: Client, going: Callable[[], bool]) -> None:
    """Wait until the newest request decodes, or `going` is false."""
    while going():
        newest = client.get("/v1/requests?limit=1")["data"]
        if newest and newest[0]["status"] == "decode":
            return
        time.sleep(SAMPLE_S)
