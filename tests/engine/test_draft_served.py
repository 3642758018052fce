"""A real engine with a draft: what its disk tier keeps, and for whom; its budget; its figures."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import mlx.core as mx
import pytest

from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.errors import SnapshotRefused
from mlxcache.guess.rule import Passes
from mlxcache.types import Finished, Prompt, RequestRecord, token_ids
from tests.cache.test_ram_limit import LIMIT, held
from tests.conftest import ToyMaker
from tests.engine.running import started
from tests.memory import rounding_bytes
from tests.sampler import Sampler
from tests.scheduling.drafts import make_draft
from tests.scheduling.guesses import CHEAP_CURVES, use_cheap_drafts
from tests.scheduling.heads import apart, head_weights
from tests.sessions.test_book import ask, prompt, text


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft as large as its model does not pay."""
    use_cheap_drafts(monkeypatch)


def served(
    model: Path, folder: Path, draft: Path | None, ram: str = "300MB"
) -> AbstractAsyncContextManager[Engine]:
    """An engine that keeps its files in `folder`."""
    named = str(draft) if draft else None
    return started(model, folder, draft_model=named, ram=ram, disk="1GB")


async def turn(engine: Engine, *parts: list[int]) -> tuple[Finished, RequestRecord]:
    """A request in a session, on disk once it is over."""
    done = await ask(engine, prompt(*parts), tokens=20, session="one")
    assert await engine.book.settled()
    return done, engine.requests()[0]


async def test_both_caches_outlive_the_process_together(toy: ToyMaker, tmp_path: Path) -> None:
    """The pair finds its files again, and the draft is right as often; the model alone does not."""
    model = toy("llama")
    same = make_draft(model, tmp_path / "same", "same")
    parts = [text(1, 300), text(2, 40), text(3, 40)]
    async with served(model, tmp_path / "cache", same) as engine:
        first, record = await turn(engine, *parts[:2])
        assert (first.cached_tokens, first.generated_tokens) == (0, 20)
        assert record.accepted_tokens == record.drafted_tokens > 10
    async with served(model, tmp_path / "cache", None) as engine:
        assert (await turn(engine, *parts[:2]))[0].cached_tokens == 0
    async with served(model, tmp_path / "cache", same) as engine:
        next_, record = await turn(engine, *parts)
        assert next_.restored_tokens == next_.cached_tokens >= 380
        assert record.accepted_tokens == record.drafted_tokens > 10
        assert record.cached_tokens + record.fed_tokens == record.prompt_tokens == 420


async def test_heads_leave_what_is_on_disk_warm(toy: ToyMaker, tmp_path: Path) -> None:
    """Switched on and off between turns, which are restored each time."""
    model = toy("qwen3_5")
    heads, parts = apart(model, tmp_path / "heads", head_weights(model)), [text(1, 300)]
    for number, draft in enumerate((None, heads, None, heads)):
        parts.append(text(2 + number, 40))
        async with served(model, tmp_path / "cache", draft) as engine:
            done, record = await turn(engine, *parts)
        assert done.restored_tokens == done.cached_tokens >= (260 + 40 * number if number else 0)
        assert (record.guesses["heads"].drafted > 10) is (draft is not None)


async def test_a_draft_that_does_not_pay_is_hardly_used(
    toy: ToyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs as much as its model, and is hardly ever right."""
    model = toy("llama")
    draft = make_draft(model, tmp_path / "draft", "other")
    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", lambda *_: Passes(CHEAP_CURVES))
    async with served(model, tmp_path / "cache", draft) as engine:
        done = await ask(engine, prompt(text(1, 100)), tokens=150, session="one")
        record = engine.requests()[0]
    assert done.generated_tokens == 150
    assert record.drafted_tokens < 20
    assert record.accepted_tokens < 5


async def said(engine: Engine, ids: list[int]) -> list[int]:
    """The tokens of a greedy reply."""
    await ask(engine, Prompt(token_ids(ids)), tokens=20, session="one")
    held = [await engine.book.info(one.session.id) for one in await engine.sessions.list()]
    newest = max((leaf.ids.tolist() for one in held for leaf in one.leaves), key=len)
    assert newest[: len(ids)] == ids
    return newest[len(ids) :]


def mlx_lm_goes_on(model: Path, draft: Path, cache: Path, ids: list[int]) -> list[int]:
    """What mlx-lm's own speculative decoding says after `ids`, from a prompt cache of both."""
    from mlx_lm import load
    from mlx_lm.generate import speculative_generate_step
    from mlx_lm.models.cache import load_prompt_cache

    both = [load(str(path))[0] for path in (model, draft)]
    held = load_prompt_cache(str(cache))
    steps = speculative_generate_step(mx.array(ids), *both, prompt_cache=held, max_tokens=20)
    return [int(token) for token, *_ in steps]


@pytest.mark.slow
async def test_a_snapshot_holds_both_and_is_the_pairs_alone(toy: ToyMaker, tmp_path: Path) -> None:
    """Imported into another folder, the next turn is warm, and the draft as good as before."""
    model = toy("llama")
    same = make_draft(model, tmp_path / "same", "same")
    parts = [text(1, 300), text(2, 40)]
    file = tmp_path / "snapshot"
    async with served(model, tmp_path / "a", same) as engine:
        await turn(engine, *parts)
        (session,) = await engine.sessions.list()
        info = await engine.book.info(session.session.id)
        made = await engine.sessions.files.snapshot(session.session.id)
        file.write_bytes(b"".join(made))
        cache = await engine.sessions.files.prompt_cache(session.session.id)
        (tmp_path / "cache.safetensors").write_bytes(b"".join(cache))
        assert mlx_lm_goes_on(model, same, tmp_path / "cache.safetensors", text(3, 20)) == (
            await said(engine, [*info.leaves[0].ids.tolist(), *text(3, 20)])
        )
    async with served(model, tmp_path / "b", same) as engine:
        await engine.sessions.files.restore(file)
        done, record = await turn(engine, *parts, text(3, 20))
        assert done.restored_tokens >= 320
        assert record.accepted_tokens == record.drafted_tokens > 10
    async with served(model, tmp_path / "c", None) as engine:
        with pytest.raises(SnapshotRefused):
            await engine.sessions.files.restore(file)


@pytest.mark.slow
async def test_a_budget_counts_both_models_and_holds(toy: ToyMaker, tmp_path: Path) -> None:
    """Their weights are beside it; conversations that grow beyond it are evicted in time."""
    model = toy("llama")
    draft = make_draft(model, tmp_path / "draft", "alike")
    gc.collect()  # what earlier tests held
    before = mx.get_active_memory()
    engine = Engine(
        Settings(model=str(model), draft_model=str(draft), ram=LIMIT, queue=64, disk="off")
    )
    await engine.start()
    weights = mx.get_active_memory() - before
    assert engine.info is not None
    assert (
        engine.info.weights_bytes
        <= weights
        < engine.info.weights_bytes + 1_000_000 + rounding_bytes(100)
    )
    assert engine.info.draft == "draft"
    with Sampler(held, 0.002) as sampler:
        for turn in range(2):
            asked = [prompt(text(100 * turn + n, 1200)) for n in range(4)]
            replies = await asyncio.gather(*(ask(engine, one, tokens=30) for one in asked))
            assert [reply.generated_tokens for reply in replies] == [30] * 4
    figures = engine.figures()
    await engine.stop()
    pages = rounding_bytes(figures["ram"]["buffers"])
    assert sampler.most - before - weights <= LIMIT + pages
    assert figures["ram"]["high_water_bytes"] <= LIMIT
    assert sum(figures["evictions"].values()) > 0
