"""Speed of restoring a prefix from disk, relative to plain reading of the same files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxcache.bench import pagecache
from mlxcache.bench.checks import Check, Measured
from mlxcache.bench.inside import Inside, drained, running_inside
from mlxcache.bench.measure import middle
from mlxcache.types import Tokens, join_ids, token_ids

TOTAL_BYTES = 1_100_000_000
"""Total bytes of KV to restore."""

LEAST = 0.70
"""Minimum speed of restoring, including checksums and look-up, relative to plain reading."""

CACHED_BYTES_S = 10e9
"""Bytes per second above which plain reading on a Mac must have used the page cache."""

PATIENCE_S = 120.0


def restore_speed(
    model: Path, folder: Path, runs: int, on_step: Callable[[str], None], total: int = TOTAL_BYTES
) -> Measured:
    """Restore `total` bytes of KV `runs` times, each time paired with plain reading of the files.

    Restoring is timed from a request's submission until its prefix has been looked up, verified and
    copied into a lineage. `model` is the model's folder, and `folder` gets the cache. `on_step` is
    called with a text at each step. Returns the speeds in bytes per second, with a bound on their
    ratio if the files could be dropped from the page cache. Blocks. Raises ValueError if the model
    caches more than KV or not all of it was restored; also MlxcacheError and OSError.
    """
    return asyncio.run(_play(model, folder, runs, on_step, total))


async def _play(
    model: Path, folder: Path, runs: int, on_step: Callable[[str], None], total: int
) -> Measured:
    async with running_inside(model, folder, ram=f"{4 * total + (2 << 30)}") as inside:
        ids = inside.tokens(total, 1)
        await inside.put(ids)
        await inside.schedule_write(ids)
        await inside.written()
        files = inside.files(ids)
        nbytes = sum(file.stat().st_size for file in files)
        plain, restored, how = [], [], pagecache.drop(files)
        for run in range(runs):
            for ours in (run % 2 == 0, run % 2 == 1):
                on_step(f"{run + 1}/{runs} {'restoring' if ours else 'reading'}")
                if ours:
                    restored.append(await _restore(inside, ids, files, run))
                else:
                    pagecache.drop(files)
                    plain.append(await asyncio.to_thread(_read, files))
    return _held(nbytes, len(files), plain, restored, how)


async def _restore(inside: Inside, ids: Tokens, files: Sequence[Path], run: int) -> float:
    """Return the seconds from submitting a request that continues `ids` until these are restored.

    Their KV is in `files`, which are dropped from the page cache before. `run` is the number of the
    repetition, which selects the tokens after `ids`. Raises ValueError if not all were restored.
    """
    await inside.forget()
    await inside.written()
    more = token_ids([run % inside.vocabulary] * 8)
    pagecache.drop(files)
    began = time.perf_counter()
    stream = await inside.ask(join_ids(ids, more), 1)
    admitted = await stream.admitted(PATIENCE_S)
    seconds = time.perf_counter() - began
    if admitted is None or admitted.restored_tokens != len(ids):
        raise ValueError(f"not all of {len(ids)} tokens on disk were restored: {admitted}")
    await drained(stream)
    await inside.written()
    return seconds


def _read(files: Sequence[Path]) -> float:
    began = time.perf_counter()
    pagecache.read(files)
    return time.perf_counter() - began


def _held(
    nbytes: int, files: int, plain: list[float], restored: list[float], how: str | None
) -> Measured:
    ratio = middle(a / b for a, b in zip(plain, restored, strict=True))
    plain_s, restored_s = middle(plain), middle(restored)
    assert ratio is not None
    assert plain_s is not None
    assert restored_s is not None
    plain_rate = nbytes / plain_s
    if how == pagecache.BY_MSYNC and plain_rate > CACHED_BYTES_S:
        how = None
    figures = {
        "bytes": nbytes,
        "files": files,
        "plain_bytes_s": plain_rate,
        "restored_bytes_s": nbytes / restored_s,
        "ratio": ratio,
        "page_cache": f"dropped by {how}" if how else "not dropped: no bound",
        "plain_s": plain,
        "restored_s": restored,
    }
    bound = Check("restoring, by plain reading of the same files", ratio, LEAST, least=True)
    return Measured(figures, [bound] if how else [])
