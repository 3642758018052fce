"""Live requests on the event loop: readers, joining, queue limits, forecasts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from mlxcache.engine.stream import Stream
from mlxcache.errors import DeadlineExceeded, MlxcacheError, QueueFull, TooMany
from mlxcache.model.guidance.guide import Guide
from mlxcache.prompt.canonical.uuids import ReplyRestorer
from mlxcache.scheduling.admission import asker_of
from mlxcache.scheduling.prefill import DECODE_SHARE
from mlxcache.scheduling.scheduler import Scheduler
from mlxcache.scheduling.task import Task
from mlxcache.types import Event, Finished, Job, Piece, Progress, RequestRecord

MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0
"""Bounds of Retry-After in seconds; a longer forecast would be a guess."""

FIRST_REPLY = 200.0
"""Assumed tokens of an average reply before one has ended."""

QUEUE_SHARE = 2
"""Divisor: one session may have 1/QUEUE_SHARE of the places in the queue."""

OWN_FIELDS = ("id", "owner", "session", "api", "client", "created_at", "joined", "error", "timing")
"""Fields of a record that a request keeps when it joins the computation of another."""

FOLLOWED_FIELDS = (
    "status", "cached_tokens", "restored_tokens", "fed_tokens", "generated_tokens",
)  # fmt: skip
"""Fields that the record of a joined request copies during the computation."""

SAME_FIELDS = (
    "owner", "session", "client", "api", "max_tokens", "stop", "tools", "tool_choice",
    "parallel_tools", "raw", "top_logprobs", "format", "thinking_budget",
)  # fmt: skip
"""Fields, besides prompt and sampling, that are equal in two jobs if one reply answers both.

For a retry of a sampled reply `choice` is equal too, because each choice of a request is another
sample.
"""

SAME_STATE = ("thinking_open", "continued", "generic_tools")
"""Fields of two prompts that must be equal for one reply to answer both."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request in progress, as input of a forecast.

    `record`: its figures so far. `limit`: the most tokens of its reply, or None.
    """

    record: RequestRecord
    limit: int | None


class Forecast:
    """Estimates when a running request will end. Use on the event loop."""

    def __init__(self) -> None:
        self._reply = FIRST_REPLY

    def note_end(self, record: RequestRecord) -> None:
        """Include the reply of a completed request in the average reply length."""
        if record.status == "done":
            self._reply = 0.8 * self._reply + 0.2 * record.generated_tokens

    def next_place(self, running: Iterable[Running], *, rate: float, round_s: float) -> float:
        """Return the estimated seconds until the first of the `running` requests ends.

        The result lies between `MIN_RETRY_S`, also if none runs, and `MAX_RETRY_S`. `rate`: prefill
        speed in tokens per second. `round_s`: seconds of a decoding step for all replies.
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
    """The reply that one computation gives, and the streams of all its readers.

    Each reader gets the whole reply, whenever it joins. `cancel()` is called once, when the last
    reader has left. If that reader's time limit had passed, `expire(error)` is called instead.
    `stall_s`: a reader that takes none of its waiting events for so many seconds is treated as one
    that has left. Use on the event loop.
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
        """Pass an event, or the error that ends the reply, to all readers."""
        self.over = self.over or isinstance(event, Finished | BaseException)
        if self._events and isinstance(event, Progress) and isinstance(self._events[-1], Progress):
            self._events.pop()  # a reader that joins later needs the latest progress alone
        self._events.append(event)
        for record in self._joined:
            _copy_progress(record, self.record)
        for stream in list(self._streams):
            stream.put(event)

    def accepts(self, job: Job) -> bool:
        """Return whether `job` asks for the same reply and may share this one.

        If the reply is sampled without a seed, only a request that its client marked as a retry may
        share it, because any other client expects a sample of its own. A sampled reply is shared
        only between equal values of `Job.choice`, the index of a reply among those of one request.
        Once the reply is over or all readers have left, no job may share it.
        """
        if self.left or self.over:
            return False
        greedy = job.sampling.temperature == 0
        if not greedy and job.choice != self.job.choice:
            return False
        drawn = not greedy and job.sampling.seed is None
        return (job.retry or not drawn) and _same_reply(self.job, job)

    def join(self, record: RequestRecord, reply: ReplyRestorer, timeout_s: float | None) -> Stream:
        """Add a reader; return a stream of the whole reply.

        `record`: the record of the reader's request. `reply`: replaces names in the reply, such as
        stable UUIDs, by those of the reader's client. After `timeout_s` seconds, unless None, the
        stream ends in DeadlineExceeded.
        """
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
        """Remove the reader of `stream`, which has left or whose time limit has passed.

        `error`: the error of the time limit, for the record of the reader's request; None if the
        reader has left. If it is the only reader, `cancel()` or `expire(error)` ends the
        computation, and the reader stays until then. Does nothing if it was removed before.
        """
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
        """End the streams of all readers with `error`."""
        for stream in self._streams:
            stream.fail(error)

    def close(self) -> list[RequestRecord]:
        """Complete and return the records of requests that joined; call after the last event."""
        for record in self._joined:
            _copy_result(record, self.record)
            record.error = self.record.error
        return self._joined


class LiveRequest:
    """A request in progress: its task, its readers, and the pieces of its reply.

    `on_event(request, event)` is called on the event loop with each event of the task. `pieces` are
    collected only if `keep_pieces`. `replying`: a piece of the reply has arrived.
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
        """Schedule the processing of an event on the event loop. Any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, event)

    def _receive(self, event: Event | BaseException) -> None:
        self._on_event(self, event)

    def take(self, piece: Piece) -> bool:
        """Record that a piece of the reply has arrived; return True if it is the first."""
        first = not self.replying
        self.replying = True
        if self._keep_pieces:
            self.pieces.append(piece)
        return first


class RequestTable:
    """All requests in progress, by id. Use on the event loop.

    `places`: the most requests that may wait. `on_event`: see `LiveRequest`. `note_running` is
    called with the number of requests in progress whenever it changes.
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
        """Return a computation in progress whose reply `job` can share, or None."""
        return next((one.shared for one in self._live.values() if one.shared.accepts(job)), None)

    def check_places(self, job: Job, *, rate: float, round_s: float) -> None:
        """Raise QueueFull if the queue is full, or TooMany if `job`'s session has its share of it.

        One session may have 1/`QUEUE_SHARE` of the places. All choices of one request take one
        place, that of the first. Both errors carry an estimate of the seconds until a retry can
        succeed. `rate`: prefill speed in tokens per second. `round_s`: seconds of a decoding step
        for all replies.
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
            raise QueueFull(
                f"{total} requests are waiting already, the most that --queue allows: try again "
                "later.",
                retry_after=after,
            )
        turns = len(waiting)  # each waiting session starts one before the next of this one
        raise TooMany(
            f"{own} requests of this session are waiting already, its share of the queue: try "
            "again later.",
            retry_after=turns * after,
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
        """Add a new request and return it; the caller submits its task."""
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
        """Remove a request that is over; return False if it was removed before."""
        if self._live.pop(live.task.job.id, None) is None:
            return False
        self._note_running(len(self._live))
        self.forecast.note_end(live.task.record)
        return True

    def replies(self) -> Iterable[SharedReply]:
        """Return the replies in progress, each with the streams of its readers."""
        return [one.shared for one in self._live.values()]

    def figures(self) -> dict[str, int]:
        """Return the object `queue` of `GET /v1/cache`.

        `waiting`, `prefill` and `decode`: number of requests in that state. `limit`: the most that
        may wait. Any thread.
        """
        statuses = Counter(one.shared.record.status for one in list(self._live.values()))
        return {
            "waiting": statuses["queued"],
            "limit": self._places,
            "prefill": statuses["prefill"],
            "decode": statuses["decode"],
        }

    def fail_all(self, error: MlxcacheError) -> list[RequestRecord]:
        """End every request with `error` after the MLX thread has ended; return their records."""
        records: list[RequestRecord] = []
        for one in self._live.values():
            one.task.fail(error)
            one.shared.fail(error)
            records += [one.task.record, *one.shared.close()]
        self._live.clear()
        self._note_running(0)
        return records


def prefill_left_s(
    record: RequestRecord,
    running: Sequence[RequestRecord],
    seconds: Callable[[int, int], float],
) -> float:
    """Estimate the seconds until the prompt of `record` is computed, beside the `running` requests.

    `seconds(start, stop)` estimates the time for feeding the tokens in between. The estimate
    includes prompts with fewer remaining tokens, which are computed first, and the time for
    decoding meanwhile if any of `running` decodes.
    """
    mine = (record.id, record.joined)
    others = [one for one in running if one.status == "prefill" and one.id not in mine]
    left = record.prompt_tokens - _computed(record)
    before = [one for one in others if one.prompt_tokens - _computed(one) < left]
    total = sum(seconds(_computed(one), one.prompt_tokens) for one in (record, *before))
    replying = any(one.status == "decode" for one in running)
    return total * (1 + DECODE_SHARE) if replying else total


def _computed(record: RequestRecord) -> int:
    return record.cached_tokens + record.fed_tokens


def _same_reply(one: Job, other: Job) -> bool:
    a, b = one.prompt, other.prompt
    if len(a.ids) != len(b.ids) or one.sampling != other.sampling:
        return False
    if any(getattr(one, name) != getattr(other, name) for name in SAME_FIELDS):
        return False
    same = all(getattr(a, name) == getattr(b, name) for name in SAME_STATE)
    return same and np.array_equal(a.ids, b.ids) and np.array_equal(a.fed, b.fed)


def _copy_progress(record: RequestRecord, of: RequestRecord) -> None:
    for name in FOLLOWED_FIELDS:
        setattr(record, name, getattr(of, name))


def _copy_result(record: RequestRecord, of: RequestRecord) -> None:
    """Copy the results of `of` to the record of a request that joined it.

    Fields that each request has for itself, such as its id and owner, are kept.
    """
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
