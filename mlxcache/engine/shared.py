"""One computation, and the streams of all who asked for it: a retry joins what is running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from mlxcache.engine.stream import Stream
from mlxcache.errors import DeadlineExceeded, MlxcacheError
from mlxcache.prompt.canonical.restore import Reply
from mlxcache.types import Event, Finished, Job, Progress, RequestRecord

OWN = ("id", "owner", "session", "api", "client", "created_at", "joined", "error", "timing")
"""What a request's record keeps for itself where it joined another."""

FOLLOWED = ("status", "cached_tokens", "restored_tokens", "fed_tokens", "generated_tokens")
"""What a record that joined takes from the other while that runs."""

SAME = (
    "owner", "session", "client", "api", "max_tokens", "stop", "tools", "parallel_tools", "raw",
    "top_logprobs",
)  # fmt: skip
"""What two jobs have in common where one reply answers both, beside the prompt and the sampling."""


class Shared:
    """A request that is computed, and who reads its reply. Use from the event loop, but `push`.

    Each reader gets all of the reply, whenever it joined. `cancel` is called once when the last
    one has left, `expire` instead where that is because its time was over.
    """

    def __init__(
        self,
        job: Job,
        record: RequestRecord,
        cancel: Callable[[], None],
        expire: Callable[[MlxcacheError], None],
        stall_s: float,
    ):
        self.job = job
        self.record = record
        self.left = self.over = False
        self._cancel, self._expire, self._stall_s = cancel, expire, stall_s
        self._loop = asyncio.get_running_loop()
        self._events: list[Event | BaseException] = []
        self._streams: list[Stream] = []
        self._joined: list[RequestRecord] = []

    def push(self, event: Event | BaseException) -> None:
        """Hand an event to all readers, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event | BaseException) -> None:
        self.over = self.over or isinstance(event, Finished | BaseException)
        if self._events and isinstance(event, Progress) and isinstance(self._events[-1], Progress):
            self._events.pop()  # who joins is told how far it is, not how it went
        self._events.append(event)
        for record in self._joined:
            _follow(record, self.record)
        for stream in list(self._streams):
            stream.put(event)

    def takes(self, job: Job) -> bool:
        """Whether `job` asks for the very same and may have this reply.

        Where the reply is drawn at random, only who says that it tries again may: others that ask
        the same want a draw of their own.
        """
        if self.left or self.over:
            return False
        drawn = job.sampling.temperature > 0 and job.sampling.seed is None
        return (job.retry or not drawn) and _same(self.job, job)

    def join(self, record: RequestRecord, reply: Reply, timeout_s: float | None) -> Stream:
        """A stream of the whole reply. After `timeout_s` seconds it ends in DeadlineExceeded."""
        stream = Stream(record, lambda: self._leave(stream), self._stall_s, reply)
        if record is not self.record:
            record.joined = self.record.id
            _follow(record, self.record)
            self._joined.append(record)
        for event in self._events:
            stream.put(event)
        self._streams.append(stream)
        if timeout_s is not None:
            stream.expires(self._loop.call_later(timeout_s, self._overdue, stream, timeout_s))
        return stream

    def _overdue(self, stream: Stream, seconds: float) -> None:
        error = DeadlineExceeded(
            f"The request was not done within {seconds:g} s. What was computed is kept: "
            "the same request goes on from there."
        )
        stream.fail(error)
        self._leave(stream, error)

    def _leave(self, stream: Stream, error: MlxcacheError | None = None) -> None:
        """A reader goes. The last one stays to hear of the end, which its going brings about."""
        if self.left or stream not in self._streams:
            return
        if len(self._streams) == 1:
            self.left = True
            if error is None:
                self._cancel()
            else:
                self._expire(error)
            return
        self._streams.remove(stream)
        record = stream.record
        record.error = str(error) if error else None
        if record in self._joined:
            self._joined.remove(record)
            _fill(record, self.record)
            record.status = "failed" if error else "cancelled"
            record.finish_reason = "error" if error else "cancelled"
        stream.put(_cut_off(self.record))

    def fail(self, error: MlxcacheError) -> None:
        """End all streams with `error`."""
        for stream in self._streams:
            stream.fail(error)

    def close(self) -> list[RequestRecord]:
        """The computation is over: the records of those who joined, which are now whole."""
        for record in self._joined:
            _fill(record, self.record)
            record.error = self.record.error
        return self._joined


def _same(one: Job, other: Job) -> bool:
    """Whether two jobs of one asker have the same reply, for one draw."""
    a, b = one.prompt, other.prompt
    if len(a.ids) != len(b.ids) or one.sampling != other.sampling:
        return False
    if any(getattr(one, name) != getattr(other, name) for name in SAME):
        return False
    same = (a.thinking_open, a.generic_tools) == (b.thinking_open, b.generic_tools)
    return same and np.array_equal(a.ids, b.ids) and np.array_equal(a.fed, b.fed)


def _follow(record: RequestRecord, of: RequestRecord) -> None:
    """Say of a request that joined how far what runs for both is."""
    for name in FOLLOWED:
        setattr(record, name, getattr(of, name))


def _fill(record: RequestRecord, of: RequestRecord) -> None:
    """Say of a request that joined what was done for both."""
    for field in fields(RequestRecord):
        if field.name not in OWN:
            setattr(record, field.name, getattr(of, field.name))
    record.timing = {**of.timing, **record.timing}


def _cut_off(record: RequestRecord) -> Finished:
    return Finished(
        "cancelled",
        record.prompt_tokens,
        record.cached_tokens,
        record.restored_tokens,
        record.generated_tokens,
    )
