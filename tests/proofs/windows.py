"""Long conversations of models with sliding windows, in little more memory than mlx-lm takes.

`python -m tests.proofs.windows [NAME]...` holds a conversation in turns of 700 tokens with each
model, under a budget of 1.5 times what mlx-lm's caches take at its end. It prints the most bytes
held in RAM, the bytes written to disk, and the tokens that turns, edits, branches and a restart
feed. It ends with status 1 if a bound is missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from mlxcache.scheduling.prefill import Limits
from mlxcache.scheduling.task import Task
from tests.scheduled import Bench, prompt
from tests.toys.toy import make_toy

HEAD, ASKED, REPLIED, GENERATION = 2000, 660, 40, 4
PENDING = 1 << 20

SHAPES: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "gemma3": ("gemma3", 1024, {"sliding_window_pattern": 6}),
    "gemma4": ("gemma4", 1024, {}),
    "gpt-oss": ("gpt_oss", 128, {}),
    "full": ("llama", 128, {}),
}
"""The family of each, its window, and more of its configuration; `full` is to compare with."""

HELD, MORE = 1.35, 64
"""Bounds: bytes in RAM by mlx-lm's; tokens that a next turn feeds besides the new ones."""


class Talk:
    """A conversation that goes on in turns of 700 tokens."""

    def __init__(self, bench: Bench, ids: list[int], marks: list[int]):
        self.bench, self.ids, self.marks = bench, ids, marks
        self.rng = np.random.default_rng(len(ids))

    def turn(self, tokens: int = ASKED) -> int:
        """Ask with `tokens` more; return how many tokens were fed."""
        self.ids += prompt(self.rng, tokens)
        self.marks.append(len(self.ids) - GENERATION)
        task: Task = self.bench.ask(self.ids, tokens=REPLIED, marks=self.marks)
        fed = len(self.ids) - task.record.cached_tokens
        self.ids += task.out
        return fed

    def before(self, position: int) -> Talk:
        return Talk(self.bench, self.ids[:position], [at for at in self.marks if at <= position])


def play(name: str, folder: Path, tokens: int) -> bool:
    family, window, more = SHAPES[name]
    made = make_toy(
        folder / "model", family, layers=6, hidden=32, heads=2, kv_heads=1, head_dim=16,
        window=window, context=2 * tokens, more=more,
    )  # fmt: skip
    bench = Bench(made)
    bench.limits = Limits(1, 2048, 2 * tokens, 1 << 30)
    layout = bench.kv.layout
    full, mark = tokens * layout.bytes_per_token, layout.checkpoint_bytes
    ram = int(1.5 * (full + mark)) + PENDING
    disk = bench.open_disk(folder / "disk", ram=ram, pending=PENDING, limit=1 << 40)
    began, held, fed = time.monotonic(), 0, list[int]()
    talk = Talk(bench, prompt(np.random.default_rng(1), HEAD), [HEAD])
    talk.turn()
    while len(talk.ids) < tokens:
        fed.append(talk.turn() - ASKED)
        held = max(held, bench.kv.budget.used - PENDING)
    edited = talk.before(talk.marks[-2] + GENERATION + REPLIED).turn(300)
    middle = talk.before(tokens // 2)
    parted = [middle.turn(), middle.turn()]
    disk.write_behind.drain(60)
    written = disk.store.stats().written_bytes
    bench.kv.close(60)
    bench.open_disk(folder / "disk", ram=ram, pending=PENDING, limit=1 << 40)
    restarted = talk.turn()
    print(
        f"{name}: held {held / (full + mark):.2f} of {full + mark:,}; a mark is {mark / full:.3f} "
        f"of full attention's KV; written {written / full:.2f} of it; a turn of {ASKED} fed "
        f"{ASKED} + {median(fed):.0f}, most {ASKED} + {max(fed)}; edited message of 300: {edited}; "
        f"from the middle: {parted}; after a restart: {restarted}; "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    return held <= HELD * (full + mark) and max(fed) <= MORE


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
    tokens: Annotated[int, typer.Option(help="Length of each conversation.")] = 100_000,
) -> None:
    """Hold long conversations with sliding windows under a small budget."""
    with tempfile.TemporaryDirectory() as folder:
        fine = [play(name, Path(folder) / name, tokens) for name in names or SHAPES]
    sys.exit(not all(fine))


if __name__ == "__main__":
    typer.run(main)
