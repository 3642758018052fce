"""Comparison of replies from the cache with cold ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlxcache.bench import equality
from mlxcache.bench.context import QUICK
from mlxcache.bench.equality import BESIDE, RESTORED, WARM, Unequal
from mlxcache.bench.findings import Findings
from mlxcache.bench.own_engine import Inside
from mlxcache.bench.random_model import make_random
from mlxcache.types import TokenLogprob, Tokens


def token(id: int, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob("", id, dict(top)[id], tuple(("", one, value) for one, value in top))


def play(tmp_path: Path) -> Findings:
    model, found = make_random(tmp_path / "model", "tiny"), Findings("equality", "")
    asyncio.run(equality.equality(model, tmp_path / "cache", QUICK, found))
    return found


def test_a_right_cache_is_equal_in_every_way(tmp_path: Path) -> None:
    columns = play(tmp_path).tables[equality.TITLE]["300 tokens"]
    tolerance = columns["tolerance"].median
    assert all(columns[way].median <= tolerance for way in (WARM, BESIDE, RESTORED))


def test_a_wrong_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random KV in the place of what the prefix computes to."""

    async def wrong(inside: Inside, ids: Tokens, way: str) -> Any:
        await inside.clear()
        await inside.put(ids[: -equality.TAIL])
        if way == RESTORED:
            await inside.write(ids[: -equality.TAIL])
            await inside.forget()
        return await equality.hear(inside, ids)

    monkeypatch.setattr(equality, "_after", wrong)
    with pytest.raises(Unequal, match="warm at 300 tokens: "):
        play(tmp_path)


def test_a_reply_that_reused_nothing_proves_nothing(tmp_path, monkeypatch):
    """Cold is always equal to cold."""

    async def cold(inside: Inside, ids: Tokens, way: str) -> Any:
        await inside.clear()
        return await equality.hear(inside, ids)

    monkeypatch.setattr(equality, "_after", cold)
    with pytest.raises(Unequal, match="no token of 324 was reused"):
        play(tmp_path)
