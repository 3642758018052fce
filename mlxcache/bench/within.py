"""Scenarios that run an engine in a process of its own; here those of memory.

`python -m mlxcache.bench.within NAME OPTIONS` runs one and prints the `Findings` as JSON in
its last line. OPTIONS is a JSON object with `model` and `folder` (paths) and `scale` (the fields of
`Scale`). A fatal error of the device thus ends only that process. The name `load` loads the model,
so that a download or load can be ended at any time, and prints its `path`, or an `error`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcache.bench.context import Scale
from mlxcache.bench.disk import restore_speed, write_behind
from mlxcache.bench.equality import device_error, equality, random_ids, speculation
from mlxcache.bench.findings import Findings, NotApplicable, middle
from mlxcache.bench.inside import Inside, Prepare, drained, running_inside
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.errors import ModelError
from mlxcache.model.load import ModelSpec, load
from mlxcache.typed import convert
from mlxcache.types import Text, Tokens, join_ids

PEAK, GROWTH = "Memory of one decoding reply", "Growth of a KV buffer"
SETTLE_TOKENS = 16
AFTER_GROWTH = 32
TURNS, PAUSE_S = 8, 2.0
COPIED_SHARE = 0.5
"""Share of one layer's KV above which a memory peak is reported as a copy."""


async def peak_memory(
    model: Path,
    folder: Path,
    scale: Scale,
    found: Findings,
    prepare: Prepare = lambda loaded: loaded,
) -> None:
    """Measure MLX's peak memory while one reply decodes, beyond what it holds after the reply."""
    async with running_inside(model, folder, "auto", prepare) as inside:
        ids = await _prefix(inside, scale.deep)
        layout, row = inside.core.layout, f"{scale.deep:,} tokens"
        for run in range(scale.runs):
            prompt = _continued(ids, run)
            stream = await inside.ask(prompt, 4 * scale.reply + SETTLE_TOKENS, endless=True)
            async with stream:
                await _generated(stream, SETTLE_TOKENS)
                await inside.engine.call(lambda _: mx.reset_peak_memory())
                await _generated(stream, SETTLE_TOKENS + scale.reply)
                peak = await inside.engine.call(lambda _: mx.get_peak_memory())
            await _ended(inside, stream)
            await inside.written()
            resident = await inside.engine.call(_resident)
            found.add(PEAK, row, "beyond what is resident", "bytes", max(0, peak - resident))
            found.add(PEAK, row, "KV of the reply", "bytes", layout.bytes_per_token * len(prompt))
    beyond = found.tables[PEAK][row]["beyond what is resident"].median
    one_layer = layout.bytes_per_token * len(ids) / max(1, len(layout.specs))
    copies = "no copy of the KV"
    if beyond > COPIED_SHARE * one_layer:
        copies = f"{beyond / one_layer:.1f} times the KV of one layer: a copy"
    found.notes.append(f"Peak while decoding at {row}: {copies}.")


async def growth(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Measure what growing copies over some turns, and, while memory is short, within a reply."""
    async with running_inside(model, folder, "auto") as inside:
        ids = await _grow_by_turns(inside, await _prefix(inside, scale.deep), found)
        ram = inside.core.kv.ram
        spare = max(0, ram.budget.free - ram.budget.limit // 8)
        await inside.engine.call(lambda _: ram.shared.withhold(spare))
        row = f"{len(ids):,} tokens"
        for run in range(scale.runs):
            prompt = _continued(ids, run)
            stream = await inside.ask(prompt, max(512, scale.deep // 8), endless=True)
            intervals, grown = await _intervals(inside, stream)
            if not grown:
                raise ValueError(f"no buffer grew within {len(intervals) + 1} tokens")
            near, far = split_at(intervals, grown)
            found.add(GROWTH, row, "between two tokens", "s", middle(far) or 0.0)
            found.add(GROWTH, row, "where it grows", "s", *near)
            found.add(GROWTH, row, "longest elsewhere", "s", max(far, default=0.0))


async def _grow_by_turns(inside: Inside, ids: Tokens, found: Findings) -> Tokens:
    """Let a conversation grow by a quarter in `TURNS` turns with pauses; return its token ids."""
    first, late, copied = len(ids), 0, 0
    capacity = await inside.engine.call(_largest)
    for turn in range(TURNS):
        await asyncio.sleep(PAUSE_S)
        before = await inside.engine.call(_largest)
        copied += len(ids) * (before > capacity)
        ids = join_ids(ids, random_ids(first // (4 * TURNS), seed=50 + turn))
        await drained(await inside.ask(ids, 1))
        capacity = await inside.engine.call(_largest)
        late += capacity > before
        copied += len(ids) * (capacity > before)
    found.notes.append(
        f"{TURNS} turns from {first:,} to {len(ids):,} tokens, with pauses: growing copied "
        f"{copied / (len(ids) - first):.1f} positions for each new one, and {late} turns waited."
    )
    return ids


def _largest(core: ModelRuntime) -> int:
    return max((lineage.capacity for lineage in core.kv.ram.idle.values()), default=0)


async def _intervals(inside: Inside, stream: Any) -> tuple[list[float], list[int]]:
    """Return seconds between tokens until a while after a buffer grew, and where buffers grew."""
    intervals: list[float] = []
    grown: list[int] = []
    before, capacity = 0.0, 0
    async with stream:
        async for event in stream:
            if not isinstance(event, Text):
                continue
            now, held = time.perf_counter(), _capacity(inside)
            if before:
                if held > capacity > 0:
                    grown.append(len(intervals))
                intervals.append(now - before)
            before, capacity = now, held or capacity
            if grown and len(intervals) - grown[0] > AFTER_GROWTH:
                break
    await _ended(inside, stream)
    return intervals, grown


def split_at(intervals: Sequence[float], grown: Sequence[int]) -> tuple[list[float], list[float]]:
    """Split intervals between tokens into those in which a buffer grew and all others.

    Steps are pipelined, so growth may lengthen a neighbouring interval instead. For each index in
    `grown`, the first list therefore has the longest of that interval and its two neighbours. The
    second list has none of the three.
    """
    near = {at for number in grown for at in range(max(0, number - 1), number + 2)}
    longest = [max(intervals[max(0, number - 1) : number + 2]) for number in grown]
    return longest, [one for at, one in enumerate(intervals) if at not in near]


def _capacity(inside: Inside) -> int:
    """Return the sum of the tokens that the KV buffers of all running replies can hold."""
    lanes = inside.core.scheduler.lanes.all
    leases = [task.lease for lane in lanes for task in lane.tasks]
    return sum(lease.lineage.capacity for lease in leases if lease is not None)


async def _prefix(inside: Inside, tokens: int) -> Tokens:
    """Put KV of `tokens` random tokens into RAM: random KV, or computed where it must be."""
    ids = random_ids(tokens, seed=7)
    if inside.plain:
        await inside.put(ids)
    else:
        await drained(await inside.ask(ids, 1))
    return ids


def _continued(ids: Tokens, run: int) -> Tokens:
    return join_ids(ids, random_ids(8, seed=100 + run))


async def _ended(inside: Inside, stream: Any) -> None:
    await inside.until(lambda: stream.over)


async def _generated(stream: Any, count: int) -> None:
    """Read a reply until it has `count` tokens by its record: text that is read late is joined."""
    async for _ in stream:
        if stream.record.generated_tokens >= count:
            return
    raise ValueError(f"the reply ended before it had {count} tokens")


def _resident(_: object) -> int:
    mx.synchronize()
    return int(mx.get_active_memory())


Scenario = Callable[[Path, Path, Scale, Findings], Coroutine[Any, Any, None]]

SCENARIOS: Mapping[str, Scenario] = {
    one.__name__: one
    for one in (
        equality, device_error, speculation, restore_speed, write_behind, peak_memory, growth,
    )
}  # fmt: skip


def answer(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if name == "load":
        try:
            return {"path": str(load(ModelSpec(options["model"])).path)}
        except ModelError as error:
            return {"error": str(error)}
    scale, found = convert(Scale, options["scale"]), Findings(name, "")
    try:
        asyncio.run(SCENARIOS[name](Path(options["model"]), Path(options["folder"]), scale, found))
    except NotApplicable as why:
        found = Findings(name, "", "not applicable", str(why))
    return found.as_json()


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
    os._exit(0)  # MLX's destructors may abort while a thread of it ends
