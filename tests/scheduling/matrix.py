"""Conversations on a toy of any family: what each request must reuse, and say, to be right."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.restore import MIN_GAIN, MIN_UNKNOWN
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.model.kv import Caches, Layout
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.weights import BaseUse, Weights, is_resident
from mlxcache.prompt.marks import MARK_DISTANCE
from mlxcache.residency.residency import Residency, Rounds
from mlxcache.residency.resident import Resident
from mlxcache.scheduling.task import Output, Task
from mlxcache.tree.budget import Budget
from mlxcache.types import TokenLogprob
from tests.rounding import rounding
from tests.scheduled import Bench, admitted

RAM = 1 << 28
PENDING = 1 << 20
"""Bytes of copies on their way to disk."""

HEAD, MESSAGE, REPLY = 60, 30, 8
"""Tokens of tools and system, of a person's message, and of a reply."""

GENERATION, END = [5, 6, 7], [8, 9]
"""What opens a reply, and what ends a message."""

Logprobs = npt.NDArray[np.float32]

Switches = Literal["none", "kept", "cleared"]
"""What another model, which answers a request before each one, does to the model.

`kept`: the memory holds the weights of one of them; the model's KV stays in RAM. `cleared`: the
model is unloaded for being idle, and its KV leaves RAM once it is on disk.
"""

ROUNDED = {8: 0.1, 4: 0.4}
"""By how much log-probabilities may differ on KV of so many bits.

Sums in another order decide how a few numbers are quantised. Measured on the toys: that changes
them by up to 0.02 and 0.11, and one wrong token of two hundred by 0.46 or more.
"""

ELSEWHERE = tuple(range(20, 32))
"""The prompt of the other model."""


def text(seed: int, length: int) -> list[int]:
    """Random tokens, the same for a seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(10, 400, length)]


@dataclass(frozen=True)
class Talk:
    """A conversation as an agent sends it: whole, each time."""

    head: tuple[int, ...]
    messages: tuple[tuple[int, ...], ...] = ()

    def plus(self, message: Sequence[int]) -> Talk:
        """One message more."""
        return Talk(self.head, (*self.messages, tuple(message)))

    def asked(self, seed: int, length: int = MESSAGE) -> Talk:
        """One message of a person more."""
        return self.plus([*text(seed, length), *END])

    def answered(self, task: Task) -> Talk:
        """With what the model said to it."""
        return self.plus([*GENERATION, *task.out, *END])

    def edited(self, index: int, seed: int) -> Talk:
        """With another text in the place of a message."""
        other = (*text(seed, MESSAGE), *END)
        messages = list(self.messages)
        messages[index] = other
        return Talk(self.head, tuple(messages))

    def parted(self, at: int, seed: int) -> Talk:
        """Another text from token `at` on."""
        kept, pieces = at, []
        for piece in (self.head, *self.messages):
            pieces.append(piece[:kept])
            kept -= len(pieces[-1])
            if not kept:
                break
        other = [*text(seed, MESSAGE), *END]
        return Talk(pieces[0], tuple(pieces[1:])).longer(other)

    def longer(self, more: Sequence[int]) -> Talk:
        """With more in its last piece."""
        if not self.messages:
            return Talk((*self.head, *more))
        return Talk(self.head, (*self.messages[:-1], (*self.messages[-1], *more)))

    def upto(self, count: int) -> Talk:
        """Its first messages alone."""
        return Talk(self.head, self.messages[:count])

    @property
    def ids(self) -> list[int]:
        """The prompt."""
        return [*self.head, *(token for m in self.messages for token in m), *GENERATION]

    @property
    def marks(self) -> tuple[int, ...]:
        """Where the head and each message end; the last is where the reply is asked for."""
        sizes = [len(self.head), *(len(m) for m in self.messages)]
        return tuple(int(at) for at in np.cumsum(sizes))


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass
class Ledger:
    """All requests so far, and what that promises the next one.

    `opaque`: some layers need checkpoints, and those stand at message ends, where a reply ended,
    and where two prompts parted before; of such places that are close together at the first.
    """

    opaque: bool
    computed: list[list[int]] = field(default_factory=list)
    points: list[list[int]] = field(default_factory=list)

    def promised(self, ids: list[int]) -> int:
        """How many tokens of a prompt must be cached."""
        most = len(ids) - 1
        if not self.opaque:
            known = max((shared(ids, old) for old in self.computed), default=0)
            return max(0, min(known, most) - 1)
        there = {len(point) for point in self.points if shared(ids, point) == len(point) <= most}
        last = max(there, default=0)
        return min((at for at in there if at > last - MARK_DISTANCE), default=0)

    def note(self, talk: Talk, computed: list[int]) -> None:
        """Account for a request: what was computed of it and of its reply."""
        ids = talk.ids
        self.points += [ids[:at] for at in talk.marks if at <= len(computed)]
        for old in self.computed:
            parted = shared(ids, old)
            if 0 < parted < min(len(old), len(ids) - 1, len(computed)):
                self.points.append(ids[:parted])
        if len(computed) >= len(ids):  # its reply ended
            self.points.append(computed)
        self.computed.append(computed)


class Checked(Bench):
    """A toy's bench that checks each reply: its words, and how much of its prompt was cached.

    It keeps each token's log-probabilities, and compares them with those of a cold model. `known`:
    such cold log-probabilities, to which more are added. `kv_bits`: those of the caches of both. By
    its clock every pass takes 1 ms.
    """

    switches: Switches = "none"

    def __init__(
        self,
        name: str,
        path: Path,
        loaded: Loaded,
        layout: Layout | None = None,
        known: dict[tuple[int, ...], Logprobs] | None = None,
        *,
        kv_bits: int | None = None,
    ):
        self.name = name
        self.kv_bits = kv_bits
        self.said: dict[str, list[Logprobs]] = {}
        self.known = {} if known is None else known
        self.disks: list[DiskTier] = []
        super().__init__(path, ram=RAM, loaded=loaded, layout=layout, kv_bits=kv_bits)

    def use(self, cache: KVCache, clock: object = None, **kwargs: Any) -> None:
        """Start again with `cache`."""
        ticks = itertools.count()
        super().use(cache, lambda: 1e-3 * next(ticks), **kwargs)

    def fresh(self) -> None:
        """Nothing is cached, and nothing was asked."""
        self.ledger = Ledger(self.kv.layout.opaque)
        self.said.clear()
        self.use(self.open_cache(self.kv.layout, Budget(RAM)))

    def start(self, folder: Path) -> DiskTier:
        """An empty RAM tier over what the disk has in `folder`, as a new process has it."""
        disk = self.open_disk(folder, ram=RAM, pending=PENDING)
        self.disks.append(disk)
        return disk

    def await_disk(self, seconds: float) -> None:
        """Wait until a thread of the disk has something for the next tick, at most so long."""
        end = time.monotonic() + seconds
        while not self.thread.has_posted and time.monotonic() < end:
            time.sleep(0.002)

    def close(self) -> None:
        """Let go of the disks."""
        for disk in self.disks:
            disk.close(0.0)
        self.disks.clear()

    def prepare_output(self, task: Task) -> Output:
        output = super().prepare_output(task)
        said = self.said.setdefault(task.record.id, [])

        def keep(logprobs: mx.array, tokens: Sequence[int]) -> list[TokenLogprob]:
            said.append(np.array(logprobs[0].astype(mx.float32)))
            return [TokenLogprob("", tokens[0], 0.0)]

        return replace(output, logprob=keep)

    # -- asking ------------------------------------------------------------------------------

    def send(self, talk: Talk, *, tokens: int = REPLY) -> Task:
        """Queue a request."""
        return self.put(talk.ids, tokens=tokens, marks=talk.marks)

    def say(self, talk: Talk, *, tokens: int = REPLY) -> Task:
        """Run a request and check it."""
        task = self.send(talk, tokens=tokens)
        self.run()
        self.check_reply(task, talk)
        return task

    def check_reply(self, task: Task, talk: Talk) -> None:
        """A reply is the cold one, and of its prompt as much was cached as is promised."""
        ids, record = talk.ids, task.record
        promised = self.ledger.promised(ids)
        if self.switches == "cleared" and (len(ids) <= MIN_UNKNOWN or promised < MIN_GAIN):
            promised = 0  # so little is not read from disk
        assert admitted(task).cached_tokens == record.cached_tokens
        assert record.cached_tokens + record.fed_tokens in (len(ids) - 1, len(ids))
        self.check_words(task)
        assert record.cached_tokens >= promised, (
            f"{record.cached_tokens} of {len(ids)} tokens were cached, {promised} are promised"
        )
        self.ledger.note(talk, self.held(task))

    def held(self, task: Task) -> list[int]:
        """What is computed of a finished request: perhaps not the last token that it drew."""
        return task.tokens().tolist()[: len(task.ids) + max(0, len(task.out) - 1)]

    def check_words(self, task: Task) -> None:
        """Each token is the likeliest of a cold model, and so are all their chances."""
        assert task.out
        cold = self.cold_logprobs(task.ids.tolist(), task.out)
        warm = np.stack(self.said[task.record.id])
        worst = np.abs(warm - cold).max(axis=-1)
        tolerance = self.tolerance(cold)
        assert worst.max() <= tolerance, f"log-probabilities differ by {worst.tolist()}"
        drawn = cold[np.arange(len(task.out)), task.out]
        assert (drawn >= cold.max(axis=-1) - tolerance).all()

    def tolerance(self, cold: Logprobs) -> float:
        """The most that sums in another order may change the log-probabilities `cold`."""
        return rounding(cold) if self.kv_bits is None else ROUNDED[self.kv_bits]

    def cold_logprobs(self, ids: list[int], out: list[int]) -> Logprobs:
        """Of each token of `out`, computed without a cache, shape (len(out), vocabulary)."""
        key = (len(ids), *ids, *out[:-1])
        if key not in self.known:
            self.known[key] = self.compute_cold(ids, out[:-1])
        return self.known[key]

    def compute_cold(self, ids: list[int], more: list[int]) -> Logprobs:
        """Of the tokens after `ids` and after each of `more`, unquantised by mlx-lm's own cache."""
        plain = self.kv_bits is None
        cache = make_prompt_cache(self.model) if plain else self.kv.layout.make()
        return cold_logprobs(self.model, cache, [*ids, *more])[len(ids) - 1 :]


def cold_logprobs(model: Module, cache: Caches, fed: list[int]) -> Logprobs:
    """After each token of `fed`, by an empty `cache`, shape (len(fed), vocabulary)."""
    rows = []
    for at in range(0, len(fed), 50):
        logits = model(mx.array([fed[at : at + 50]]), cache=cache)[0].astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(rows[-1])
    return np.array(mx.concatenate(rows))


class Family(Checked):
    """A toy's bench; with `switches`, it takes turns with the model in `other`.

    `known`: as for `Checked`, of the model in `path`.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        switches: Switches = "none",
        other: Path | None = None,
        known: dict[tuple[int, ...], Logprobs] | None = None,
        *,
        kv_bits: int | None = None,
    ):
        self.switches = switches
        residency = Residency()
        self.weights, loaded = opened(residency, name, path)
        self.other: Bench | None = None
        super().__init__(name, path, loaded, known=known, kv_bits=kv_bits)
        self.rounds = Rounds(residency)
        self.thread = self.rounds.thread
        if other is not None:
            self.other = self._add_other(residency, other)
        self.fresh()

    def _add_other(self, residency: Residency, path: Path) -> Bench:
        """Add another model, which is not in memory, and whose first reply is `expected`."""
        weights, loaded = opened(residency, "other", path)
        if self.switches == "kept":
            budget = Budget(max(weights.nbytes, self.weights.nbytes))
            residency.share(SharedRam(budget, residency.free_idle))
        other = Bench(path, ram=RAM, loaded=loaded)
        other.rounds, other.thread = self.rounds, self.thread
        other.use(other.kv)
        self.expected = other.cold(ELSEWHERE, 2)
        self._reside(other, weights)
        assert residency.unload(other.scheduler)
        return other

    def _reside(self, bench: Bench, weights: Weights) -> Resident:
        """Let the thread decide when `weights`, which are in memory, are dropped and read again."""
        idle_s = 0.0 if self.switches == "cleared" else None
        resident = Resident(weights.use.name, weights, bench.scheduler, reserved={}, idle_s=idle_s)
        self.rounds.residency.add(resident)
        return resident

    def use(self, cache: KVCache, clock: object = None, **kwargs: Any) -> None:
        """Start again with `cache` and all weights."""
        super().use(cache, clock, **kwargs)
        if not self.weights.resident:
            assert self.other is None or self.rounds.residency.unload(self.other.scheduler)
            list(self.weights.read())
        self.resident = self._reside(self, self.weights)

    def switch(self) -> None:
        """Let another model have the memory and answer a request, unless requests wait or run."""
        if self.other is None or not self.scheduler.idle:
            return
        former = self.resident.unloads
        if self.switches == "cleared":
            while self.resident.state == "loaded" or self.kv.tree.tokens:
                if self.kv.disk is not None:
                    self.kv.disk.write_behind.hurry()  # else states rest for seconds
                self.tick()
        assert self.other.ask(ELSEWHERE, tokens=2).out == self.expected
        assert self.resident.unloads == former + 1
        assert not is_resident(self.model)

    def send(self, talk: Talk, *, tokens: int = REPLY) -> Task:
        """Queue a request, after another model had the memory if `switches`."""
        self.switch()
        return super().send(talk, tokens=tokens)


def opened(residency: Residency, name: str, path: Path) -> tuple[Weights, Loaded]:
    """Load a model whose weights `residency` may drop later."""
    use, spec = BaseUse(residency.account.bases, name), ModelSpec(str(path))
    loaded = load(spec, use=use)
    return Weights(loaded, spec, use), loaded


def conversation(
    family: Checked, turns: int, after_each: Callable[[], object] = lambda: None
) -> Talk:
    """A conversation that ends with a reply, all of it asked and checked."""
    talk = Talk(tuple(text(1, HEAD)))
    for turn in range(turns):
        talk = talk.asked(10 + turn)
        talk = talk.answered(family.say(talk))
        after_each()
    return talk


def settled(disk: DiskTier) -> None:
    """Wait until all is written."""
    assert disk.write_behind.drain(20.0) == 0
