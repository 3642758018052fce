"""Speed of the disk tier: restoring beside plain reading, and replies beside writes."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from mlxcache.bench.context import Scale
from mlxcache.bench.findings import Findings, middle
from mlxcache.bench.inside import Inside, drained, running_inside
from mlxcache.store.folder import write
from mlxcache.types import Tokens, join_ids, token_ids

DISK = "Disk tier"
QUICK = "a quick run writes too little"


def _running(model: Path, folder: Path, scale: Scale) -> AbstractAsyncContextManager[Inside]:
    return running_inside(model, folder, ram=f"{4 * scale.disk_bytes + (2 << 30)}")


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

RESTORE_SHARE = 0.70
"""Minimum speed of restoring, including checksums and look-up, relative to plain reading."""

CACHED_BYTES_S = 10e9
"""Bytes per second above which plain reading on a Mac must have used the page cache."""

PATIENCE_S = 120.0


async def restore_speed(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Restore KV several times, each time paired with plain reading of the files.

    Restoring is timed from a request's submission until its prefix has been looked up, verified and
    copied into a lineage. The ratio has no bound if the files could not be dropped from the page
    cache. Raises NotApplicable if the model caches more than KV, and ValueError if not all was
    restored.
    """
    plain: list[float] = []
    restored: list[float] = []
    async with _running(model, folder, scale) as inside:
        ids = inside.tokens(scale.disk_bytes, 1)
        await inside.put(ids)
        await inside.write(ids)
        files = inside.files(ids)
        how = drop(files)
        for run in range(scale.runs):
            for ours in (run % 2 == 0, run % 2 == 1):
                if ours:
                    restored.append(await _restore(inside, ids, files, run))
                else:
                    drop(files)
                    began = time.perf_counter()
                    await asyncio.to_thread(read, files)
                    plain.append(time.perf_counter() - began)
        sizes = [file.stat().st_size for file in files]
    note_restored(found, sizes, list(zip(plain, restored, strict=True)), how, quick=scale.quick)


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


def note_restored(
    found: Findings,
    sizes: Sequence[int],
    pairs: Sequence[tuple[float, float]],
    how: str | None,
    *,
    quick: bool = False,
) -> None:
    """Add the speeds of pairs of reading and restoring, which took these seconds."""
    nbytes, row = sum(sizes), "restore_speed"
    plain, restored = zip(*pairs, strict=True)
    ratio = median(a / b for a, b in pairs)
    if how == BY_MSYNC and nbytes / median(plain) > CACHED_BYTES_S:
        how = None
    found.add(DISK, row, "size", "bytes", nbytes)
    found.add(DISK, row, "files", "", len(sizes))
    found.add(DISK, row, "plain", "bytes/s", *(nbytes / seconds for seconds in plain))
    found.add(DISK, row, "restored", "bytes/s", *(nbytes / seconds for seconds in restored))
    found.add(DISK, row, "ratio", "", ratio)
    found.add(DISK, row, "plain, time", "s", *plain)
    found.add(DISK, row, "restored, time", "s", *restored)
    dropped = f"dropped by {how}" if how else "not dropped: no bound"
    found.notes.append(f"page cache {dropped}")
    why_not = QUICK if quick else None if how else "the page cache was not dropped"
    name = "restoring, by plain reading of the same files"
    found.hold(name, ratio, RESTORE_SHARE, least=True, why_not=why_not)


# -- writing ---------------------------------------------------------------------------------------

WRITE_SHARE = 0.9
"""Minimum tokens/s beside writes of the disk tier, relative to writes of a plain thread."""

REPLY_TOKENS, SETTLED_TOKENS = 256, 16
"""Tokens of a reply, and tokens generated before timing starts.

Replies are so short that the last tokens take no longer than the first."""


async def write_behind(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Measure the speed of a reply while the disk tier, or a plain thread, writes a session's KV.

    The plain thread writes files of the same sizes in the same way: it syncs each and then renames
    it. Raises NotApplicable if the model caches more than KV, ValueError if no token was generated.
    """
    beside = folder / "plain"
    beside.mkdir(parents=True)
    alone: list[float] = []
    paces: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    async with _running(model, folder, scale) as inside:
        sizes = await _sizes(inside, scale.disk_bytes)
        data = os.urandom(max(sizes))
        for run in range(scale.runs):
            ids = inside.tokens(scale.disk_bytes, 10 + run)
            await inside.put(ids)
            for ours in (run % 2 == 0, run % 2 == 1):
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
    _note_written(sizes, alone, paces, scale, found)


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


def _note_written(
    sizes: Sequence[int],
    alone: Sequence[float],
    paces: dict[bool, list[tuple[float, float]]],
    scale: Scale,
    found: Findings,
) -> None:
    nbytes, row = sum(sizes), "write_behind"
    store, plain = (list(zip(*paces[ours], strict=True)) for ours in (True, False))
    ratio = middle(a / b if b else None for a, b in zip(store[0], plain[0], strict=True))
    if ratio is None:
        raise ValueError("nothing was generated while the plain files were written: try again")
    found.add(DISK, row, "size", "bytes", nbytes)
    found.add(DISK, row, "files", "", len(sizes))
    found.add(DISK, row, "alone", "tokens/s", *alone)
    found.add(DISK, row, "beside plain", "tokens/s", *plain[0])
    found.add(DISK, row, "beside store", "tokens/s", *store[0])
    found.add(DISK, row, "plain", "bytes/s", *(nbytes / seconds for seconds in plain[1]))
    found.add(DISK, row, "store", "bytes/s", *(nbytes / seconds for seconds in store[1]))
    found.add(DISK, row, "ratio", "", ratio)
    name = "tokens/s beside a session being written, by those beside a plain writer"
    found.hold(name, ratio, WRITE_SHARE, least=True, why_not=QUICK if scale.quick else None)
