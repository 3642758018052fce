"""What sessions cost, as `doctor` says it, is what a server holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache import write_behind
from mlxcache.cache.capacity import MOST_COPIED, Fit, Talk, choose_bits, copy_bytes, fit, warnings
from mlxcache.cache.ram import RamTier
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import kv
from mlxcache.model.examine import examine
from mlxcache.model.load import ModelSpec, load
from mlxcache.types import NO_TOKENS, Job, Prompt, Sampling, join_ids, token_ids
from tests.conftest import ToyMaker

TALK = Talk(head=800, asked=300, replied=24)
TOKENS = 2400
RAM, DISK = 400_000_000, 2_000_000_000


async def played(engine: Engine, talk: Talk, tokens: int) -> ModelRuntime:
    """Have `engine` hold the conversation that is computed on paper, each turn written; its core.

    What is on its way to disk is not thinned, and a person is slower than a disk.
    """
    ids, rng = NO_TOKENS, np.random.default_rng(1)
    core = await engine.call(lambda core: core)
    assert core.kv.disk is not None
    for turn, (marks, _, prompt, end) in enumerate(talk.turns(tokens)):
        asked = token_ids(rng.integers(0, 500, prompt - len(ids)).astype(np.int32))
        job = Job(f"t{turn}", Prompt(join_ids(ids, asked), marks), Sampling(), end - prompt)
        stream = await engine.submit(job)
        task = engine._requests[job.id].task
        async for _ in stream:
            pass
        ids = join_ids(task.ids, token_ids(task.out))
        assert len(ids) == end
        while core.kv.disk.write_behind.busy:  # noqa: ASYNC110 - the MLX thread sets no asyncio.Event
            await asyncio.sleep(0.005)
    return core


@pytest.fixture(autouse=True)
def _rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations rest after each turn, so that all their checkpoints are written."""
    monkeypatch.setattr(write_behind, "REST_S", 0.0)


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        *(pytest.param(one, None, marks=pytest.mark.slow) for one in ("llama", "gemma3")),
        ("qwen3_5", None),
        ("llama", 4),
        *(pytest.param(one, 8, marks=pytest.mark.slow) for one in ("qwen3_5", "deepseek_v3")),
    ],
)
async def test_figures_on_paper_are_what_the_server_holds(
    family: str, bits: int | None, toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM to the byte that a budget without much to spare books, files as the system counts."""
    monkeypatch.setattr(RamTier, "spares", lambda tier, size=0: False)
    path = str(toy(family))
    found = examine(ModelSpec(path), choose_bits(bits, lambda weights: 0))
    (held,) = fit(found.layout, ram=RAM, disk=DISK, tokens=[TOKENS], talk=TALK).held
    engine = Engine(Settings(model=path, cache_dir=tmp_path, ram=RAM, disk=DISK, kv_bits=bits))
    await engine.start()
    try:
        core = await played(engine, TALK, TOKENS)
        kinds, checkpoints = core.kv.budget.by_kind(), core.kv.tree.checkpoints
        files = list((tmp_path / "store").rglob("*.safetensors"))
        states = [file for file in files if "checkpoints" in file.parts]
        on_disk = sum(file.stat().st_blocks * 512 for file in files)
    finally:
        await engine.stop()
    in_ram = kinds["kv"] + kinds.get("checkpoints", 0)
    assert held.ram_bytes == pytest.approx(in_ram, rel=0.05)
    assert held.ram_checkpoints == checkpoints
    assert held.disk_bytes == pytest.approx(on_disk, rel=0.05)
    assert held.disk_checkpoints == len(states)


@pytest.mark.slow
async def test_figures_on_paper_are_thinned_as_those_of_a_server_are(toy, tmp_path: Path) -> None:
    """A model of states alone, in budgets that have no room for all of them."""
    path, ram, disk = str(toy("mamba2")), 64_000_000, 64_000_000
    talk, tokens = Talk(head=300, asked=60, replied=6), 2000
    layout = examine(ModelSpec(path)).layout
    (held,) = fit(layout, ram=ram, disk=disk, tokens=[tokens], talk=talk).held
    engine = Engine(Settings(model=path, cache_dir=tmp_path, ram=ram, disk=disk))
    await engine.start()
    try:
        core = await played(engine, talk, tokens)
        in_ram = core.kv.tree.checkpoints
        on_disk = len(list((tmp_path / "store" / "checkpoints").rglob("*.safetensors")))
    finally:
        await engine.stop()
    turns = len(list(talk.turns(tokens)))
    assert held.disk_checkpoints < 2 * turns
    assert held.ram_checkpoints == pytest.approx(in_ram, abs=2)
    assert held.disk_checkpoints == pytest.approx(on_disk, abs=2)


def test_the_room_is_what_a_server_has_for_conversations(toy, tmp_path: Path) -> None:
    """All else that the budget sets aside is taken off, as far as no measurement is needed."""
    path = str(toy("llama"))
    settings = Settings(model=path, cache_dir=tmp_path, ram=RAM, disk=DISK)
    core = ModelRuntime(load(ModelSpec(path)), settings, MlxThread(), unasked)
    found = fit(core.layout, ram=RAM, disk=DISK, tokens=[])
    assert found.room >= core.kv.budget.free
    assert found.room == pytest.approx(core.kv.budget.free, rel=0.3)
    without = fit(core.layout, ram=RAM, disk=0, tokens=[])
    assert without.room > found.room
    core.close(died=False)


async def unasked(job: Job) -> None:
    raise AssertionError(job)


def paper(toy, family: str) -> Fit:
    layout = examine(ModelSpec(str(toy(family)))).layout
    return fit(layout, ram=RAM, disk=DISK, tokens=[2000, 20_000, 100_000])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "mamba2", "deepseek_v3"])
def test_costs_grow_with_the_tokens_and_no_faster(family: str, toy) -> None:
    """Five times as long is at most about five times as much, in both tiers; so many more fit."""
    _, short, long = paper(toy, family).held
    for name in ("ram_bytes", "disk_bytes"):
        assert 1 < getattr(long, name) / getattr(short, name) < 7.5
    assert short.fit_ram >= long.ram_bytes // short.ram_bytes * long.fit_ram


def test_a_model_that_is_not_cached_costs_nothing(toy) -> None:
    """And fits no conversation: each is computed anew."""
    from dataclasses import replace

    layout = examine(ModelSpec(str(toy("llama")))).layout
    unknown: kv.Layout = replace(layout, unknown=("OddCache",))
    (held,) = fit(unknown, ram=RAM, disk=DISK, tokens=[20_000]).held
    assert (held.ram_bytes, held.disk_bytes, held.fit_ram, held.fit_disk) == (0, 0, 0, 0)


def test_model_and_one_full_context_that_do_not_fit_are_warned_of(
    toy_paths: dict[str, Path],
) -> None:
    layout = kv.survey(load(ModelSpec(str(toy_paths["llama"]))).model)
    small = {"context": 1000, "weights": 10**9, "ram": 10**9}
    assert warnings(layout, **small, machine=8 * 10**9) == []
    (both,) = warnings(layout, **small, machine=int(1.5 * 10**9))
    assert "1 GB" in both
    assert "--ram" in both
    long = {"context": 10**8, "weights": 10**9, "machine": 8 * 10**9}
    found = warnings(layout, ram=10**9, **long)
    assert len(found) == 1
    assert warnings(layout, ram=10**12, **long)[0] == found[0]
    assert "one full context of 100000000 tokens" in found[0]
    assert "8 GB" in found[0]


def test_only_for_a_gpu_several_arrays_are_copied_at_once() -> None:
    """In half of the memory of forward passes at most."""
    assert copy_bytes(100 << 20, "cpu") == 0
    assert copy_bytes(100 << 20, "gpu") == 50 << 20
    assert copy_bytes(100 << 30, "gpu") == MOST_COPIED


@pytest.mark.parametrize(("family", "bits"), [("llama", 8), ("mamba2", None)])
def test_auto_is_8_bits_where_two_contexts_do_not_fit(
    toy: ToyMaker, family: str, bits: int | None
) -> None:
    """A quarter of the budget is for other things. What cannot be quantised is served as it is."""
    spec = ModelSpec(str(toy(family)))
    plain = examine(spec)
    one = plain.info.context_length * plain.layout.bytes_per_token
    expected = examine(spec, choose_bits(bits, lambda weights: 0)).layout.bytes_per_token
    assert (expected < plain.layout.bytes_per_token) is (bits == 8)

    def size_with(ram: float) -> int:
        found = examine(spec, choose_bits("auto", lambda weights: int(ram)))
        return found.layout.bytes_per_token

    assert size_with(2.7 * one + plain.layout.checkpoint_bytes) == plain.layout.bytes_per_token
    assert size_with(2.6 * one) == expected
