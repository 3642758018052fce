"""Live requests on the event loop: readers, joining, queue limits, forecasts."""

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
from mlxcache.model.guidance.guide import Guide
from mlxcache.prompt.canonical.restore import ReplyRestorer
from mlxcache.types import Event, Finished, Job, Piece, Progress, RequestRecord

MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0
"""Bounds of Retry-After: a longer forecast would be a guess."""

FIRST_REPLY = 200.0
"""Tokens of an average reply before one has ended."""

QUEUE_SHARE = 2
"""Divisor: one session may have 1/QUEUE_SHARE of the places in the queue."""

OWN_FIELDS = ("id", "owner", "session", "api", "client", "created_at", "joined", "error", "timing")
"""Fields of a record that a request keeps for itself when it joins another."""

FOLLOWED_FIELDS = (
    "status", "cached_tokens", "restored_tokens", "fed_tokens", "generated_tokens",
)  # fmt: skip
"""Fields that the record of a joined request copies while the computation runs."""

SAME_FIELDS = (
    "owner", "session", "client", "api", "max_tokens", "stop", "tools", "tool_choice",
    "parallel_tools", "raw", "top_logprobs", "format", "thinking_budget",
)  # fmt: skip
"""Fields in which two jobs agree where one reply answers both, beside prompt and sampling.

A retry of a sampled reply also agrees in `choice`: each choice of a request is another sample."""

SAME_STATE = ("thinking_open", "continued", "generic_tools")
"""Fields of their prompts in which they agree: the state that the parser of the reply begins in."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request in progress, for a forecast: its record, and the most tokens of its reply."""

    record: RequestRecord
    limit: int | None


class Forecast:
    """Estimates when a running request will end. Use on the event loop."""

    def __init__(self) -> None:
        self._reply = FIRST_REPLY

    def note_end(self, record: RequestRecord) -> None:
        """Add a finished reply to the average length."""
        if record.status == "done":
            self._reply = 0.8 * self._reply + 0.2 * record.generated_tokens

    def next_place(self, running: Iterable[Running], *, rate: float, round_s: float) -> float:
        """Seconds until the first of `running` ends, within `MIN_RETRY_S` and `MAX_RETRY_S`.

        `rate`: prefill tokens per second, `round_s`: seconds per round of decoding.
        """
        prefill, decode = [], []
        for one in running:
            record = one.record
            left = record.prompt_tokens - record.cached_tokens - record.fed_tokens
            prefill.append(max(0, left) / rate if rate > 0 else 0.0)
            likely = self._reply if one.limit is None else min(one.limit, self._reply)
            decode.append(max(1.0, likely - record.generated_tokens) * round_s)
        # both share the thread evenly while there is both
        share = 2.0 if any(prefill) and not all(prefill) else 1.0
        ends = [share * (first + then) for first, then in zip(prefill, decode, strict=True)]
        return min(MAX_RETRY_S, max(MIN_RETRY_S, min(ends, default=MIN_RETRY_S)))


class SharedReply:
    """One computation and the streams of all its readers. Use on the event loop.

    Each reader gets the whole reply, whenever it joined. `cancel` is called once, when the last
    reader has left; if its time limit had passed, `expire` is called instead, with the error.
    `stall_s`: seconds without reading after which a reader is cancelled.
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

    def put(self, event: Event | BaseException) -> None:
        """Hand an event to all readers."""
        self.over = self.over or isinstance(event, Finished | BaseException)
        if self._events and isinstance(event, Progress) and isinstance(self._events[-1], Progress):
            self._events.pop()  # a reader that joins later needs the latest progress alone
        self._events.append(event)
        for record in self._joined:
            _copy_progress(record, self.record)
        for stream in list(self._streams):
            stream.put(event)

    def accepts(self, job: Job) -> bool:
        """True if `job` asks for the same reply and may share this one.

        If the reply is sampled without a seed, only a request marked as a retry may: any other
        client expects a sample of its own. So does each choice of one request.
        """
        if self.left or self.over:
            return False
        greedy = job.sampling.temperature == 0
        if not greedy and job.choice != self.job.choice:
            return False
        drawn = not greedy and job.sampling.seed is None
        return (job.retry or not drawn) and _same_reply(self.job, job)

    def join(self, record: RequestRecord, reply: ReplyRestorer, timeout_s: float | None) -> Stream:
        """A stream of the whole reply. After `timeout_s` seconds it ends in DeadlineExceeded."""
        stream = Stream(record, lambda: self._leave(stream), self._stall_s, reply)
        if record is not self.record:
            record.joined = self.record.id
            _copy_progress(record, self.record)
            self._joined.append(record)
        for event in self._events:
            stream.put(event)
        self._streams.append(stream)
        if timeout_s is not None:
            stream.expires(self._loop.call_later(timeout_s, self._expired, stream, timeout_s))
        return stream

    def _expired(self, stream: Stream, seconds: float) -> None:
        error = DeadlineExceeded(
            f"The request was not done within {seconds:g} s. What was computed is kept: "
            "the same request goes on from there."
        )
        stream.fail(error)
        self._leave(stream, error)

    def _leave(self, stream: Stream, error: MlxcacheError | None = None) -> None:
        """Remove a reader. The last one cancels the computation and stays until that has ended."""
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
            _copy_result(record, self.record)
            record.status = "failed" if error else "cancelled"
            record.finish_reason = "error" if error else "cancelled"
        stream.put(_cancelled(self.record))

    def fail(self, error: MlxcacheError) -> None:
        """End all streams with `error`."""
        for stream in self._streams:
            stream.fail(error)

    def close(self) -> list[RequestRecord]:
        """Complete and return the records of the requests that joined, once the computation is
        over.
        """
        for record in self._joined:
            _copy_result(record, self.record)
            record.error = self.record.error
        return self._joined


class LiveRequest:
    """A request that is not over: its task, its readers, and the pieces of its reply.

    `on_event(request, event)` is called on the event loop with each event of the task. `pieces` are
    collected only if `keep_pieces`. `replying`: a piece of the reply has come.
    """

    def __init__(
        self,
        job: Job,
        record: RequestRecord,
        shared: SharedReply,
        on_event: Callable[[LiveRequest, Event | BaseException], None],
        *,
        keep_pieces: bool,
        guide: Guide | None = None,
    ):
        self.shared = shared
        self.pieces: list[Piece] = []
        self.replying = False
        self._keep_pieces = keep_pieces
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self.task = Task(job, self._push, record, guide)

    def _push(self, event: Event | BaseException) -> None:
        """Pass an event of the task to the event loop. On any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, event)

    def _receive(self, event: Event | BaseException) -> None:
        self._on_event(self, event)

    def take(self, piece: Piece) -> bool:
        """Note a piece of the reply; True for the first one."""
        first = not self.replying
        self.replying = True
        if self._keep_pieces:
            self.pieces.append(piece)
        return first


class RequestTable:
    """All requests that are not over, by id. Use on the event loop.

    `places`: how many may wait. `note_running` is called with the number of requests, when it
    changes.
    """

    def __init__(
        self,
        places: int,
        on_event: Callable[[LiveRequest, Event | BaseException], None],
        note_running: Callable[[int], None],
    ):
        self.forecast = Forecast()
        self._places = places
        self._on_event = on_event
        self._note_running = note_running
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, id: str) -> LiveRequest:
        return self._live[id]

    def running(self, job: Job) -> SharedReply | None:
        """A computation in progress that answers `job` too."""
        return next((one.shared for one in self._live.values() if one.shared.accepts(job)), None)

    def check_places(self, job: Job, *, rate: float, round_s: float) -> None:
        """Raise QueueFull if the queue is full, TooMany if `job`'s session has its share of it.

        All choices of one request take one place, that of the first. Both errors carry a forecast
        of when to retry: see `Forecast.next_place` for `rate` and `round_s`.
        """
        if job.choice:
            return
        live = [one for one in self._live.values() if not one.task.job.choice]
        records = [(one.task.job, one.shared.record) for one in live]
        waiting = Counter(asker_of(j) for j, record in records if record.status == "queued")
        total = waiting.total()
        own = waiting[asker_of(job)] if job.session is not None else 0
        if total < self._places and own < max(1, self._places // QUEUE_SHARE):
            return
        going = [Running(r, j.max_tokens) for j, r in records if r.status != "queued"]
        after = self.forecast.next_place(going, rate=rate, round_s=round_s)
        if total >= self._places:
            raise QueueFull(f"{total} requests are waiting already.", retry_after=after)
        turns = len(waiting)  # each waiting session starts one before the next of this one
        raise TooMany(
            f"{own} requests of this session are waiting already.", retry_after=turns * after
        )

    def add(
        self,
        job: Job,
        record: RequestRecord,
        scheduler: Scheduler,
        stall_s: float,
        *,
        keep_pieces: bool = False,
        guide: Guide | None = None,
    ) -> LiveRequest:
        """Enter a request that came in; the caller submits its task. Its reply follows `guide`."""
        post = scheduler.thread.post
        shared = SharedReply(
            job,
            record,
            lambda: post(lambda: scheduler.cancel(live.task)),
            lambda error: post(lambda: scheduler.cancel(live.task, error)),
            stall_s,
        )
        live = LiveRequest(
            job, record, shared, self._on_event, keep_pieces=keep_pieces, guide=guide
        )
        self._live[job.id] = live
        self._note_running(len(self._live))
        return live

    def remove(self, live: LiveRequest) -> bool:
        """Remove a request that is over; False if it was removed before."""
        if self._live.pop(live.task.job.id, None) is None:
            return False
        self._note_running(len(self._live))
        self.forecast.note_end(live.task.record)
        return True

    def replies(self) -> Iterable[SharedReply]:
        """Every computation."""
        return [one.shared for one in self._live.values()]

    def figures(self) -> dict[str, int]:
        """The `queue` part of `GET /v1/cache`: requests by state, and the limit. Any thread."""
        statuses = Counter(one.shared.record.status for one in list(self._live.values()))
        return {
            "waiting": statuses["queued"],
            "limit": self._places,
            "prefill": statuses["prefill"],
            "decode": statuses["decode"],
        }

    def fail_all(self, error: MlxcacheError) -> list[RequestRecord]:
        """End every request with `error`, as the MLX thread will not; returns their records."""
        records: list[RequestRecord] = []
        for one in self._live.values():
            one.task.fail(error)
            one.shared.fail(error)
            records += [one.task.record, *one.shared.close()]
        self._live.clear()
        self._note_running(0)
        return records


def _same_reply(one: Job, other: Job) -> bool:
    """True if two jobs of one asker have the same reply, for one draw."""
    a, b = one.prompt, other.prompt
    if len(a.ids) != len(b.ids) or one.sampling != other.sampling:
        return False
    if any(getattr(one, name) != getattr(other, name) for name in SAME_FIELDS):
        return False
    same = all(getattr(a, name) == getattr(b, name) for name in SAME_STATE)
    return same and np.array_equal(a.ids, b.ids) and np.array_equal(a.fed, b.fed)


def _copy_progress(record: RequestRecord, of: RequestRecord) -> None:
    """Copy to a joined request's record how far the computation is."""
    for name in FOLLOWED_FIELDS:
        setattr(record, name, getattr(of, name))


def _copy_result(record: RequestRecord, of: RequestRecord) -> None:
    """Copy to a joined request's record what was computed for both."""
    for field in fields(RequestRecord):
        if field.name not in OWN_FIELDS:
            setattr(record, field.name, getattr(of, field.name))
    record.timing = {**of.timing, **record.timing}


def _cancelled(record: RequestRecord) -> Finished:
    return Finished(
        "cancelled",
        record.prompt_tokens,
        record.cached_tokens,
        record.restored_tokens,
        record.generated_tokens,
    )
