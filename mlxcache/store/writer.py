"""Writing behind: one thread that saves what it is offered, in order, within a bound of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcache.errors import StoreError
from mlxcache.store.store import Store
from mlxcache.store.tensors import Tensor
from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A run of tokens [start, len(ids)), or a checkpoint after `ids` where `start` is None.

    `nbytes`: what it counts against the writer's limit. `tag` is the caller's own.
    """

    ids: Tokens
    start: int | None
    tensors: Sequence[Tensor]
    nbytes: int
    tag: Any = None


class Writer:
    """One thread that writes jobs to `store` in the order they were offered."""

    def __init__(
        self, store: Store, limit_bytes: int, done: Callable[[Job, StoreError | None], None]
    ):
        raise NotImplementedError

    @property
    def pending_bytes(self) -> int:
        """Bytes of jobs offered and not done, the one being written included."""
        raise NotImplementedError

    def offer(self, job: Job) -> bool:
        """Take `job`, or answer False at once if it does not fit; an empty queue takes any."""
        raise NotImplementedError

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread after the jobs before it. A StoreError of it is logged."""
        raise NotImplementedError

    def flush(self, seconds: float) -> int:
        """Wait at most `seconds` for all offered so far; returns the bytes not written."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread after the job in hand; what waits is not written."""
        raise NotImplementedError
