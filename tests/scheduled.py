"""A scheduler on a toy model, driven tick by tick in the test's own thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_cache import KVCache
from mlxcache.guess.rule import DraftCosts
from mlxcache.model import kv
from mlxcache.model.guidance.guide import Guide
from mlxcache.model.heads import WithHeads
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.output import OutputParser
from mlxcache.model.pair import Pair
from mlxcache.model.sampling import make_processors, make_sampler
from mlxcache.residency import memory as core
from mlxcache.residency.residency import Rounds
from mlxcache.scheduling import cost
from mlxcache.scheduling.decoder import DecoderRow
from mlxcache.scheduling.parts import WHOLE, Parts
from mlxcache.scheduling.prefill import Limits, PrefillDecodeBalance
from mlxcache.scheduling.scheduler import Scheduler
from mlxcache.scheduling.speculation import DraftModel, HeadsOfModel, Speculation
from mlxcache.scheduling.task import Output, Task
from mlxcache.store.store import Store
from mlxcache.tree.budget import Budget
from mlxcache.types import (
    Admitted,
    Finished,
    FinishReason,
    Job,
    Piece,
    Prompt,
    RequestRecord,
    Sampling,
    Text,
    token_ids,
)
from tests.accounts import check_accounts


@pytest.fixture(scope="session", autouse=True)
def each_model_is_measured_once() -> Iterator[None]:
    """What a forward pass costs is measured by the first engine that serves a model's shapes."""
    known: dict[object, cost.Cost] = {}

    def measure(model: Any, layout: kv.Layout, room: int, **options: Any) -> cost.Cost:
        arrays = [(name, a.shape, a.dtype) for name, a in tree_flatten(model.parameters())]
        key = (type(model), str(arrays), room // max(1, layout.bytes_per_token) >= cost.FAR or room)
        if key not in known:
            known[key] = cost.measure(model, layout, room, **options)
        return copy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "cost", SimpleNamespace(**vars(cost) | {"measure": measure}))
        yield


class PlainParser(OutputParser):
    """A parser that knows no text: every token is a piece of its own."""

    done: FinishReason | None = None
    stop_sequence: str | None = None
    reasoning_tokens = 0
    in_text = True
    thinking = False

    def __init__(self) -> None:
        """It reads nothing of a tokenizer."""

    def feed(self, token: int) -> list[Piece]:
        return [Text(str(token))]

    def finish(self, reason: FinishReason) -> list[Piece]:
        return []


def prompt(rng: np.random.Generator, n: int) -> list[int]:
    """`n` random tokens."""
    return [int(t) for t in rng.integers(10, 400, n)]


class SteadyCost(cost.Cost):
    """Costs that no measurement changes: chunks are as long however loaded the machine is."""

    def observe(self, tokens: int, seconds: float, cached: int) -> None:
        """Measure nothing."""


class FreeDrafts(DraftCosts):
    """Costs at which every draft pays, whatever a live round takes."""

    def __init__(self) -> None:
        super().__init__({0: [(1, 1.0), (2, 1.0)]}, {0: [(1, 1e-9), (2, 1e-9)]})

    def catch_up(self, tokens: int, cached: int) -> float:
        return 0.0

    def observe(self, tokens: int, seconds: float, cached: int) -> float:
        return self.at(cached)(tokens)

    def excess(self, tokens: int, seconds: float, cached: int) -> float:
        return 0.0


def drafting(model: Any, costs: DraftCosts | None = None) -> Speculation | None:
    """Proposals of three tokens at a time if `model` has a draft or heads, as many as pay."""
    costs = costs or FreeDrafts()
    if isinstance(model, Pair):
        return Speculation(costs, [DraftModel(model, costs, 3)])
    if isinstance(model, WithHeads):
        return Speculation(costs, [HeadsOfModel(model, costs, 3)])
    return None


class Bench:
    """A model with its scheduler; `ask` runs a request to its end, `put` only queues it.

    `speculation`: makes guesses for the schedulers that `use` makes from now on.
    """

    speculation: Speculation | None = None
    parts: Parts = WHOLE

    def __init__(
        self,
        path: Path,
        *,
        ram: int = 1 << 30,
        chunk: int = 64,
        concurrency: int = 8,
        kv_bits: int | None = None,
        draft: Path | None = None,
        loaded: Loaded | None = None,
        layout: kv.Layout | None = None,
    ):
        loaded = loaded or load(ModelSpec(str(path), draft=str(draft) if draft else None))
        self.loaded = loaded
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        layout = layout or kv.survey(self.model, kv_bits=kv_bits)
        self.rounds = Rounds()
        self.thread = self.rounds.thread
        self.cost: cost.Cost = SteadyCost(64.0, 0.0, 0.0, 1e6)
        self.chunk = chunk
        self.limits = Limits(concurrency, chunk, 65536, 1 << 30)
        self.ids = itertools.count()
        self.use(self.open_cache(layout, Budget(ram)))

    def twin(self) -> Bench:
        """The same model with nothing cached."""
        fresh = copy(self)
        fresh.speculation = None
        fresh.rounds = Rounds()
        fresh.thread = fresh.rounds.thread
        fresh.use(self.open_cache(self.kv.layout, Budget(1 << 30)))
        return fresh

    def open_cache(self, layout: kv.Layout, budget: Budget, *args: Any, **kwargs: Any) -> KVCache:
        """An empty cache of this bench's parts."""
        parts = self.parts
        return KVCache.open(
            layout, budget, *args, lineage=parts.lineage, files=parts.files, **kwargs
        )

    def use(
        self, cache: KVCache, clock: Callable[[], float] = time.perf_counter, **kwargs: Any
    ) -> None:
        """Start again with `cache`; `clock` measures the time of decoding beside a prefill."""
        if (old := getattr(self, "scheduler", None)) is not None:
            self.rounds.remove(old)
        self.kv = cache
        kwargs.setdefault("speculation", self.speculation or drafting(self.model))
        self.scheduler = Scheduler(
            self.model,
            cache,
            self.cost,
            self.limits,
            prepare=lambda task: self.prepare_output(task),  # noqa: PLW0108 - tests replace it
            on_end=lambda task: None,
            thread=self.thread,
            balance=PrefillDecodeBalance(clock),
            parts=self.parts,
            **kwargs,
        )
        self.rounds.add(self.scheduler)

    def open_store(self, folder: Path, limit: int) -> Store:
        """Open the store in `folder`, which may take `limit` bytes."""
        return Store.open(folder, "test", limit, free_floor=0)

    def open_disk(
        self, folder: Path, *, ram: int = 1 << 30, limit: int = 1 << 30, pending: int = 1 << 20
    ) -> DiskTier:
        """Start again with an empty RAM tier over the store in `folder`, as a new process would."""
        budget = Budget(ram)
        assert budget.reserve("pending", pending)
        store = self.open_store(folder, limit)
        wake = self.thread.wake
        self.use(self.open_cache(self.kv.layout, budget, store, pending_limit=pending, wake=wake))
        assert self.kv.disk is not None
        return self.kv.disk

    def prepare_output(self, task: Task) -> Output:
        """A parser that makes each token a piece, and the sampler that the task asks for."""
        sampling = task.job.sampling
        processors = make_processors(sampling, task.prompt_tokens)
        context = mx.array(task.ids[:-1]) if processors else None
        sampler = make_sampler(sampling, self.kv.layout.vocab_size)
        guide = task.guide.copy() if task.guide is not None else None
        row = DecoderRow(sampler, processors, context, id=task.record.id, guide=guide)
        return Output(PlainParser(), row)

    def put(
        self,
        ids: Sequence[int],
        *,
        tokens: int = 12,
        marks: Sequence[int] = (),
        sampling: Sampling | None = None,
        session: str | None = None,
        keeps: Sequence[tuple[int, float]] = (),
        top_logprobs: int | None = None,
        guide: Guide | None = None,
    ) -> Task:
        """Queue a request for `tokens` tokens after the prompt `ids`, which follow `guide`."""
        prompt = Prompt(token_ids(ids), tuple(marks), keeps=tuple(keeps))
        name = f"r{next(self.ids)}"
        job = Job(
            name,
            prompt,
            max_tokens=tokens,
            sampling=sampling or Sampling(),
            session=session,
            top_logprobs=top_logprobs,
        )
        record = RequestRecord(name, None, "test", None, "queued", 0.0, len(ids))
        events: list[Any] = []
        task = Task(job, events.append, record, guide)
        task.events = events  # type: ignore[attr-defined]
        self.scheduler.submit(task)
        return task

    def run(self, *, until: Callable[[], bool] | None = None) -> None:
        """Tick until nothing is left to do, or `until` holds."""
        scheduler = self.scheduler
        for _ in range(100_000):
            if not (scheduler.waiting or scheduler.prefilling or len(scheduler.lanes)):
                return
            if until is not None and until():
                return
            self.tick()
            self.check()
        raise AssertionError("the scheduler does not come to an end")

    def tick(self) -> None:
        """One round of the MLX thread's loop, in the test's own thread."""
        self.rounds.tick()

    def ask(self, ids: Sequence[int], **kwargs: Any) -> Task:
        """Run one request to its end; the task, whose `out` are the tokens drawn."""
        task = self.put(ids, **kwargs)
        self.run()
        for event in task.events:  # type: ignore[attr-defined]
            if isinstance(event, BaseException):
                raise event
        return task

    def check(self) -> None:
        """The budget is what the lineages and the tree really hold, and is kept."""
        check_accounts(self.kv, self.scheduler.lanes)

    def cold(self, ids: Sequence[int], tokens: int = 12) -> list[int]:
        """The greedy continuation by mlx-lm's own generator, with a cache of its own."""
        from mlx_lm.generate import generate_step

        steps = generate_step(mx.array(list(ids)), self.model, max_tokens=tokens)
        return [int(token) for token, _ in steps]


def finished(task: Task) -> Finished:
    """The task's last event."""
    event = task.events[-1]  # type: ignore[attr-defined]
    assert isinstance(event, Finished), event
    return event


def admitted(task: Task) -> Admitted:
    """The task's admission."""
    return next(e for e in task.events if isinstance(e, Admitted))  # type: ignore[attr-defined]


FAMILIES = ("llama", "gemma3", "qwen3_5")


@pytest.fixture(scope="session")
def toy_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One toy model directory per family."""
    from tests.toys.toy import make_toy

    root = tmp_path_factory.mktemp("engine-toys")
    return {family: make_toy(root / family, family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def bench(request: pytest.FixtureRequest, toy_paths: dict[str, Path]) -> Bench:
    """A fresh scheduler on each family in turn."""
    return Bench(toy_paths[request.param])


@pytest.fixture
def rng() -> np.random.Generator:
    """Random token ids, the same each time."""
    return np.random.default_rng(7)
