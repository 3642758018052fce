"""Drafts of trained heads, cold and behind a restored prefix, and without the KV of their prefix.

    python -m tests.proofs.heads FOLDER [MINUTES]

Trains a tiny hybrid and its heads to continue what was said once far before, for MINUTES, unless
FOLDER has it. Fails unless all replies are those without drafts, acceptance by depth behind a
restored prefix is within 2 points of a cold one's, and it falls without the KV of the prefix.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

from mlxcache.cache import restore
from mlxcache.guess.rule import PassCosts
from mlxcache.model.heads import Heads, WithHeads
from mlxcache.model.load import ModelSpec, load
from mlxcache.scheduling.speculation import HeadsOfModel, HeadsProposer, Speculation
from mlxcache.scheduling.task import Task
from tests.scheduled import Bench, FreeDrafts, admitted
from tests.scheduling.heads import with_heads
from tests.scheduling.matrix import settled
from tests.toys.toy import make_toy

SYMBOLS, FIRST = 48, 10
"""Tokens of the texts, and the id of the first of them."""

SAID, BETWEEN = 16, 16
"""Tokens of a passage, and most tokens before it is repeated."""

DEPTH, POINTS, FALL = 3, 2.0, 10.0
"""Most tokens of a draft; by how many points acceptance may differ, and must fall."""

REPLIES, REPLY, SEEN = 16, 10, 4
"""Replies, their tokens, and tokens of the passage that the prompt repeats."""


def texts(rng: np.random.Generator, rows: int, said: int, between: int) -> np.ndarray:
    """Rows of a passage, of other tokens, and of the same passage again."""
    passage, others = (rng.integers(0, SYMBOLS, (rows, n)) + FIRST for n in (said, between))
    return np.concatenate([passage, others, passage], axis=1)


class Trained(nn.Module):
    def __init__(self, model: Any, heads: Heads):
        super().__init__()
        self.model, self.heads = model, heads

    def losses(self, ids: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the loss that is minimised, that of the model and that of the heads."""
        text, first = self.model.language_model, ids.shape[1] - SAID + 1
        hidden = text.model(ids[:, :-2])
        embedded = text.model.embed_tokens(ids[:, 1:-1])
        deeper = self.heads(embedded, hidden, None, "causal")
        once, twice = (
            nn.losses.cross_entropy(
                text.lm_head(states[:, first:]), ids[:, first + n : ids.shape[1] - 2 + n],
                reduction="mean",
            )
            for states, n in ((hidden, 1), (deeper, 2))
        )  # fmt: skip
        return once + twice, once, twice


def train(folder: Path, minutes: float) -> None:
    """Write a trained toy with heads to `folder`."""
    make_toy(folder, "qwen3_5", vocab_size=512, hidden=96, layers=2, heads=4, head_dim=32)
    loaded: Any = load(ModelSpec(str(folder))).model
    both = Trained(loaded, Heads(loaded.language_model.args))
    both.train()
    rng, began, step = np.random.default_rng(1), time.monotonic(), 0
    rise, fall = (
        optimizers.linear_schedule(1e-4, 3e-3, 50),
        optimizers.cosine_decay(3e-3, 4000, 3e-4),
    )
    optimiser = optimizers.AdamW(learning_rate=optimizers.join_schedules([rise, fall], [50]))
    graded = nn.value_and_grad(both, both.losses)
    while time.monotonic() - began < 60 * minutes:
        ids = texts(rng, 32, SAID, int(rng.choice([0, BETWEEN // 2, BETWEEN])))
        found, gradients = graded(mx.array(ids))
        optimiser.update(both, optimizers.clip_grad_norm(gradients, 1.0)[0])
        mx.eval(found, both.parameters(), optimiser.state)
        if step % 50 == 0:
            losses = ", ".join(f"{one.item():.2f}" for one in found)
            print(f"{step} steps, {time.monotonic() - began:.0f} s: losses {losses}", flush=True)
        step += 1
    for part, name, prefix in ((both.model, "model", ""), (both.heads, "model-mtp", "mtp.")):
        arrays = {prefix + key: value for key, value in tree_flatten(part.parameters())}
        mx.save_safetensors(str(folder / f"{name}.safetensors"), arrays, {"format": "mlx"})


# -- acceptance ------------------------------------------------------------------------------------


class Counted(HeadsOfModel):
    """Counts drafted tokens that were checked, and those that were right, by their depth."""

    def __init__(self, model: WithHeads):
        super().__init__(model, FreeDrafts(), DEPTH)
        self.checked, self.right = np.zeros(DEPTH), np.zeros(DEPTH)

    def begin(self, task: Task, costs: PassCosts) -> HeadsProposer:
        return _Counting(self, task)


class _Counting(HeadsProposer):
    def __init__(self, made_by: Counted, task: Task):
        super().__init__(made_by, task)
        self._counts = made_by

    def learn(self, checked: int, right: int) -> None:
        super().learn(checked, right)
        self._counts.checked[: min(checked, right + 1)] += 1
        self._counts.right[:right] += 1


Way = Literal["cold", "restored", "restored without the heads' KV"]


def replies(folder: Path, way: Way) -> tuple[np.ndarray, list[list[int]]]:
    """Return the share of right tokens by depth, in percent, and the replies."""
    bench, plain = Bench(folder, loaded=with_heads(folder)), Bench(folder)
    assert isinstance(bench.model, WithHeads)
    counted, rng, said = Counted(bench.model), np.random.default_rng(7), list[list[int]]()
    for _ in range(REPLIES):
        ids = texts(rng, 1, SAID, BETWEEN)[0].tolist()
        before = ids[: SAID + BETWEEN]
        before += plain.twin().ask(before, tokens=2).out
        with tempfile.TemporaryDirectory() as made:
            if way != "cold":
                writer = bench if way == "restored" else plain
                disk = writer.open_disk(Path(made))
                writer.ask(before[:-2], tokens=2)
                settled(disk)
                disk.close(0.0)
            bench.speculation = Speculation(counted.costs, [counted])
            disk = bench.open_disk(Path(made))
            task = bench.ask([*before, *ids[:SEEN]], tokens=REPLY)
            disk.close(0.0)
        assert (admitted(task).restored_tokens > 0) is (way != "cold")
        said.append(task.out)
    return 100 * counted.right / np.maximum(1, counted.checked), said


def undrafted(folder: Path) -> list[list[int]]:
    """Return the replies without drafts."""
    bench, rng, said = Bench(folder), np.random.default_rng(7), list[list[int]]()
    for _ in range(REPLIES):
        ids = texts(rng, 1, SAID, BETWEEN)[0].tolist()
        before = ids[: SAID + BETWEEN]
        before += bench.twin().ask(before, tokens=2).out
        said.append(bench.twin().ask([*before, *ids[:SEEN]], tokens=REPLY).out)
    return said


def compare(folder: Path) -> None:
    """Print acceptance by depth. Raises AssertionError if it is not what is required."""
    plain, found = undrafted(folder), dict[Way, np.ndarray]()
    for way in get_args(Way):
        found[way], said = replies(folder, way)
        assert said == plain
        print(f"{way}: " + ", ".join(f"{share:.1f}%" for share in found[way]), flush=True)
    cold, restored, without = found.values()
    assert np.abs(cold - restored).max() <= POINTS
    assert (cold - without).max() >= FALL


def main() -> None:
    folder, minutes = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 12.0
    if not folder.exists():
        train(folder, minutes)
    with pytest.MonkeyPatch.context() as patch:  # prefixes as short as these are restored
        patch.setattr(restore, "MIN_UNKNOWN", 1)
        patch.setattr(restore, "MIN_GAIN", 1)
        compare(folder)


if __name__ == "__main__":
    main()
