"""`--kv-bits` through a real scheduler and a real disk: cold = warm = restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_cache import KVCache
from mlxcache.tree.budget import Budget
from tests.conftest import ToyMaker
from tests.scheduled import Bench
from tests.scheduling.drafts import make_draft
from tests.toys.toy import make_toy

ROOM = 1 << 20


@pytest.fixture(scope="module", params=[("llama", 4), ("qwen3_5", 8)], ids=lambda p: p[0])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    family, bits = request.param
    return Bench(
        make_toy(tmp_path_factory.mktemp(family) / "model", family, head_dim=64), kv_bits=bits
    )


def start(bench: Bench, folder: Path, ram: int = 1 << 30) -> DiskTier:
    return bench.open_disk(folder / "store", ram=ram, pending=ROOM)


def text(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, 250, length).tolist()


def test_turns_edits_branches_and_restarts_are_warm(
    bench: Bench, tmp_path: Path, rng: np.random.Generator
) -> None:
    opaque = bench.kv.layout.opaque
    twin = bench.twin()
    disk = start(bench, tmp_path)
    ids = text(rng, 300)
    first = bench.ask(ids, marks=(100, 250, 297))
    after = [*ids, *first.out, *text(rng, 60)]
    turn = bench.ask(after, marks=(100, 250, len(after) - 3))
    assert turn.out == twin.ask(after).out
    assert turn.record.cached_tokens >= (297 if opaque else len(ids) + len(first.out) - 1)
    branch = [*ids[:277], *text(rng, 80)]
    task = bench.ask(branch, marks=(100, 250, len(branch) - 3))
    assert task.out == twin.ask(branch).out
    assert task.record.cached_tokens == (250 if opaque else 277)
    assert disk.write_behind.drain(20.0) == 0
    disk.close(5.0)
    disk = start(bench, tmp_path)
    more = [*after, *turn.out, *text(rng, 50)]
    task = bench.ask(more, marks=(100, len(more) - 3))
    assert task.out == bench.twin().ask(more).out
    assert task.record.restored_tokens == task.record.cached_tokens >= len(after) - 3
    disk.close(5.0)


def test_a_draft_changes_no_token(toy: ToyMaker, tmp_path: Path, rng: np.random.Generator) -> None:
    """The KV of both is quantised, cut back and kept together."""
    model = toy("llama", head_dim=64)
    draft = make_draft(model, tmp_path / "draft", "alike")
    plain, drafted = (Bench(model, kv_bits=8, draft=d) for d in (None, draft))
    assert drafted.kv.layout.bytes_per_token == 2 * plain.kv.layout.bytes_per_token
    ids = text(rng, 200)
    for _ in range(2):
        tasks = [bench.ask(ids, tokens=40) for bench in (plain, drafted)]
        assert tasks[0].out == tasks[1].out
        ids = [*ids, *tasks[0].out, *text(rng, 30)]
    assert tasks[1].record.cached_tokens >= 239


def test_requests_at_once_are_one_batch(bench: Bench, rng: np.random.Generator) -> None:
    """Rows join and leave in few bits, and their conversations go on."""
    prompts = [text(rng, n) for n in (120, 130, 140, 128)]
    twin = bench.twin()
    bench.use(KVCache.open(bench.kv.layout, Budget(1 << 30)))
    tasks = [bench.put(ids, tokens=20 + 5 * i) for i, ids in enumerate(prompts)]
    bench.run(until=lambda: sum(bool(t.out) for t in tasks) == 4)
    assert any(lane.batched for lane in bench.scheduler.lanes.all)
    bench.run()
    for i, (task, ids) in enumerate(zip(tasks, prompts, strict=True)):
        assert task.out == twin.ask(ids, tokens=20 + 5 * i).out
        after = [*ids, *task.out, *text(rng, 20)]
        again = bench.ask(after)
        assert again.out == twin.ask(after).out
        assert again.record.cached_tokens >= (0 if bench.kv.layout.recurrent else len(ids) - 1)
