"""Random lives of a scheduler: what clients do in any order, and what must hold all the time."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsInt

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import ContextLengthExceeded
from mlxcache.scheduling.cost import measure
from mlxcache.scheduling.task import Task
from mlxcache.tree.budget import Budget
from mlxcache.types import Finished, Sampling
from tests.accounts import check_at_rest
from tests.memory import rounding_bytes
from tests.scheduled import Bench, admitted

TOLERANCE = 1e-3
"""By how much of a logit a greedy token may fall short of the best one: float32 sums differ."""

STRAY = 128_000
PASSING = 64
"""Arrays of a pass of the model, at most."""
"""Bytes of small arrays (random keys, the last logits) that MLX may hold beside what is counted."""

SAMPLINGS = (
    Sampling(),
    Sampling(),
    Sampling(),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3),
    Sampling(temperature=0.8, seed=11),
    Sampling(temperature=1.1, seed=12, top_p=0.9, presence_penalty=0.5),
    Sampling(temperature=0.7, seed=13, top_k=20, logit_bias=((50, 2.0),)),
)


class History:
    """A seeded client of one `Bench`: `step` does something, `finish` checks what came of it."""

    def __init__(
        self,
        path: Path,
        seed: int,
        *,
        ram_tokens: int | None = None,
        longest: int = 300,
        **model: Any,
    ):
        self.rng = np.random.default_rng(seed)
        chunk = int(self.rng.choice([16, 64, 100]))
        self.bench = Bench(path, chunk=chunk, concurrency=8, **model)
        self.longest = longest
        layout = self.bench.kv.layout
        self.ram_tokens = ram_tokens or 1 << 20
        passing = self._measure(3 * longest)
        ram = self.ram_tokens * layout.bytes_per_token + 24 * layout.checkpoint_bytes + passing
        # where there is little room, buffers are copied as for a GPU: that takes more of it
        copied = passing // 2 if ram_tokens else 0
        memory = KVCache.open(layout, Budget(ram), copy_bytes=copied)
        assert memory.budget.reserve("transient", passing)
        # how many decode steps a chunk of prefill takes is drawn too, so that a seed is a history
        pace = np.random.default_rng(seed)
        ticks = itertools.accumulate(iter(lambda: float(pace.exponential()), None))
        self.bench.use(memory, clock=lambda: next(ticks))
        self.chats: list[list[int]] = [self.text(self.rng.integers(5, longest))]
        self.live: list[Task] = []
        self.done: list[Task] = []
        gc.collect()
        mx.clear_cache()
        self.before = mx.get_active_memory()

    def _measure(self, longest: int) -> int:
        """Let chunks be sized by what the model takes; the bytes for those up to `longest`."""
        bench = self.bench
        bench.cost = measure(bench.model, bench.kv.layout, 1 << 22)
        bench.cost.rate = 1e6
        bench.cost.longest = 24 if bench.chunk < 64 else 0  # whatever this machine is quick at
        passing = bench.cost.transient(bench.chunk, longest)
        bench.limits = replace(bench.limits, transient=passing)
        return passing

    def text(self, n: SupportsInt) -> list[int]:
        """`n` random tokens."""
        return [int(t) for t in self.rng.integers(10, 400, int(n))]

    @property
    def stray(self) -> int:
        """Bytes that may be in use beside those that are accounted for."""
        return STRAY + rounding_bytes(self.bench.kv.ram.count_buffers() + PASSING)

    # -- what clients do ---------------------------------------------------------------------

    def prompt(self) -> list[int]:
        """A prompt that is new, or related to an earlier one in one of the ways that occur."""
        rng = self.rng
        chat = self.chats[rng.integers(len(self.chats))]
        more = self.text(rng.integers(1, 60))
        cut = int(rng.integers(0, len(chat)))
        kind = rng.choice(["new", "turn", "turn", "last", "middle", "branch", "again"])
        if kind == "new" or len(chat) > 3 * self.longest:
            return self.text(rng.integers(1, self.longest))
        if kind == "turn":
            return chat + more
        if kind == "last":
            return chat[: max(0, len(chat) - 30)] + more
        if kind == "middle":
            return chat[:cut] + more + chat[cut + len(more) :]
        return chat[:cut] + more if kind == "branch" else list(chat)

    def ask(self) -> None:
        """One request, with marks in random places."""
        rng = self.rng
        ids = self.prompt()
        marks = sorted({int(m) for m in rng.integers(1, len(ids) + 1, rng.integers(0, 5))})
        sampling = SAMPLINGS[rng.integers(len(SAMPLINGS))]
        tokens = int(rng.choice([1, 2, 5, 12, 30, 70], p=[0.15, 0.15, 0.25, 0.25, 0.15, 0.05]))
        self.live.append(self.bench.put(ids, tokens=tokens, marks=marks, sampling=sampling))

    def cancel(self) -> None:
        """End a request of any state."""
        if self.live:
            self.bench.scheduler.cancel(self.live[self.rng.integers(len(self.live))])

    def tick(self) -> None:
        """Let the engine work a little."""
        for _ in range(int(self.rng.choice([1, 1, 3, 10]))):
            if not self.bench.scheduler.idle:
                self._tick()

    def _tick(self) -> None:
        """One tick of the engine, which must at no moment hold more than the budget."""
        mx.reset_peak_memory()
        self.bench.tick()
        most = mx.get_peak_memory() - self.before
        assert most <= self.bench.kv.budget.limit + self.stray, f"{most} bytes were in use"
        self.check()

    def step(self) -> None:
        """Do one thing that may happen."""
        kind = self.rng.choice(["ask", "burst", "cancel", "tick"], p=[0.3, 0.08, 0.07, 0.55])
        if kind == "ask":
            self.ask()
        elif kind == "burst":
            for _ in range(int(self.rng.integers(2, 7))):
                self.ask()
        elif kind == "cancel":
            self.cancel()
        else:
            self.tick()
        self.check()

    def finish(self) -> None:
        """Run to idleness and check all that the requests and the memory have come to."""
        for _ in range(100_000):
            if self.bench.scheduler.idle:
                break
            self._tick()
        self.check()
        assert not self.live
        for task in self.done:
            self.verify(task)
        self.done.clear()
        self.at_rest()

    # -- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """After each tick: the accounts are right, and whoever is done is taken over."""
        self.bench.check()
        for task in [t for t in self.live if t.over or t.events]:  # type: ignore[attr-defined]
            last = task.events[-1]  # type: ignore[attr-defined]
            if isinstance(last, ContextLengthExceeded) and len(task.ids) + 64 > self.ram_tokens:
                self.live.remove(task)
            elif isinstance(last, BaseException):
                raise last
            elif isinstance(last, Finished):
                self.live.remove(task)
                self.done.append(task)
                self.chats = [*self.chats[-12:], task.ids.tolist() + task.out]

    def verify(self, task: Task) -> None:
        """A reply is the one that the same request gets from a cold model, alone."""
        record, last = task.record, task.events[-1]  # type: ignore[attr-defined]
        assert last.generated_tokens == len(task.out)
        if record.finish_reason != "cancelled":
            assert record.cached_tokens + record.fed_tokens == len(task.ids)
            assert admitted(task).cached_tokens == record.cached_tokens < len(task.ids)
            assert len(task.out) == task.limit or self.ram_tokens < 1 << 20
        if not task.out:
            return
        sampling = task.job.sampling
        if sampling == Sampling():
            self.greedy(task.ids.tolist(), task.out)
        else:
            alone = self.bench.twin().ask(
                task.ids.tolist(), tokens=len(task.out), sampling=sampling
            )
            assert alone.out == task.out, (len(task.ids), sampling)

    def greedy(self, ids: list[int], out: list[int]) -> None:
        """Each token of `out` is the likeliest, says the model over the whole text at once."""
        model = self.bench.model
        logits = model(mx.array([ids + out[:-1]]), cache=make_prompt_cache(model))[0]
        rows = np.asarray(logits[len(ids) - 1 :].astype(mx.float32))
        best, drawn = rows.max(axis=-1), rows[np.arange(len(out)), out]
        wrong = np.flatnonzero(drawn < best - TOLERANCE)
        assert not len(wrong), f"reply to {len(ids)} tokens parts from cold at {wrong[0]}"

    def at_rest(self) -> None:
        """Idle: nothing is in use, every byte is the tree's, and MLX holds what is accounted."""
        memory = self.bench.kv
        check_at_rest(memory)
        gc.collect()
        mx.clear_cache()
        held = memory.budget.used - memory.budget.by_kind()["transient"]
        stray = mx.get_active_memory() - self.before - held
        assert abs(stray) < self.stray, f"{stray} bytes are not accounted for"

    def clear(self) -> None:
        """After everything is dropped, nothing is left."""
        memory = self.bench.kv
        memory.ram.clear()
        assert memory.budget.used == memory.budget.by_kind()["transient"]
        assert not memory.ram.idle
        assert memory.tree.tokens == memory.tree.segments == memory.tree.checkpoints == 0
        self.at_rest()


def live(path: Path, seed: int, steps: int, **kwargs: Any) -> History:
    """A whole history: `steps` things happen, in rounds that each end at rest."""
    history = History(path, seed, **kwargs)
    for n in range(1, steps + 1):
        history.step()
        if n % 40 == 0:
            history.finish()
    history.finish()
    history.clear()
    return history
