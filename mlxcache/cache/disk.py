"""The disk tier as the engine uses it: what is written behind, what is restored."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxcache.cache.kv_cache import Lease, Memory
from mlxcache.cache.restore import Restorer
from mlxcache.cache.write_behind import WORTH_WRITING, Persist, Spill
from mlxcache.engine.task import Task
from mlxcache.errors import StoreError
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found
from mlxcache.store.store import Store
from mlxcache.store.writer import Job, Writer
from mlxcache.tree.prefix_tree import Node
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

SHARE = 0.05
"""The share of the MLX thread's time that copies for the disk may take while replies go on."""

END_S = 1.0
"""Seconds of a stop that are left for the write in hand to end."""

STATS_S = 0.5
"""For how long the store's figures may be old."""


class Disk:
    """One model's store with its writer. `wake` lets the MLX thread look again, from any thread.

    `room` bytes of copies may be on their way to disk at a time.
    """

    def __init__(self, store: Store, memory: Memory, room: int, wake: Callable[[], None]):
        self.store = store
        self._wake = wake
        self._timer = threading.Timer(0.0, wake)
        self.persist = Persist(memory.layout, memory.tree, room, limit=store.limit or 0)
        # `Persist` keeps to `room`; the writer still counts a job while it says that it is done
        self.writer = Writer(store, 2 * room, self._written, self._rest)
        self.persist.attach(self.writer, self._look)
        self.persist.refused.wake_in = self._wake_in
        self.restorer = Restorer(store, memory.layout, wake)
        memory.room.relief = self.persist.relieve
        memory.room.durable = lambda: not self.persist.refused.failing
        memory.room.writing, memory.room.waive = self.persist.locks, self.persist.waive
        self._stats: dict[str, Any] = {}
        self._stats_at = 0.0
        self._next_at = 0.0

    def _wake_in(self, seconds: float) -> None:
        """Have the MLX thread look again, though nobody asks it for anything."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._wake)
        self._timer.daemon = True
        self._timer.start()

    def _written(self, job: Job, error: StoreError | None) -> None:
        """On the writer's thread."""
        self._tell(lambda: self.persist.finished(job, error))

    def _look(self, spill: Spill) -> None:
        """Ask what the disk has of `spill` when the jobs before are done."""
        self.writer.call(lambda: self._answer(spill))

    def _answer(self, spill: Spill) -> None:
        """On the writer's thread."""
        found: Found | StoreError
        try:
            found = self.store.find(spill.ids, touch=False)
            self.store.reused(found, spill.reused)
            spill.reused = 0
        except StoreError as error:
            found = error
        except Exception as error:  # logged; what is in RAM must not stay locked for it
            log.exception("the disk tier failed to look up a prefix")
            found = StoreError(f"A prefix could not be looked up: {error!r}.")
        self._tell(lambda: self.persist.seen(spill, found))

    def _rest(self) -> None:
        """On the writer's thread, which has nothing to do."""
        self._tell(self.persist.buffers.rest)

    def _tell(self, answer: Callable[[], None]) -> None:
        self.persist.done.put(answer)
        self._wake()

    @property
    def busy(self) -> bool:
        """Whether something is kept in RAM only until it is on disk."""
        return self.persist.busy

    def ready(self, task: Task) -> bool:
        """Whether the next piece of a task's restore can be read."""
        return task.look is not None and self.restorer.ready(task.look, task.held.lineage.length)

    def pump(self, *, beside: bool) -> None:
        """Hand one more job to the writer; `beside` replies, copies take little of their time."""
        began = time.monotonic()
        if beside and began < self._next_at:
            self.persist.collect()
        elif self.persist.pump():
            self._next_at = began + (time.monotonic() - began) / SHARE

    def progress(self, lease: Lease, ids: Tokens) -> None:
        """After a commit of a request that goes on: write whole blocks, if many are new."""
        if lease.node is not None and lease.lineage.length - lease.saved >= WORTH_WRITING:
            lease.saved = lease.lineage.length // BLOCK * BLOCK
            self.persist.mark(lease.node, ids[: lease.saved])

    def ended(self, lease: Lease, ids: Tokens) -> None:
        """After a request's last commit: write all of it."""
        if lease.node is not None:
            self.persist.mark(lease.node, ids[: lease.node.end], lease.cached)

    def forget(self, ids: Tokens, keep: int, nodes: Sequence[Node]) -> None:
        """Have no file hold anything of `ids` beyond `keep`, nor of what goes on from there.

        `nodes` are the tree's there. What is being written goes once it is.
        """
        self.persist.forget(nodes)
        self.writer.call(lambda: self.store.forget_beyond(ids, keep))

    def stats(self) -> dict[str, Any]:
        """What `GET /v1/cache` says of the disk. From any thread; half a second old at most."""
        if time.monotonic() - self._stats_at > STATS_S:
            self._stats = self._measured()
            self._stats_at = time.monotonic()
        return self._stats

    def _measured(self) -> dict[str, Any]:
        try:
            stats = self.store.stats()
        except StoreError:  # the folder has vanished, or cannot be read: nothing is in it for us
            stats = self.store.nothing()
        return {
            "used_bytes": stats.used_bytes,
            "limit_bytes": stats.limit_bytes,
            "written_bytes": stats.written_bytes,
            "written_tokens": stats.written_tokens,
            "evicted_files": stats.evicted,
            "quarantined": stats.quarantined,
            "kinds": {
                "runs": stats.run_bytes,
                "checkpoints": stats.checkpoint_bytes,
                "index": stats.index_bytes,
            },
            "files": stats.runs + stats.checkpoints,
            "state": "suspended" if self.persist.refused.failing else "ok",
            "restores": {"ok": stats.verified, "corrupt": stats.corrupt},
        }

    def close(self, seconds: float) -> int:
        """Write what is left, for at most so long; how many tokens may not have been written."""
        deadline = time.monotonic() + seconds
        left = self.persist.drain(seconds - min(END_S, seconds / 2))
        self._timer.cancel()
        self.restorer.close()
        self.writer.close(max(0.0, deadline - time.monotonic()))
        self.store.close()
        return left
