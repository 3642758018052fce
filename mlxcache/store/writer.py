"""Writer thread that saves KV to disk in the order in which it was offered."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.errors import StoreError
from mlxcache.safetensors import Tensor
from mlxcache.store.store import Store
from mlxcache.types import Tokens

log = logging.getLogger(__name__)

IDLE_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """KV to save: a run, or a checkpoint if `start` is None.

    A run holds tokens [start, len(ids)); a checkpoint is the state after `ids`. `nbytes`: bytes
    that count against the writer's limit. `tag`: any value of the caller.
    """

    ids: Tokens
    start: int | None
    tensors: Sequence[Tensor]
    nbytes: int
    tag: Any = None

    @property
    def tokens(self) -> int:
        return 0 if self.start is None else len(self.ids) - self.start


class Writer:
    """A thread that writes jobs to `store` in the order in which they were offered.

    `limit_bytes`: most bytes of jobs that wait or are being written. `done(job, error)` is called
    on that thread after each job; if `error` is None, the job is durable. An error ends the job,
    not the thread. If nothing was offered for `IDLE_S` seconds, the thread writes the uses of files
    and calls `idle`, each once until more is offered. `label`: that of the model, for the log.
    Thread-safe.
    """

    def __init__(
        self,
        store: Store,
        limit_bytes: int,
        done: Callable[[Job, StoreError | None], None],
        idle: Callable[[], None] = lambda: None,
        *,
        label: str = "unnamed",
    ):
        self._label = label
        self._store = store
        self._limit = limit_bytes
        self._done = done
        self._idle = idle
        self._queue: deque[Job | Callable[[], None]] = deque()
        self._state = threading.Condition()
        self._pending = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mlxcache-writer", daemon=True)
        self._thread.start()

    def offer(self, job: Job) -> bool:
        """Queue `job` and return True, or return False if it is not accepted. Does not block.

        A job is not accepted after `close`, nor if it would exceed the byte limit together with the
        jobs that wait or are being written. If there are no such jobs, any size is accepted.
        """
        with self._state:
            full = self._pending and self._pending + job.nbytes > self._limit
            if full or self._closing:
                return False
            self._pending += job.nbytes
            self._add(job)
            return True

    def call(self, action: Callable[[], None], what: str = "a queued action") -> None:
        """Run `action` on the writer's thread after the jobs offered before; log any exception."""
        with self._state:
            if not self._closing:
                self._add(lambda: self._run_logged(what, action))

    def close(self, seconds: float | None = None) -> None:
        """End the thread after the current job; drop queued jobs without calling `done`.

        Blocks until that job has ended, but at most `seconds` if given, because the disk may hang
        or the index be locked. Does not block on the writer's own thread.
        """
        with self._state:
            self._closing = True
            self._state.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _add(self, item: Job | Callable[[], None]) -> None:
        self._queue.append(item)
        self._state.notify_all()

    def _run(self) -> None:
        while True:
            item = self._next()
            if item is None:
                return
            if isinstance(item, Job):
                self._write(item)
            else:
                item()
            nbytes = item.nbytes if isinstance(item, Job) else 0
            del item  # its buffers are freed before the count says so
            with self._state:
                self._pending -= nbytes

    def _next(self) -> Job | Callable[[], None] | None:
        idle = False
        while True:
            with self._state:
                self._state.wait_for(lambda: self._queue or self._closing, None if idle else IDLE_S)
                if self._closing:
                    return None
                if self._queue:
                    return self._queue.popleft()
            self._run_logged("writing the uses of files to the index", self._store.note_uses)
            self._run_logged("work while idle", self._idle)
            idle = True

    def _write(self, job: Job) -> None:
        error: StoreError | None = None
        try:
            if job.start is None:
                self._store.write_checkpoint(job.ids, job.tensors)
            else:
                self._store.write_run(job.ids, job.start, job.tensors)
        except StoreError as raised:
            error = raised
        except Exception as raised:
            log.exception(
                "model %s: writing KV up to token %d to disk failed", self._label, len(job.ids)
            )
            error = StoreError(f"Writing KV to disk failed: {raised!r}.")
        self._run_logged("reporting the result of a write", lambda: self._done(job, error))

    def _run_logged(self, what: str, action: Callable[[], None]) -> None:
        """Run `action` and log its exceptions, so that they do not end the thread."""
        try:
            action()
        except StoreError as error:
            log.warning("model %s: disk writer: %s failed: %s", self._label, what, error)
        except Exception:
            log.exception("model %s: disk writer: %s failed", self._label, what)
