"""Several models in one process: how a switch compares with reading weights, and two at once.

`python -m tests.proofs.several` prints medians of interleaved pairs, and ends with status 1 if a
bound is missed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcache.config import load_settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.models import Models
from mlxcache.types import Finished, Job, Piece, Prompt, Sampling, Tokens, token_ids
from tests.proofs.pair import make_pair, weights_of
from tests.toys.toy import make_toy

PAIRS = 9
SWITCH_BOUND = 1.3
"""Most seconds of a switch to a warm session, as a multiple of a plain `mx.load` of the weights."""

SHARE_BOUND = 0.45
"""Least share of its speed alone that each of two models keeps when both decode."""

REPLY_TOKENS = 150
WEIGHTS_BYTES = 500_000_000


def prompt(seed: int, n: int) -> Tokens:
    return token_ids(np.random.default_rng(seed).integers(10, 400, n).astype(np.int32))


async def reply(engine: Engine, ids: Tokens, tokens: int) -> tuple[float, float, float, Finished]:
    """Run a request; return seconds to its first token, those from there, when it came, its end."""
    began, name = time.perf_counter(), f"proof-{time.perf_counter_ns()}"
    sampling = Sampling(temperature=0.0)
    stream = await engine.submit(Job(name, Prompt(ids), sampling, max_tokens=tokens))
    first = 0.0
    async for event in stream:
        if isinstance(event, Piece | Finished) and not first:
            first = time.perf_counter()
        if isinstance(event, Finished):
            return first - began, time.perf_counter() - first, first, event
    raise AssertionError("a reply has an end")


def plain_load(folder: Path) -> float:
    began = time.perf_counter()
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(arrays)
    return time.perf_counter() - began


async def switches(models: Models, folders: Sequence[Path]) -> float:
    """Return the median ratio of a switch's first token to a plain load, of interleaved pairs."""
    ids = [prompt(i, 300) for i in range(len(models.engines))]
    for engine, own in zip(models.engines, ids, strict=True):
        await reply(engine, own, 4)
    ratios = []
    for pair in range(PAIRS + 1):
        which = pair % 2
        engine, other = models.engines[which], models.engines[1 - which]
        plain = await asyncio.to_thread(plain_load, folders[which])
        assert (engine.residence or {})["state"] == "unloaded", "the budget holds one of them"
        first_s, _, _, end = await reply(engine, ids[which], 4)
        assert end.prompt_tokens - end.cached_tokens <= 1, "the session is warm"
        assert (other.residence or {})["state"] == "unloaded"
        if pair:  # the first one warms up
            ratios.append(first_s / plain)
            print(f"switch {first_s:.3f} s, plain mx.load {plain:.3f} s, x {ratios[-1]:.2f}")
    return median(ratios)


async def shares(models: Models) -> tuple[float, float, float]:
    """Return the share of its speed that each model keeps, and the seconds between first tokens."""
    kept: list[list[float]] = [[], []]
    apart = []
    for pair in range(PAIRS):
        ids = prompt(100 + pair, 100)
        alone = [(await reply(engine, ids, REPLY_TOKENS))[1] for engine in models.engines]
        both = await asyncio.gather(
            *(reply(engine, prompt(200 + pair, 100), REPLY_TOKENS) for engine in models.engines)
        )
        for own, before, now in zip(kept, alone, both, strict=True):
            own.append(before / now[1])
        apart.append(abs(both[0][2] - both[1][2]))
        print("kept", " and ".join(f"{own[-1]:.2f}" for own in kept), f"apart {apart[-1]:.2f} s")
    return median(kept[0]), median(kept[1]), median(apart)


async def play(folders: Sequence[Path], ram: str, cache: Path) -> Models:
    flags: dict[str, object] = {
        "model": [str(folder) for folder in folders],
        "ram": ram,
        "cache_dir": str(cache),
        "no_anticipate": True,
    }
    models = Models(load_settings(flags, {"MLXCACHE_CONFIG": os.devnull}))
    await models.start()
    for folder in folders:
        await models.of(folder.name)
    return models


async def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = list(make_pair(folder, ("qwen3_moe", "qwen3_moe"), WEIGHTS_BYTES).values())
        size = weights_of(folders[0])
        print(f"two models of {size / 1e6:.0f} MB each")
        models = await play(folders, f"{int(1.5 * size / 1e6)}MB", folder / "one")
        ratio = await switches(models, folders)
        await models.stop()
        small = [make_toy(folder / one, "llama", seed=i, hidden=256) for i, one in enumerate("cd")]
        models = await play(small, "2GB", folder / "both")
        *kept, apart = await shares(models)
        await models.stop()
    print(f"switch to a warm session: x {ratio:.2f} of a plain mx.load (at most {SWITCH_BOUND})")
    shown = " and ".join(f"{share:.2f}" for share in kept)
    print(f"two at once keep {shown} of their speed (at least {SHARE_BOUND})")
    print(f"their first tokens are {apart:.2f} s apart")
    return int(ratio > SWITCH_BOUND or min(kept) < SHARE_BOUND)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
