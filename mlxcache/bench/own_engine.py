"""Engine in this process, for figures that no client can see. Random KV can fill its RAM tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np

from mlxcache.bench.findings import NotApplicable
from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_cache import KVCache
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.requests import Stream
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.model.load import Loaded
from mlxcache.residency.memory import Shared
from mlxcache.types import (
    Finished,
    Job,
    Prompt,
    Sampling,
    Text,
    TokenLogprob,
    Tokens,
    token_ids,
)

AT_ONCE = 1024
"""Tokens of random KV that are generated; longer KV repeats them."""

POLL_S = 0.002

GREEDY = Sampling()

Prepare = Callable[[Loaded], Loaded]


class Inside:
    """An engine whose RAM tier can be filled with random KV. Use it in its event loop."""

    def __init__(self, engine: Engine, core: ModelRuntime, disk: DiskTier):
        self.engine = engine
        self.disk = disk
        self.core = core
        self._asked = 0
        self._generated = 0

    @property
    def vocabulary(self) -> int:
        return self.core.layout.vocab_size

    def tokens(self, nbytes: int, seed: int) -> Tokens:
        """Return random token ids whose KV takes `nbytes`, rounded up to a whole token."""
        count = -(-nbytes // self.core.layout.bytes_per_token)
        return token_ids(np.random.default_rng(seed).integers(0, self.vocabulary, count, np.int32))

    @property
    def plain(self) -> bool:
        """True if the model caches only KV, so that random KV can stand for computed KV."""
        return not self.core.layout.opaque and self.core.layout.cacheable

    async def put(self, ids: Tokens) -> None:
        """Put random KV for `ids` into RAM. Raises ValueError if it does not fit, NotApplicable."""
        if not self.plain:
            raise NotApplicable("this model caches more than KV, so random KV cannot replace it")
        await self.engine.call(lambda core: _put(core.kv, ids))

    async def write(self, ids: Tokens) -> None:
        """Write the KV of `ids` in RAM to disk, as after a request, and wait until it is there."""

        def begin(core: ModelRuntime) -> None:
            node = core.kv.tree.match(ids, touch=False).nodes[-1]
            self.disk.write_behind.add(node, ids)

        await self.engine.call(begin)
        await self.written()

    async def written(self) -> None:
        await self.until(lambda: not self.disk.write_behind.busy)

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():  # noqa: ASYNC110 - the MLX thread sets no asyncio.Event
            await asyncio.sleep(POLL_S)

    async def forget(self) -> None:
        """Remove all KV from RAM, except KV that a request uses or that is not on disk yet."""
        await self.engine.call(lambda runtime: runtime.kv.clear())

    async def clear(self) -> None:
        await self.engine.sessions.clear()

    def files(self, ids: Tokens) -> Sequence[Path]:
        """Return the files with the KV of the longest prefix of `ids` on disk, in token order."""
        return [piece.path for piece in self.disk.store.find(ids, touch=False).pieces]

    async def ask(
        self,
        ids: Tokens,
        max_tokens: int,
        *,
        endless: bool = False,
        top: int | None = None,
        sampling: Sampling = GREEDY,
        speculate: bool = True,
    ) -> Stream:
        """Submit a request. With `endless`, tokens that end a turn are never sampled."""
        self._asked += 1
        ends = self.core.loaded.tokenizer.eos_token_ids if endless else ()
        bias = tuple((int(id), -100.0) for id in sorted(ends))
        job = Job(
            f"bench-{self._asked}", Prompt(ids), replace(sampling, logit_bias=bias),
            max_tokens=max_tokens, top_logprobs=top, speculate=speculate,
        )  # fmt: skip
        return await self.engine.submit(job)

    async def reply(self, ids: Tokens, max_tokens: int) -> None:
        await drained(await self.ask(ids, max_tokens))
        self._generated += max_tokens

    def generated(self) -> int:
        """Return the tokens generated so far; an ended `reply` counts as its `max_tokens`."""
        lanes = self.core.scheduler.lanes.all
        return self._generated + sum(len(task.out) for lane in lanes for task in lane.tasks)


async def drained(stream: Stream) -> tuple[list[TokenLogprob], Finished]:
    """Read a reply to its end; return its log-probabilities, if asked for, and its last event."""
    said: list[TokenLogprob] = []
    async for event in stream:
        if isinstance(event, Text):
            said += event.logprobs
        elif isinstance(event, Finished):
            return said, event
    raise ValueError("a reply ended without a Finished event")


class _Prepared(Engine):
    def __init__(self, settings: Settings, prepare: Prepare):
        super().__init__(settings)
        self._prepare = prepare

    def make_runtime(self, loaded: Loaded, shared: Shared | None = None) -> ModelRuntime:
        return super().make_runtime(self._prepare(loaded), shared)


@asynccontextmanager
async def running_inside(
    model: Path,
    cache_dir: Path,
    ram: str,
    prepare: Prepare = lambda loaded: loaded,
    *,
    speculate: Literal["off", "auto"] = "off",
) -> AsyncIterator[Inside]:
    """Run an engine with a disk tier, which computes nothing while idle, while the block runs.

    `prepare` may replace the loaded model, on the MLX thread. Raises ModelError, or ValueError.
    """
    settings = Settings(
        model=str(model), cache_dir=cache_dir, ram=ram, disk="100GB", no_anticipate=True,
        speculate=speculate,
    )  # fmt: skip
    engine = _Prepared(settings, prepare)
    await engine.start()
    try:
        core = await engine.call(lambda core: core)
        if core.kv.disk is None:
            raise ValueError(f"{model}: no disk tier was started; see the log for the cause")
        yield Inside(engine, core, core.kv.disk)
    finally:
        await engine.stop()


def _put(memory: KVCache, ids: Tokens) -> None:
    lease = memory.acquire(ids, 1)
    if lease is None:
        raise ValueError(f"{len(ids)} tokens do not fit --ram: use fewer, or raise --ram")
    lineage, layout = lease.lineage, memory.layout
    noise = [
        [mx.random.normal((1, heads, AT_ONCE, dim)).astype(dtype) for heads, dim, dtype in spec]
        for spec in layout.specs
    ]
    mx.eval(noise)
    while lineage.length < len(ids):
        count = min(AT_ONCE, len(ids) - lineage.length)
        lineage.append([[array[..., :count, :] for array in slot] for slot in noise], count)
    memory.commit(lease, ids, checkpoint=False)
    memory.release(lease)
