"""An engine with a model, in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mlxcache.config import Settings
from mlxcache.engine.engine import Engine


@asynccontextmanager
async def started(
    model: Path,
    folder: Path,
    *,
    remote: Any = None,
    make: Any = Engine,
    **more: Any,
) -> AsyncIterator[Engine]:
    settings = {"ram": "300MB", "disk": "off"} | more
    engine = make(Settings(model=str(model), cache_dir=folder, **settings), remote=remote)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def settled(engine: Engine) -> None:
    """Wait until all that is anticipated is computed."""
    runtime = await engine.call(lambda runtime: runtime)
    await asyncio.to_thread(runtime.next_turns.flush)
    while await engine.call(lambda core: core.scheduler.idle_prefill.ready):
        pass  # each call lets the thread compute one chunk
