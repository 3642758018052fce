"""Speed of the disk tier: restoring beside plain reading, and replies beside writes."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mlxcache.bench.checks import Check, Measured, middle
from mlxcache.bench.inside import Inside, drained, running_inside
from mlxcache.store.folder import write
from mlxcache.types import Tokens, join_ids, token_ids

OnStep = Callable[[str], None]

# -- the page cache --------------------------------------------------------------------------------

EVERYTHING = Path("/proc/sys/vm/drop_caches")
READ_BYTES = 8 << 20
BY_MSYNC = "msync"
MS_INVALIDATE = 2
"""Flag of msync(2), the same number on macOS and Linux."""


def drop(files: Sequence[Path]) -> str | None:
    """Drop `files`, which must have been synced, from the page cache; return the method's name.

    Returns None if this system has no method, or if msync failed. Where this process may write to
    `EVERYTHING`, as root can on Linux, the whole page cache is dropped. On a Mac the method is
    `msync(MS_INVALIDATE)`, which the system may ignore: files are then read faster than the disk
    can deliver.
    """
    try:
        EVERYTHING.write_text("3")
    except OSError:
        pass
    else:
        return str(EVERYTHING)
    if sys.platform == "darwin":
        return BY_MSYNC if all(map(_invalidated, files)) else None
    if not hasattr(os, "posix_fadvise"):
        return None
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "posix_fadvise"


def _invalidated(file: Path) -> bool:
    size = file.stat().st_size
    if not size:
        return True
    library = ctypes.CDLL(None, use_errno=True)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = library.msync(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), MS_INVALIDATE
        )
        del start  # a mapping with a pointer into it cannot be closed
    return not failed


def read(files: Sequence[Path]) -> int:
    buffer, total = memoryview(bytearray(READ_BYTES)), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


# -- restoring -------------------------------------------------------------------------------------

RESTORE_BYTES = 1_100_000_000
RESTORE_SHARE = 0.70
"""Minimum speed of restoring, including checksums and look-up, relative to plain reading."""

CACHED_BYTES_S = 10e9
"""Bytes per second above which plain reading on a Mac must have used the page cache."""

PATIENCE_S = 120.0


def restore_speed(
    model: Path, folder: Path, runs: int, on_step: OnStep, total: int = RESTORE_BYTES
) -> Measured:
    """Restore `total` bytes of KV `runs` times, each time paired with plain reading of the files.

    Restoring is timed from a request's submission until its prefix has been looked up, verified and
    copied into a lineage. The ratio has no bound if the files could not be dropped from the page
    cache. Raises ValueError if the model caches more than KV or not all of it was restored.
    """

    async def play() -> Measured:
        async with running_inside(model, folder, ram=f"{4 * total + (2 << 30)}") as inside:
            ids = inside.tokens(total, 1)
            await inside.put(ids)
            await inside.write(ids)
            files = inside.files(ids)
            plain, restored, how = [], [], drop(files)
            for run in range(runs):
                for ours in (run % 2 == 0, run % 2 == 1):
                    on_step(f"{run + 1}/{runs} {'restoring' if ours else 'reading'}")
                    if ours:
                        restored.append(await _restore(inside, ids, files, run))
                    else:
                        drop(files)
                        began = time.perf_counter()
                        await asyncio.to_thread(read, files)
                        plain.append(time.perf_counter() - began)
            nbytes = sum(file.stat().st_size for file in files)
        return restore_figures(nbytes, len(files), plain, restored, how)

    return asyncio.run(play())


async def _restore(inside: Inside, ids: Tokens, files: Sequence[Path], run: int) -> float:
    """Return the seconds from submitting a request after `ids` until these are restored."""
    await inside.forget()
    await inside.written()
    more = token_ids([run % inside.vocabulary] * 8)
    drop(files)
    began = time.perf_counter()
    stream = await inside.ask(join_ids(ids, more), 1)
    admitted = await stream.admitted(PATIENCE_S)
    seconds = time.perf_counter() - began
    if admitted is None or admitted.restored_tokens != len(ids):
        raise ValueError(f"not all of {len(ids)} tokens on disk were restored: {admitted}")
    await drained(stream)
    await inside.written()
    return seconds


def restore_figures(
    nbytes: int, files: int, plain: list[float], restored: list[float], how: str | None
) -> Measured:
    """Return the speeds of pairs of reading and restoring, which took these seconds."""
    ratio = middle(a / b for a, b in zip(plain, restored, strict=True)) or 0.0
    plain_rate = nbytes / (middle(plain) or 1)
    if how == BY_MSYNC and plain_rate > CACHED_BYTES_S:
        how = None
    figures = {
        "bytes": nbytes,
        "files": files,
        "plain_bytes_s": plain_rate,
        "restored_bytes_s": nbytes / (middle(restored) or 1),
        "ratio": ratio,
        "page_cache": f"dropped by {how}" if how else "not dropped: no bound",
        "plain_s": plain,
        "restored_s": restored,
    }
    name = "restoring, by plain reading of the same files"
    bound = Check(name, ratio, RESTORE_SHARE, least=True)
    return Measured(figures, [bound] if how else [])


# -- writing ---------------------------------------------------------------------------------------

WRITE_BYTES = 1_000_000_000
WRITE_SHARE = 0.9
"""Minimum tokens/s beside writes of the disk tier, relative to writes of a plain thread."""

REPLY_TOKENS, SETTLED_TOKENS = 256, 16
"""Tokens of a reply, and tokens generated before timing starts.

Replies are so short that the last tokens take no longer than the first."""


def write_beside(
    model: Path, folder: Path, runs: int, on_step: OnStep, total: int = WRITE_BYTES
) -> Measured:
    """Measure the speed of a reply while the disk tier, or a plain thread, writes `total` bytes.

    The plain thread writes files of the same sizes in the same way: it syncs each and then renames
    it. Raises ValueError if the model caches more than KV, or if no token was generated.
    """
    return asyncio.run(_write_beside(model, folder, runs, on_step, total))


async def _write_beside(
    model: Path, folder: Path, runs: int, on_step: OnStep, total: int
) -> Measured:
    beside = folder / "plain"
    beside.mkdir(parents=True)
    alone: list[float] = []
    paces: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    async with running_inside(model, folder, ram=f"{4 * total + (2 << 30)}") as inside:
        on_step("0 the first session")
        sizes = await _sizes(inside, total)
        data = os.urandom(max(sizes))
        for run in range(runs):
            ids = inside.tokens(total, 10 + run)
            await inside.put(ids)
            for ours in (run % 2 == 0, run % 2 == 1):
                on_step(f"{run + 1}/{runs} beside {'the store' if ours else 'a plain thread'}")
                async with _decoding(inside, run):
                    if not paces[True] or not ours:
                        alone.append((await _pace(inside, asyncio.sleep(1.0)))[0])
                    work = (
                        inside.write(ids)
                        if ours
                        else asyncio.to_thread(_write_plainly, beside, sizes, data)
                    )
                    paces[ours].append(await _pace(inside, work))
            await inside.clear()
            for file in beside.iterdir():
                file.unlink()
    return _write_figures(sizes, alone, paces[True], paces[False])


async def _sizes(inside: Inside, total: int) -> Sequence[int]:
    """Return the sizes of the files of a session, which is written to disk and cleared."""
    ids = inside.tokens(total, 1)
    await inside.put(ids)
    await inside.write(ids)
    sizes = [file.stat().st_size for file in inside.files(ids)]
    await inside.clear()
    return sizes


def _write_plainly(folder: Path, sizes: Sequence[int], data: bytes) -> None:
    for number, size in enumerate(sizes):
        write(folder / ".temp", folder / str(number), [memoryview(data)[:size]])


@asynccontextmanager
async def _decoding(inside: Inside, run: int) -> AsyncIterator[None]:
    """Have replies to one prompt generated, one after another, while the body runs."""
    prompt = inside.tokens(32 * inside.core.layout.bytes_per_token, 500 + run)
    over = asyncio.Event()

    async def go_on() -> None:
        while not over.is_set():
            await inside.reply(prompt, REPLY_TOKENS)

    replying = asyncio.ensure_future(go_on())
    before = inside.generated()
    await inside.until(lambda: inside.generated() >= before + SETTLED_TOKENS or replying.done())
    try:
        yield
    finally:
        over.set()
        await replying
        await inside.written()


async def _pace(inside: Inside, work: Coroutine[Any, Any, None]) -> tuple[float, float]:
    """Await `work`; return the tokens per second generated meanwhile, and the seconds it took."""
    before, began = inside.generated(), time.perf_counter()
    await work
    seconds = time.perf_counter() - began
    return (inside.generated() - before) / seconds, seconds


def _write_figures(
    sizes: Sequence[int],
    alone: list[float],
    store: list[tuple[float, float]],
    plain: list[tuple[float, float]],
) -> Measured:
    """Return medians; `store` and `plain` have a pace and seconds for each repetition."""
    paces, plain_paces = ([pace for pace, _ in one] for one in (store, plain))
    store_s, plain_s = (middle(seconds for _, seconds in one) or 1 for one in (store, plain))
    ratio = middle(a / b if b else None for a, b in zip(paces, plain_paces, strict=True))
    if ratio is None:
        raise ValueError("nothing was generated while the plain files were written: try again")
    figures = {
        "bytes": sum(sizes),
        "files": len(sizes),
        "alone_tokens_s": middle(alone),
        "beside_plain_tokens_s": middle(plain_paces),
        "beside_store_tokens_s": middle(paces),
        "plain_bytes_s": sum(sizes) / plain_s,
        "store_bytes_s": sum(sizes) / store_s,
        "ratio": ratio,
        "store": paces,
        "plain": plain_paces,
    }
    name = "tokens/s beside a session being written, by those beside a plain writer"
    return Measured(figures, [Check(name, ratio, WRITE_SHARE, least=True)])
