"""The requests that are queued or computed, as the event loop knows them, and who may come in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np

from mlxcache.engine.admission import asker_of
from mlxcache.engine.scheduler import Scheduler
from mlxcache.engine.stream import Stream
from mlxcache.engine.task import Task
from mlxcache.errors import DeadlineExceeded, MlxcacheError, QueueFull, TooMany
from mlxcache.prompt.canonical.restore import ReplyRestorer
from mlxcache.types import Event, Finished, Job, Progress, RequestRecord

LEAST_S, MOST_S = 1.0, 600.0
"""What a client is told at least, and at most: by then the guess would be of no use."""

FIRST_REPLY = 200.0
"""Tokens that a reply is taken to have while none has ended."""


@dataclass(frozen=True, slots=True)
class Going:
    """A request that is computed: what it did, and the most tokens that its reply may have."""

    record: RequestRecord
    limit: int | None


class Forecast:
    """Seconds until something that is computed ends. Call from the event loop."""

    def __init__(self) -> None:
        self._reply = FIRST_REPLY

    def ended(self, record: RequestRecord) -> None:
        """Take a finished reply into the average length."""
        if record.status == "done":
            self._reply = 0.8 * self._reply + 0.2 * record.generated_tokens

    def next_place(self, going: Iterable[Going], *, rate: float, round_s: float) -> float:
        """Seconds until the first of those that are computed is over.

        `rate`: prefill tokens per second, `round_s`: seconds per round of decoding.
        """
        prefill, decode = [], []
        for one in going:
            record = one.record
            left = record.prompt_tokens - record.cached_tokens - record.fed_tokens
            prefill.append(max(0, left) / rate if rate > 0 else 0.0)
            likely = self._reply if one.limit is None else min(one.limit, self._reply)
            decode.append(max(1.0, likely - record.generated_tokens) * round_s)
        # both share the thread evenly while there is both
        share = 2.0 if any(prefill) and not all(prefill) else 1.0
        ends = [share * (first + then) for first, then in zip(prefill, decode, strict=True)]
        return min(MOST_S, max(LEAST_S, min(ends, default=LEAST_S)))


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

    def join(self, record: RequestRecord, reply: ReplyRestorer, timeout_s: float | None) -> Stream:
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


SHARE = 2
"""One session may have one in so many of the places in the queue."""


@dataclass(frozen=True, slots=True)
class Live:
    """A request that is not over."""

    task: Task
    shared: Shared


class Arrivals:
    """All requests that are not over, by id. Use from the event loop. `places` may wait."""

    def __init__(self, places: int):
        self.forecast = Forecast()
        self._places = places
        self._live: dict[str, Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, id: str) -> Live:
        return self._live[id]

    def running(self, job: Job) -> Shared | None:
        """What is computed already and answers `job` too."""
        return next((one.shared for one in self._live.values() if one.shared.takes(job)), None)

    def check(self, job: Job, scheduler: Scheduler) -> None:
        """Raise QueueFull where nobody can wait any more, TooMany where `job`'s session cannot.

        Both say when a place will probably be free.
        """
        records = [(one.task.job, one.shared.record) for one in self._live.values()]
        waiting = Counter(asker_of(j) for j, record in records if record.status == "queued")
        total = waiting.total()
        own = waiting[asker_of(job)] if job.session is not None else 0
        if total < self._places and own < max(1, self._places // SHARE):
            return
        going = [Going(record, j.max_tokens) for j, record in records if record.status != "queued"]
        after = self.forecast.next_place(
            going, rate=scheduler.prefill.cost.rate, round_s=scheduler.pace.round_s
        )
        if total >= self._places:
            raise QueueFull(f"{total} requests are waiting already.", retry_after=after)
        turns = len(waiting)  # each of the sessions that wait starts one before the next of this
        raise TooMany(
            f"{own} requests of this session are waiting already.", retry_after=turns * after
        )

    def add(self, job: Job, record: RequestRecord, scheduler: Scheduler, stall_s: float) -> Live:
        """A request that has come in; it is still to be submitted."""
        put = scheduler.inbox.put
        shared = Shared(
            job,
            record,
            lambda: put(lambda: scheduler.cancel(task)),
            lambda error: put(lambda: scheduler.cancel(task, error)),
            stall_s,
        )
        task = Task(job, shared.push, record)
        live = self._live[job.id] = Live(task, shared)
        return live

    def pop(self, task: Task) -> Live | None:
        """It is over."""
        self.forecast.ended(task.record)
        return self._live.pop(task.job.id, None)

    def all(self) -> Iterable[Shared]:
        """Every computation."""
        return [one.shared for one in self._live.values()]

    def figures(self) -> dict[str, int]:
        """How many requests wait, how many may, and how many are computed. In any thread."""
        statuses = Counter(one.shared.record.status for one in list(self._live.values()))
        return {
            "waiting": statuses["queued"],
            "limit": self._places,
            "prefill": statuses["prefill"],
            "decode": statuses["decode"],
        }

    def fail(self, error: MlxcacheError) -> list[RequestRecord]:
        """Nothing is computed any more: end every request with `error`. Their records."""
        records: list[RequestRecord] = []
        for one in self._live.values():
            one.task.fail(error)
            one.shared.fail(error)
            records += [one.task.record, *one.shared.close()]
        self._live.clear()
        return records
