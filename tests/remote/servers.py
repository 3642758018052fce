"""Two servers' stores with one remote, without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxcache.remote.exchange import Shape
from mlxcache.remote.objects import Objects
from mlxcache.remote.tier import RemoteTier
from mlxcache.store.store import Store
from mlxcache.types import Tokens
from tests.store.content import NAMESPACE, opened, put, run_bytes, snapshot

CELL = 256
STATE_BYTES = 200
SECONDS = 0.01
"""Seconds that a server takes to compute a token."""


def per_token(start: int, stop: int) -> float:
    return max(0, stop - start) * SECONDS


@dataclass(frozen=True, slots=True)
class Server:
    store: Store
    tier: RemoteTier

    def computes(self, ids: Tokens, *states: int) -> None:
        """A turn that ends with `ids`: saved, with states at positions, and uploaded."""
        found = self.store.find(ids, touch=False).length
        put(self.store, ids, found // 64 * 64)
        for at in states:
            self.store.write_checkpoint(ids[:at], snapshot(ids[:at]))
        self.tier.share(ids)
        assert self.tier.uploader.wait(10)

    def fetches(self, ids: Tokens, known: int = 0) -> int:
        """How many tokens of a prompt are on disk after a lookup in the remote."""
        self.tier.fetcher.fetch(ids, known, time.monotonic())
        return self.store.find(ids, touch=False).length


@contextmanager
def server(
    folder: Path,
    objects: Objects,
    *,
    opaque: bool = False,
    seconds: Callable[[int, int], float] = per_token,
) -> Iterator[Server]:
    """A server that computes a token in 10 ms."""
    shape = Shape(run_bytes(1), STATE_BYTES, opaque)
    with opened(folder) as store:
        assert store.namespace == NAMESPACE
        tier = RemoteTier(objects, store, shape, seconds, 50_000)
        try:
            yield Server(store, tier)
        finally:
            tier.close()
