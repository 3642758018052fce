"""What lives on the MLX thread: the model, its memory and its scheduler, made together."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcache.cache.capacity import pending_bytes, pool_bytes, transient_bytes, warnings
from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory
from mlxcache.cache.pressure import Pressure
from mlxcache.cache.ram import Handles
from mlxcache.config import (
    Settings,
    disk_limit,
    explain_auto,
    format_size,
    machine_bytes,
    memory_for,
    ram_limit,
)
from mlxcache.config.memory import read_footprint
from mlxcache.engine import cost, images
from mlxcache.engine.admission import Turns
from mlxcache.engine.decoder import Drawn, Row
from mlxcache.engine.prefill import Limits
from mlxcache.engine.scheduler import Scheduler
from mlxcache.engine.task import Task
from mlxcache.errors import BadRequest, ContextLengthExceeded, ModelError, StoreError
from mlxcache.model import demo, device, kv, load
from mlxcache.model import serialise as wire
from mlxcache.model.fingerprint import fingerprint
from mlxcache.model.load import Loaded
from mlxcache.model.output import OutputParser, reader
from mlxcache.model.sampling import make_processors, make_sampler, top_logprobs
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.replies import Replies
from mlxcache.store.session_rows import ReplyRow
from mlxcache.store.store import Store
from mlxcache.tree.budget import Budget
from mlxcache.types import Prompt

log = logging.getLogger("mlxcache.engine")


def fetch_model(
    settings: Settings, on_progress: Callable[[str, float | None], None]
) -> load.ModelSpec | None:
    """What to load, downloaded if need be; None: the demo, which the MLX thread makes."""
    if settings.model is None:
        return None

    def downloading(name: str, done: int, total: int) -> None:
        on_progress(f"downloading {name}", done / total if total else None)

    spec = load.ModelSpec(
        settings.model,
        adapter=settings.adapter,
        draft=settings.draft_model,
        trust_remote_code=settings.trust_remote_code,
        context=settings.context,
    )
    load.fetch(spec, downloading)
    return spec


def demo_spec(settings: Settings) -> load.ModelSpec:
    """The built-in demo, made where it is not there yet. On the MLX thread."""
    return load.ModelSpec(
        str(demo.materialise(settings.cache_dir / "demo")),
        context=settings.context,
        id=demo.DEMO_ID,
        is_demo=True,
    )


def maker(core: Core, settings: Settings) -> Callable[[Replies], PromptBuilder]:
    """A function that makes builders for the model that is served."""

    def made(replies: Replies) -> PromptBuilder:
        loaded = core.loaded
        return PromptBuilder(
            loaded.tokenizer,
            settings.chat_template_args,
            core.info.context_length,
            loaded.vision if core.images else None,
            settings.rules,
            read=reader(loaded.tokenizer),
            replies=replies,
        )

    return made


class Builders:
    """Makes an owner's builder when it is asked for first. Safe in any thread.

    A builder puts replies, results of tools and orders that it has seen back where a client lost
    them, and tokenises faster what it knows: with one for all, that would tell of others' sessions.
    """

    def __init__(self, make: Callable[[Replies], PromptBuilder]):
        self._make = make
        self._lock = Lock()
        self._replies: defaultdict[str | None, Replies] = defaultdict(Replies)
        self._made: dict[str | None, PromptBuilder] = {}

    def of(self, owner: str | None) -> PromptBuilder:
        """An owner's builder. Making one takes tens of milliseconds."""
        with self._lock:
            if owner not in self._made:
                self._made[owner] = self._make(self._replies[owner])
            return self._made[owner]

    def learn(self, rows: Mapping[str | None, Sequence[ReplyRow]]) -> None:
        """Remember replies that other servers or earlier runs wrote, by owner."""
        for owner, replies in rows.items():
            with self._lock:
                known = self._replies[owner]
            known.learn(replies)


LEAST_CONTEXT = 512
"""Tokens that the budget must have room for; with fewer no agent could ask anything."""


class Core:
    """A loaded model with all that serves it. Make and use it on the MLX thread."""

    def __init__(
        self,
        loaded: Loaded,
        settings: Settings,
        ended: Callable[[Task], None],
        ticked: Callable[[], None],
    ):
        self.loaded = loaded
        self._ram = settings.ram
        self.layout = kv.survey(loaded.model, kv_bits=settings.kv_bits)
        for name in self.layout.unknown:
            log.warning("cache class %s is unknown: the model is served, nothing is cached", name)
        self.memory = Memory(self.layout, self._budget(settings))
        self.memory.tree.worth.growth = self.cost.growth
        self.images = self._make_images(settings)
        self.memory.room.handles = Handles(self.layout, device.buffer_limit())
        self.disk: Disk | None = None
        self.pressure: Pressure | None = None
        self.info = replace(loaded.info, context_length=self._longest(settings.ram))
        limits = Limits(
            concurrency=settings.concurrency,
            prefill_chunk=settings.prefill_chunk,
            context=self.info.context_length,
            transient=self.transient,
        )
        self.scheduler = Scheduler(
            loaded.model,
            self.memory,
            self.cost,
            limits,
            dress=self._dress,
            ended=ended,
            ticked=ticked,
        )
        self.scheduler.prefill.images = self.images
        self.scheduler.lanes.drafts = settings.num_draft_tokens

    def _make_images(self, settings: Settings) -> images.Images | None:
        """What feeds images, with the memory for it set aside; None where there can be none."""
        vision, budget = self.loaded.vision, self.memory.budget
        if vision is None:
            return None
        found = images.measure(vision, self.transient)
        if found is None:
            log.warning("this model is fed the same whatever an image shows: text alone is served")
            return None
        largest = found.longest(self.transient, vision.most_tokens)
        while largest and found.kept(largest, settings.prefill_chunk) > budget.limit // 8:
            largest //= 2
        if not largest or not budget.reserve("images", found.kept(largest, settings.prefill_chunk)):
            log.warning("--ram %s has no room for images: text alone is served", settings.ram)
            return None
        return images.Images(vision, found, largest)

    def check(self, prompt: Prompt) -> None:
        """Raise BadRequest or ContextLengthExceeded for what can never be fed. In any thread."""
        tokens, context = len(prompt.ids), self.info.context_length
        if tokens == 0:
            raise BadRequest("The prompt is empty.", param="prompt")
        if tokens >= context:
            own = self.loaded.info.context_length
            why = f" (all that --ram {self._ram} has room for)" if context < own else ""
            raise ContextLengthExceeded(
                f"prompt is too long: {tokens} tokens > {context - 1} maximum{why}"
            )
        longest = max((span.end - span.start for span in prompt.images), default=0)
        if self.images is not None and longest > self.images.largest:
            raise BadRequest(
                f"An image of {longest} tokens is too large: the memory budget (--ram) has room "
                f"for one of {self.images.largest}.",
                param="messages",
            )
        ids, vocabulary = prompt.fed, self.layout.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            # the CPU reads beyond the embedding table without a check
            raise BadRequest(f"Token ids must be from 0 to {vocabulary - 1}.", param="prompt")

    def _budget(self, settings: Settings) -> Budget:
        """The budget by `--ram`, with what MLX's pool and forward passes take set aside."""
        info, layout = self.loaded.info, self.layout
        machine, working_set = machine_bytes(), device.working_set_bytes()
        self._whole = memory_for(machine, working_set)
        limit = ram_limit(
            settings.ram,
            machine_bytes=machine,
            working_set_bytes=working_set,
            weights_bytes=info.weights_bytes,
        )
        if settings.ram == "auto":
            why = explain_auto(self._whole, info.weights_bytes, metal=working_set is not None)
            log.info("--ram auto is %s: %s", format_size(limit), why)
        pool = pool_bytes(limit)
        device.prepare(pool)
        self.cost = cost.measure(self.loaded.model, layout, limit // 8)
        if self.loaded.draft is not None:  # logits of all that a pass verifies
            self.cost.fixed *= 1 + settings.num_draft_tokens
        self.transient = self._transient(limit, Turns(settings.concurrency).most)
        budget = Budget(limit)
        kinds = {"pool": pool, "transient": self.transient, "pending": 0}
        if settings.disk != "off":
            kinds["pending"] = pending_bytes(limit, layout)
        if not all(budget.reserve(kind, size) for kind, size in kinds.items()):
            raise ModelError(f"--ram {settings.ram} is too little to run this model at all")
        return budget

    def open_disk(self, settings: Settings) -> None:
        """Use the disk tier of this model's namespace. Where there can be none, say so."""
        room = self.memory.budget.by_kind()["pending"]
        if not room:
            return
        folder = settings.cache_dir / "store"
        wake = self.scheduler.inbox.put
        try:
            store = Store.open(
                folder,
                self._namespace(settings),
                disk_limit(settings.disk, folder),
                needs_checkpoints=bool(self.layout.opaque),
            )
            self.disk = Disk(store, self.memory, room, lambda: wake(_nothing))
        except (StoreError, OSError) as error:
            log.warning("no disk tier, all is served from RAM: %s", error)
            self.memory.budget.release("pending", room)
        self.scheduler.use(self.disk)

    def watch(self) -> None:
        """Give memory up from now on where the machine is short of it."""
        held = mx.get_active_memory() + mx.get_cache_memory()
        self.pressure = Pressure(
            self.memory.room,
            self.scheduler.inbox.put,
            base=max(0, read_footprint() - held),
            weights=self.loaded.info.weights_bytes,
        )
        self.pressure.start()

    def _namespace(self, settings: Settings) -> str:
        return fingerprint(
            self.loaded.path,
            adapter=Path(settings.adapter).expanduser() if settings.adapter else None,
            memo=settings.cache_dir / "fingerprints.json",
            layout_key=wire.layout_key(self.layout),
            draft=self.loaded.draft,
        )

    def pressed(self) -> dict[str, Any]:
        """What is known of the machine's memory, from any thread."""
        return self.pressure.figures() if self.pressure is not None else {}

    def close(self, seconds: float) -> None:
        """Write what is not on disk yet, for at most so long, and let everything go."""
        if self.pressure is not None:
            self.pressure.stop()
        if self.disk is not None:
            left = self.disk.close(seconds)
            if left:
                log.warning("up to %d tokens could not be written to disk in time", left)
        self.memory.room.clear()

    def _transient(self, limit: int, rows: int) -> int:
        """Bytes set aside for forward passes."""
        per_token = max(1, self.layout.bytes_per_token)
        longest = min(self.loaded.info.context_length, limit // per_token)
        least = max(
            self.cost.transient(cost.FEWEST, longest),
            self.cost.transient(1, longest // rows, rows),
        )
        return transient_bytes(limit, least)

    def _longest(self, ram: str | int) -> int:
        """The tokens that both the model's context and the budget allow."""
        context = self.loaded.info.context_length
        longest = bisect_left(range(1, context + 1), True, key=lambda n: not self.fits(n))
        if longest < min(context, LEAST_CONTEXT):
            raise ModelError(
                f"--ram {ram} has room for {longest} tokens of this model: give it more, "
                "for example --ram 8GB or --ram 25%"
            )
        if longest < context:
            log.warning("--ram %s has room for %d of the model's %d tokens", ram, longest, context)
        for line in warnings(
            self.layout, context=context, weights=self.loaded.info.weights_bytes,
            ram=self.memory.budget.limit, machine=self._whole,
        ):  # fmt: skip
            log.warning("%s", line)
        return longest

    def fits(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens could be served with nothing else held."""
        states = self.layout.running_bytes + self.layout.checkpoint_bytes
        needed = (tokens + 64) * self.layout.bytes_per_token + states
        room = self.memory.room.largest()
        return needed <= room and self.cost.transient(cost.FEWEST, tokens) <= self.transient

    def _dress(self, task: Task) -> None:
        """Give a task its parser, its sampler and its processors."""
        job, tokenizer = task.job, self.loaded.tokenizer
        task.parser = OutputParser(
            tokenizer,
            tools=job.tools,
            parallel_tools=job.parallel_tools,
            stop=job.stop,
            thinking_open=job.prompt.thinking_open,
            generic_tools=job.prompt.generic_tools,
            plain=job.raw,
            prime=task.fed[-4:].tolist() if job.raw else (),
        )
        processors = make_processors(job.sampling, len(task.ids))
        context = mx.array(np.asarray(task.fed[:-1])) if processors else None
        sampler = make_sampler(job.sampling, self.layout.vocab_size)
        task.row = Row(task, sampler, processors, context)
        if job.top_logprobs is not None:
            wanted = job.top_logprobs

            def logprob(drawn: Drawn):  # type: ignore[no-untyped-def]
                return top_logprobs(drawn.logprobs, drawn.token, wanted, tokenizer)

            task.logprob = logprob


def _nothing() -> None:
    """What a wake-up has the MLX thread do."""
