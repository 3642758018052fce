"""What `--speculate auto` costs conversations in which nothing repeats, beside `--speculate off`.

`python -m tests.proofs.speculation_beside` plays the same conversations of random tokens to two
engines in turn: a cold turn, a warm one, and the warm one again. It prints the medians of the
ratios of each pair, and what both engines hold in RAM and on disk afterwards.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from mlxcache.bench.own_engine import Inside, running_inside
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.types import Finished, RequestRecord, Sampling, Tokens, join_ids, token_ids
from tests.proofs import models

PAIRS = 9
APART = 0.03
"""Largest share by which a median may be worse with guesses."""

VOCABULARY = models.VOCABULARY
NEW = 50
"""Tokens of each new message."""

FIGURES = ("cold first token", "warm first token", "the same prompt again", "decoding")


@dataclass
class Played:
    """Seconds of each figure, one value for each conversation, and what was fed and drafted."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})
    fed: list[int] = field(default_factory=list)
    drafted: int = 0


async def play(inside: Inside, played: Played, seed: int, tokens: int, reply: int) -> None:
    rng = np.random.default_rng(seed)
    first = token_ids(rng.integers(0, VOCABULARY, tokens, np.int32))
    said, record = await ask(inside, first, reply, seed)
    more = token_ids(rng.integers(0, VOCABULARY, NEW, np.int32))
    prompt = join_ids(first, token_ids(said), more)
    _, warm = await ask(inside, prompt, reply, seed + 1)
    _, again = await ask(inside, prompt, reply, seed + 2)
    for name, one in zip(FIGURES, (record, warm, again), strict=False):
        played.seconds[name].append(one.timing["first_token_s"])
        played.fed.append(one.fed_tokens)
        played.drafted += one.drafted_tokens
    played.seconds["decoding"].append(sum(one.timing["decode_s"] for one in (record, warm, again)))
    await inside.written()


async def ask(
    inside: Inside, ids: Tokens, reply: int, seed: int
) -> tuple[Sequence[int], RequestRecord]:
    """Draw a reply at random; return its tokens and its record."""
    sampling = Sampling(temperature=1.0, seed=seed)
    stream = await inside.ask(ids, reply, endless=True, sampling=sampling)
    async for event in stream:
        if isinstance(event, Finished):
            break
    return await inside.engine.call(lambda core: continuation(core, ids)), stream.record


def continuation(core: ModelRuntime, ids: Tokens) -> Sequence[int]:
    """The tokens that the tree has after `ids`."""
    node = core.kv.tree.match(ids, touch=False).nodes[-1]
    found = node.tokens[len(ids) - node.start :].tolist()
    while node.children:
        node = next(iter(node.children.values()))
        found += node.tokens.tolist()
    return found


async def held(inside: Inside, folder: Path) -> dict[str, float]:
    figures = await asyncio.to_thread(inside.engine.measure)
    assert figures is not None
    sizes = await asyncio.to_thread(file_sizes, folder)
    return {
        "tokens in RAM": figures.tree_tokens,
        "segments in RAM": figures.segments,
        "bytes in RAM": figures.ram.used_bytes,
        "bytes of KV on disk": float(sum(sizes)),
        "files on disk": float(len(sizes)),
    }


def file_sizes(folder: Path) -> Sequence[int]:
    return [file.stat().st_size for file in folder.rglob("*.safetensors")]


async def compare(
    folder: Path, out: Callable[[str], object], *, pairs: int, tokens: int, reply: int
) -> int:
    async with (
        running_inside(folder / "model", folder / "off", "1GB") as off,
        running_inside(folder / "model", folder / "auto", "1GB", speculate="auto") as auto,
    ):
        both = (off, Played()), (auto, Played())
        for pair in range(-1, pairs):
            for inside, played in both if pair % 2 else both[::-1]:
                target = Played() if pair < 0 else played  # the first compiles kernels
                await play(inside, target, 100 * (pair + 2), tokens, reply)
        ends = [await held(off, folder / "off"), await held(auto, folder / "auto")]
    plain, guessing = both[0][1], both[1][1]
    worse = 0
    for name in FIGURES:
        ratios = [b / a for a, b in zip(plain.seconds[name], guessing.seconds[name], strict=True)]
        worse += median(ratios) > 1 + APART
        out(f"{name:22} {1e3 * median(plain.seconds[name]):8.1f} ms  {median(ratios):.3f}")
    out(f"guessed tokens: {guessing.drafted}; tokens fed: {sum(plain.fed)}, {sum(guessing.fed)}")
    worse += plain.fed != guessing.fed
    for name, value in ends[0].items():
        other = ends[1][name]
        out(f"{name:22} {value:,.0f}, {other:,.0f}")
        worse += abs(other - value) > APART * value
    return worse


def main(
    out: Callable[[str], object] = print,
    *,
    pairs: int = PAIRS,
    tokens: int = 2000,
    reply: int = 100,
    hidden: int = 384,
) -> int:
    with tempfile.TemporaryDirectory() as folder:
        models.grouped(Path(folder) / "model", hidden)
        return asyncio.run(compare(Path(folder), out, pairs=pairs, tokens=tokens, reply=reply))


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
