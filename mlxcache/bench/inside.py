"""An engine in this process, for figures that no client sees; random KV can fill its RAM tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_cache import KVCache
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.engine.stream import Stream
from mlxcache.model.load import Loaded
from mlxcache.types import Finished, Job, Prompt, Sampling, Tokens

AT_ONCE = 1024
"""Tokens of random KV that are made once and then repeated."""

POLL_S = 0.002

Prepare = Callable[[Loaded], Loaded]


class NotPlain(ValueError):
    """The model caches more than KV (checkpoints), so that random KV cannot stand for it."""


class Inside:
    """An engine whose RAM tier is filled without computing. For its event loop only."""

    def __init__(self, engine: Engine, core: ModelRuntime, disk: DiskTier):
        self.engine = engine
        self.disk = disk
        self.core = core
        self._asked = 0
        self._generated = 0

    @property
    def vocabulary(self) -> int:
        """Number of the model's token ids."""
        return self.core.layout.vocab_size

    def tokens(self, nbytes: int, seed: int) -> Tokens:
        """Random ids whose KV takes `nbytes`, rounded up to a token."""
        count = -(-nbytes // self.core.layout.bytes_per_token)
        return np.random.default_rng(seed).integers(0, self.vocabulary, count, np.int32)

    @property
    def plain(self) -> bool:
        """True if the model's KV is all that it caches, so that random KV can stand for it."""
        return not self.core.layout.opaque and self.core.layout.cacheable

    async def put(self, ids: Tokens) -> None:
        """Put random KV for `ids` into the RAM tier, as after a request.

        Raises NotPlain.
        """
        if not self.plain:
            raise NotPlain("this model's KV alone is not what it caches")
        await self.engine.call(lambda core: _put(core.kv, ids))

    async def mark(self, ids: Tokens) -> None:
        """Schedule the KV of `ids` in RAM to be written, as after a request."""

        def begin(core: ModelRuntime) -> None:
            node = core.kv.tree.match(ids, touch=False).nodes[-1]
            self.disk.write_behind.add(node, ids)

        await self.engine.call(begin)

    async def written(self) -> None:
        """Wait until all scheduled writes have ended."""
        await self.until(lambda: not self.disk.write_behind.busy)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Poll `reached` until it is true; other threads change its result."""
        while not reached():  # noqa: ASYNC110 - the MLX thread sets no asyncio.Event
            await asyncio.sleep(POLL_S)

    async def forget(self) -> None:
        """Empty the RAM tier."""
        await self.engine.call(lambda runtime: runtime.kv.clear())

    async def clear(self) -> None:
        """Empty both tiers."""
        await self.engine.sessions.clear()

    def files(self, ids: Tokens) -> Sequence[Path]:
        """Files that hold `ids`, in order of tokens."""
        return [piece.path for piece in self.disk.store.find(ids, touch=False).pieces]

    async def ask(
        self, ids: Tokens, max_tokens: int, *, endless: bool = False, top: int | None = None
    ) -> Stream:
        """Submit a request. Raises MlxcacheError.

        With `endless`, the tokens that end a turn are never drawn. `top`: see `Job.top_logprobs`.
        """
        self._asked += 1
        ends = self.core.loaded.tokenizer.eos_token_ids if endless else ()
        sampling = Sampling(logit_bias=tuple((int(id), -100.0) for id in sorted(ends)))
        job = Job(
            f"bench-{self._asked}", Prompt(ids), sampling, max_tokens=max_tokens, top_logprobs=top
        )
        return await self.engine.submit(job)

    async def reply(self, ids: Tokens, max_tokens: int) -> None:
        """Generate a whole reply; `generated` counts its tokens."""
        await drained(await self.ask(ids, max_tokens))
        self._generated += max_tokens

    def generated(self) -> int:
        """Tokens of finished replies, and those drawn so far of running ones."""
        lanes = self.core.scheduler.lanes.all
        return self._generated + sum(len(task.out) for lane in lanes for task in lane.tasks)


async def drained(stream: Stream) -> None:
    """Read a stream to its end."""
    async for event in stream:
        if isinstance(event, Finished):
            return


class _Prepared(Engine):
    """An engine that serves the model that `prepare` returns for the loaded one."""

    def __init__(self, settings: Settings, prepare: Prepare):
        super().__init__(settings)
        self._prepare = prepare

    def make_runtime(self, loaded: Loaded) -> ModelRuntime:
        return super().make_runtime(self._prepare(loaded))


@asynccontextmanager
async def running_inside(
    model: Path, cache_dir: Path, ram: str, prepare: Prepare = lambda loaded: loaded
) -> AsyncIterator[Inside]:
    """Run an engine on `model` with a disk tier in `cache_dir`. Raises ModelError, ValueError.

    It computes nothing by itself while idle. `prepare`: changes the loaded model before it is
    served, on the MLX thread. ValueError: there is no disk tier.
    """
    settings = Settings(
        model=str(model), cache_dir=cache_dir, ram=ram, disk="100GB", no_anticipate=True
    )
    engine = _Prepared(settings, prepare)
    await engine.start()
    try:
        core = await engine.call(lambda core: core)
        if core.kv.disk is None:
            raise ValueError(f"{model}: there is no disk tier")
        yield Inside(engine, core, core.kv.disk)
    finally:
        await engine.stop()


def _put(memory: KVCache, ids: Tokens) -> None:
    lease = memory.acquire(ids, 1)
    if lease is None:
        raise ValueError(f"--ram has no room for {len(ids)} tokens")
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
