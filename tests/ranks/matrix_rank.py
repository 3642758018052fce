"""One process of the matrix for divided models: `python -m tests.ranks.matrix_rank PLAN`.

Rank 0, or a process that has the whole model, runs the cells and prints a line of JSON for each.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.model import kv
from mlxcache.model.kv import Layout
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.ranks.group import end_process, place_from
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.ranks.setup import Rank
from mlxcache.scheduling.decoder import DecoderRow
from mlxcache.scheduling.parts import WHOLE
from mlxcache.scheduling.task import Task
from mlxcache.store.parts import Mode
from mlxcache.store.store import Store
from mlxcache.types import token_ids
from tests.ranks.cells import CELLS
from tests.scheduling.matrix import Checked, Logprobs, cold_logprobs

HALF_EPSILON, HALF_ROUNDINGS = 2.0**-8, 64
"""Distance of the next bfloat16 after 1; roundings to it on the way to one logit of a toy."""

CHOOSING = {"deepseek_v3": False, "deepseek_v32": True, "glm_moe_dsa": True}
"""Families of which rounding may change the choice of experts, or of tokens to attend to.

A reply after another prefill may then have other probabilities than a cold one, with one process
too. The value tells whether this happens in float32 as well as in bfloat16.
"""


class Plan(msgspec.Struct, frozen=True):
    """What all processes of a group are to do.

    `model`: its folder. `folder`: for files. `mode`: how the model is divided; None if it is not.
    `half`: its weights are bfloat16.
    """

    model: str
    folder: str
    mode: Mode | None
    half: bool


class Asked(msgspec.Struct, frozen=True):
    """A request of a cell: its reply, its counts in tokens, and a digest of all chances."""

    prompt: int
    cached: int
    restored: int
    out: list[int]
    chances: str


class Row(msgspec.Struct, frozen=True):
    """Result of a cell. `error`: why it failed, or None. `unlike`: tokens that are not the cold
    model's likeliest ones, of `tokens`."""

    cell: str
    seconds: float
    asked: list[Asked]
    error: str | None = None
    unlike: int = 0
    tokens: int = 0


class Bench(Checked):
    """The whole model, or rank 0's part of one. `ranks`: the group, or None.

    Cold replies are those of the `whole` model; without it, of the ranks together.
    """

    def __init__(
        self,
        plan: Plan,
        loaded: Loaded,
        layout: Layout | None = None,
        ranks: RankZero | None = None,
        whole: Module | None = None,
    ):
        self.plan = plan
        self.ranks = ranks
        self.whole = whole
        self.parts = ranks.parts if ranks is not None else WHOLE
        self.unlike = self.tokens = 0
        self.asked: list[Asked] = []
        super().__init__(Path(plan.model).name.partition("-")[0], Path(plan.model), loaded, layout)

    def open_store(self, folder: Path, limit: int) -> Store:
        if self.ranks is None:
            return super().open_store(folder, limit)
        checkpoints = self.kv.layout.opaque
        return self.ranks.open_store(folder, str(folder), limit, needs_checkpoints=checkpoints)

    def check_words(self, task: Task) -> None:
        """Check a reply, and note it."""
        ids, record = task.ids.tolist(), task.record
        said = np.stack(self.said[record.id])
        chances = hashlib.blake2b(said.tobytes(), digest_size=8).hexdigest()
        counts = record.cached_tokens, record.restored_tokens
        self.asked.append(Asked(len(ids), *counts, list(task.out), chances))
        super().check_words(task)
        likeliest = self.cold_logprobs(ids, task.out).argmax(axis=-1)
        self.unlike += int((likeliest != np.asarray(task.out)).sum())
        self.tokens += len(task.out)

    def tolerance(self, cold: Logprobs) -> float:
        family = Path(self.plan.model).name.partition("-")[0]
        if family in CHOOSING and (self.plan.half or CHOOSING[family]):
            return math.inf
        if not self.plan.half:
            return super().tolerance(cold)
        return 4 * HALF_EPSILON * math.sqrt(HALF_ROUNDINGS / 12) * float(np.abs(cold).max())

    def compute_cold(self, ids: list[int], more: list[int]) -> Logprobs:
        if self.whole is not None:
            return cold_logprobs(self.whole, make_prompt_cache(self.whole), [*ids, *more])[
                len(ids) - 1 :
            ]
        layout, rows = self.kv.layout, []
        line = self.parts.lineage(layout, 0)
        line.grow(len(ids) + len(more) + 1)
        for at in range(0, len(ids) - 1, 50):
            part = ids[at : min(at + 50, len(ids) - 1)]
            line.note_feed(token_ids(part))
            self.model(mx.array([part]), cache=line.caches)
            kv.eval_states(line.caches)
            line.advance(len(part))
        for token in (ids[-1], *more):
            row = DecoderRow(lambda logprobs: mx.argmax(logprobs, axis=-1), (), None)
            decoder = self.parts.decode(self.model, row, line)
            decoder.start([token])
            ((drawn,),) = decoder.peek()
            rows.append(drawn.logprobs.astype(mx.float32)[None])
            line.advance(1)
        return np.array(mx.concatenate(rows))


def run_cells(bench: Bench, folder: Path) -> None:
    """Run every cell, and print its result."""
    for name, cell in CELLS.items():
        bench.fresh()
        bench.unlike = bench.tokens = 0
        bench.asked = []
        began, error = time.monotonic(), None
        try:
            cell(bench, folder / name)
        except Exception:  # noqa: BLE001 - reported
            error = traceback.format_exc()
        bench.close()
        seconds = time.monotonic() - began
        row = Row(name, seconds, bench.asked, error, bench.unlike, bench.tokens)
        print(msgspec.json.encode(row).decode(), flush=True)
        if error is not None:  # requests of it may still be under way
            return


def main(plan: Plan) -> None:
    """Run one process of the group until all cells have been run."""
    folder, spec = Path(plan.folder), ModelSpec(plan.model)
    if plan.mode is None:
        loaded = load(spec)
        run_cells(Bench(plan, loaded, whole=loaded.model), folder / "whole")
        return
    place = place_from(os.environ, pipeline=plan.mode == "pipeline")
    assert place is not None
    if place.rank:
        Rank(place, folder / "others").run()
        return
    ranks = RankZero(place, lambda: 0.0, end_process)
    setup: dict[str, Any] = {"trust_remote_code": False, "adapter": None, "kv_bits": None}
    ranks.gather(plan.model, Path(plan.model), ram="1GB", wire="auto", **setup)
    loaded = load(spec, divide=ranks.divide)
    layout = ranks.survey(loaded.model, None)
    whole = None if plan.half else load(spec).model
    run_cells(Bench(plan, loaded, layout, ranks, whole), folder / "ranks")
    ranks.close()
    sys.stdout.flush()
    os._exit(0)  # MLX ends the process with an error while a group exists


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
