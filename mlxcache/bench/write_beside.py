"""Speed of a reply while another session is being written to disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxcache.bench.checks import Check, Measured
from mlxcache.bench.inside import Inside, running_inside
from mlxcache.bench.measure import middle
from mlxcache.store.folder import write
from mlxcache.types import Tokens

TOTAL_BYTES = 1_000_000_000
LEAST = 0.9
"""Minimum tokens/s beside writes of the disk tier, relative to writes of a plain thread."""

REPLY_TOKENS, SETTLED_TOKENS = 256, 16
"""Tokens of a reply, and tokens generated before timing starts.

Replies are so short that the last tokens take no longer than the first."""

Work = Coroutine[Any, Any, None]


@dataclass(slots=True)
class Paces:
    """Speed of a reply beside writes, and duration of the writes: one item per repetition.

    `alone`, `plain` and `store` are tokens per second, and `plain_s` and `store_s` the seconds of
    writing. `alone` is measured without writing, `store` and `store_s` while the disk tier writes,
    and `plain` and `plain_s` while a plain thread writes files of the same sizes without the disk
    tier.
    """

    alone: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    store_s: list[float] = field(default_factory=list)


def write_beside(
    model: Path, folder: Path, runs: int, on_step: Callable[[str], None], total: int = TOTAL_BYTES
) -> Measured:
    """Measure the speed of a reply while the disk tier, or a plain thread, writes `total` bytes.

    Both are measured `runs` times. The plain thread writes files of the same sizes in the same way:
    it syncs each and then renames it. `model` is the model's folder, and `folder` gets all files.
    `on_step` is called with a text at each step. Returns the speeds, with a bound on the speed
    beside the disk tier relative to that beside the plain thread. Blocks. Raises ValueError if the
    model caches more than KV, or if no token was generated beside the plain thread; also
    MlxcacheError and OSError.
    """
    return asyncio.run(_play(model, folder, runs, on_step, total))


async def _play(
    model: Path, folder: Path, runs: int, on_step: Callable[[str], None], total: int
) -> Measured:
    paces, beside = Paces(), folder / "plain"
    beside.mkdir(parents=True)
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
                    if not paces.store or not ours:
                        paces.alone.append((await _pace(inside, asyncio.sleep(1.0)))[0])
                    if ours:
                        pace = await _pace(inside, _stored(inside, ids))
                        paces.store.append(pace[0])
                        paces.store_s.append(pace[1])
                    else:
                        pace = await _pace(inside, asyncio.to_thread(_plainly, beside, sizes, data))
                        paces.plain.append(pace[0])
                        paces.plain_s.append(pace[1])
            await inside.clear()
            for file in beside.iterdir():
                file.unlink()
    return _held(sum(sizes), len(sizes), paces)


async def _sizes(inside: Inside, total: int) -> Sequence[int]:
    """Write a session with `total` bytes of KV to disk, and return the sizes of its files in bytes.

    Afterwards RAM and disk are cleared.
    """
    ids = inside.tokens(total, 1)
    await inside.put(ids)
    await _stored(inside, ids)
    sizes = [file.stat().st_size for file in inside.files(ids)]
    await inside.clear()
    return sizes


async def _stored(inside: Inside, ids: Tokens) -> None:
    """Write the KV of `ids`, which is in RAM, to disk by the disk tier; wait until it is there."""
    await inside.schedule_write(ids)
    await inside.written()


def _plainly(folder: Path, sizes: Sequence[int], data: bytes) -> None:
    """Write files of the given `sizes` in bytes, each the beginning of `data`. Blocks."""
    for number, size in enumerate(sizes):
        write(folder / ".temp", folder / str(number), [memoryview(data)[:size]])


@asynccontextmanager
async def _decoding(inside: Inside, run: int) -> AsyncIterator[None]:
    """Have the engine `inside` generate replies to one prompt, one after another.

    For `async with`: its body begins once replies are being generated. `run` is the number of the
    repetition, which selects the prompt. Waits after the body until the last reply has ended and is
    written to disk.
    """
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


async def _pace(inside: Inside, work: Work) -> tuple[float, float]:
    """Await `work`, and measure how fast the engine `inside` generates tokens meanwhile.

    The caller keeps the engine generating, by `_decoding`. Returns the tokens per second, and the
    seconds that `work` took.
    """
    before, began = inside.generated(), time.perf_counter()
    await work
    seconds = time.perf_counter() - began
    return (inside.generated() - before) / seconds, seconds


def _held(nbytes: int, files: int, paces: Paces) -> Measured:
    """Return the medians of `paces`, with a bound on `store` relative to `plain`.

    Both wrote `nbytes` bytes in `files` files. Raises ValueError if no token was generated while
    the plain thread wrote, in any repetition.
    """
    pairs = zip(paces.store, paces.plain, strict=True)
    ratio = middle(a / b if b else None for a, b in pairs)
    if ratio is None:
        raise ValueError("nothing was generated while the plain files were written: try again")
    figures = {
        "bytes": nbytes,
        "files": files,
        "alone_tokens_s": middle(paces.alone),
        "beside_plain_tokens_s": middle(paces.plain),
        "beside_store_tokens_s": middle(paces.store),
        "plain_bytes_s": nbytes / (middle(paces.plain_s) or 1),
        "store_bytes_s": nbytes / (middle(paces.store_s) or 1),
        "ratio": ratio,
        "store": paces.store,
        "plain": paces.plain,
    }
    name = "tokens/s beside a session being written, by those beside a plain writer"
    return Measured(figures, [Check(name, ratio, LEAST, least=True)])
