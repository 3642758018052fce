"""Soak: processes that save at full speed are killed at random; durable KV must stay.

`python -m tests.store.soak [KILLS]` does it 200 times; the suite does it a few.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlxcache.errors import DiskFull
from tests.store.content import assert_right, branch, kv, on_disk, opened, snapshot, tokens

ROOT = Path(__file__).parents[2]
LARGE, SMALL = 10**9, 3_000_000
"""Caps: one without and one with much eviction."""


def conversation(seed: int):
    if seed % 3 == 0:
        return branch(tokens(2000, seed // 9), 700, 2000, seed + 1_000_000)
    return tokens(2000, seed)


def write(folder: Path, limit: int, seed: int) -> None:
    pace = random.Random(seed)
    with opened(folder, limit) as store:
        print("open", flush=True)
        while True:
            ids = conversation(seed)
            end = 0
            while end < len(ids):
                start = store.find(ids[:end]).length // 64 * 64
                end = min(len(ids), end + pace.randrange(1, 900))
                try:
                    store.write_run(ids[:end], start, kv(ids[:end], start, 20))
                    print("run", seed, end, flush=True)
                    if pace.random() < 0.5:
                        store.write_checkpoint(ids[:end], snapshot(ids[:end]))
                        print("checkpoint", seed, end, flush=True)
                except DiskFull:
                    break
            seed += 1


def kill_once(folder: Path, limit: int, seed: int, writers: int) -> list[list[str]]:
    pace = random.Random(seed)
    command = [sys.executable, "-m", "tests.store.soak", "write", str(folder), str(limit)]
    children = [
        subprocess.Popen(
            [*command, str(seed * 1000 + 300 * k)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for k in range(writers)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    time.sleep(pace.random() * 0.2)
    said: list[list[str]] = []
    for child in children:
        child.kill()
        out, _ = child.communicate()
        whole = out[: out.rfind("\n") + 1]
        said += [line.split() for line in whole.splitlines()]
    return said


def assert_sound(folder: Path, limit: int, said: list[list[str]]) -> None:
    with opened(folder, limit) as store:
        assert store.check() == []
        assert store.stats().used_bytes == on_disk(folder) <= limit
        assert not list(folder.rglob(".*.tmp"))
        locks = [path.name for path in (folder / "locks").iterdir()]
        assert locks == [store.context.lock.name]
        if limit == SMALL:
            for number in {int(seed) for _, seed, _ in said}:
                assert_right(store, conversation(number), 20)
            return
        ends: dict[int, int] = {}
        for kind, seed, end in said:
            if kind == "run":
                ends[int(seed)] = max(ends.get(int(seed), 0), int(end))
        for number, length in ends.items():
            assert assert_right(store, conversation(number), 20).length >= length
        newest = {int(seed): int(end) for kind, seed, end in said if kind == "checkpoint"}
        for number, position in newest.items():
            saved = store.find(conversation(number)).checkpoints
            assert position in [one.position for one in saved]


def soak(kills: int, folder: Path, seed: int = 0) -> int:
    """Kill `kills` times, under both caps, with one writer and two; returns the lines."""
    lines = 0
    for turn in range(kills):
        limit = SMALL if turn % 4 == 3 else LARGE
        place = folder / str(limit)
        said = kill_once(place, limit, seed + turn, 1 + turn % 2)
        assert_sound(place, limit, said)
        lines += len(said)
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
        with tempfile.TemporaryDirectory() as temporary:
            said_lines = soak(count, Path(temporary), random.randrange(10**6))
        print(f"{count} kills, {said_lines} durable saves, nothing lost")
