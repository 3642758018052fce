"""Live requests on the event loop: streams of their readers, joining, queue limits, forecasts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial

import numpy as np

from mlxcache.engine.figures import Queue
from mlxcache.errors import DeadlineExceeded, MlxcacheError, QueueFull, TooMany
from mlxcache.model.guidance.guide import Guide
from mlxcache.prompt.canonical.uuids import ReplyRestorer
from mlxcache.scheduling.admission import asker_of
from mlxcache.scheduling.prefill import DECODE_SHARE
from mlxcache.scheduling.scheduler import Scheduler
from mlxcache.scheduling.task import ScoredTask, Task
from mlxcache.types import (
    Admitted,
    Event,
    Finished,
    Job,
    Piece,
    Progress,
    RequestRecord,
    Text,
    Thinking,
)

MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0
"""Bounds of Retry-After in seconds; a longer forecast would be a guess."""

FIRST_REPLY = 200.0
"""Assumed tokens of an average reply before one has ended."""

QUEUE_SHARE = 2
"""Divisor: one session may have 1/QUEUE_SHARE of the places in the queue."""

BACKLOG = 256
"""Unread events above which further text is merged with the last event."""

GRACE_S = 1.0

OWN_FIELDS = ("id", "owner", "session", "api", "client", "created_at", "joined", "error", "timing")
"""Fields of a record that a request keeps when it joins the computation of another."""

FOLLOWED_FIELDS = (
    "status", "cached_tokens", "restored_tokens", "fed_tokens", "generated_tokens",
)  # fmt: skip
"""Fields that the record of a joined request copies during the computation."""

SAME_FIELDS = (
    "owner", "session", "client", "api", "max_tokens", "stop", "shows_stop", "tools", "tool_choice",
    "parallel_tools", "raw", "top_logprobs", "prompt_logprobs", "format",
    "thinking_budget",
)  # fmt: skip
"""Fields, besides prompt and sampling, that are equal in two jobs if one reply answers both.

For a retry of a sampled reply `choice` is equal too, because each choice of a request is another
sample.
"""

SAME_STATE = ("thinking_open", "continued", "generic_tools")
"""Fields of two prompts that must be equal for one reply to answer both."""

OnEvent = Callable[["LiveRequest", Event | BaseException], None]
"""Gets each event of a request on the event loop, or the error that ended it."""


# -- one reader ------------------------------------------------------------------------------------


class Stream:
    """Events of a reply in progress, for one reader: Admitted, Progress and pieces, then Finished.

    From `BACKLOG` unread events on, consecutive texts are merged and Progress is dropped.
    `cancel()` is called if the reader leaves, or takes none of the waiting events for `stall_s`
    seconds. `reply` replaces names that the model was shown instead of the client's. Use on the
    event loop.
    """

    def __init__(
        self,
        record: RequestRecord,
        cancel: Callable[[], None],
        stall_s: float,
        reply: ReplyRestorer | None = None,
    ):
        self.record = record
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._reply = reply or ReplyRestorer({})
        self._stall_s = stall_s
        self._queue: deque[Event | BaseException] = deque()
        self._wake = asyncio.Event()
        self._admitted = asyncio.Event()
        self._admission: Admitted | None = None
        self._read_at = time.monotonic()
        self._taken = 0
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def put(self, event: Event | BaseException) -> None:
        if self._over:
            return
        if isinstance(event, Admitted):
            self._admission = event
            self._admitted.set()
        if isinstance(event, Finished | BaseException):
            self._over = True
            self._admitted.set()
            if self._timer is not None:
                self._timer.cancel()
        if not self._queue:
            self._read_at = time.monotonic()
        if len(self._queue) < BACKLOG or not self._merged(event):
            self._queue.append(event)
        self._wake.set()
        if not self._over and time.monotonic() - self._read_at > self._stall_s:
            self._loop.call_later(min(GRACE_S, self._stall_s), self._give_up, self._taken)

    def _give_up(self, taken: int) -> None:
        """Cancel unless an event was read since this call was scheduled."""
        if not self._over and self._taken == taken:
            self._cancel()

    def _merged(self, event: Event | BaseException) -> bool:
        last = self._queue[-1]
        if isinstance(event, Progress):
            return True
        if isinstance(event, Thinking) and isinstance(last, Thinking):
            self._queue[-1] = Thinking(last.text + event.text)
            return True
        if isinstance(event, Text) and isinstance(last, Text):
            self._queue[-1] = Text(last.text + event.text, last.logprobs + event.logprobs)
            return True
        return False

    async def admitted(self, seconds: float) -> Admitted | None:
        """Wait until memory is reserved for the request and its cached tokens are known.

        Returns None if `seconds` pass before, or if it was cancelled before. Raises its error if it
        failed before.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._admitted.wait()
        except TimeoutError:
            return None
        if self._admission is None:
            for event in self._queue:
                if isinstance(event, BaseException):
                    raise event
        return self._admission

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events up to Finished. Raises MlxcacheError if the request failed."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            event = self._queue.popleft()
            self._taken += 1
            self._read_at = time.monotonic()
            if isinstance(event, BaseException):
                for rest in self._reply.flush():
                    yield rest
                raise event
            for shown in self._reply.events(event):
                yield shown
            if isinstance(event, Finished):
                return
            if self._queue:  # let the loop notice that the client of a long backlog has left
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Cancel the request unless it is over. What it has computed stays in the cache."""
        if not self._over:
            self._cancel()

    def expires(self, timer: asyncio.TimerHandle) -> None:
        """Take over the timer of the request's time limit: cancel it when the reply ends."""
        self._timer = timer
        if self._over:
            timer.cancel()

    @property
    def over(self) -> bool:
        return self._over

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# -- one request -----------------------------------------------------------------------------------


class LiveRequest:
    """A request in progress, on the event loop: its readers; `task` is its part on the MLX thread.

    Each reader gets the whole reply, whenever it joins. When the last one leaves, or its time limit
    passes, the task ends. `on_left` gets the record of a joined reader that leaves before. `pieces`
    of the reply are collected only if `keep_pieces`. `stall_s`: see `Stream`.
    """

    def __init__(
        self,
        job: Job,
        record: RequestRecord,
        guide: Guide | None,
        scheduler: Scheduler,
        *,
        on_event: OnEvent,
        on_left: Callable[[RequestRecord], None],
        stall_s: float,
        keep_pieces: bool,
    ):
        self.job, self.record = job, record
        kind = ScoredTask if job.prompt_logprobs else Task
        self.task = kind(job, self._push, record, guide)
        self.pieces: list[Piece] = []
        self._scheduler = scheduler
        self._on_event, self._on_left, self._stall_s = on_event, on_left, stall_s
        self._keep_pieces = keep_pieces
        self._left = self._over = self._replying = False
        self._loop = asyncio.get_running_loop()
        self._events: list[Event | BaseException] = []
        self._streams: list[Stream] = []
        self._joined: list[RequestRecord] = []
        self._note_first_end: Callable[[], None] = lambda: None

    def submit(self) -> None:
        """Pass the task to the scheduler; if that fails, its error ends the request."""
        scheduler, task = self._scheduler, self.task
        scheduler.thread.post(
            lambda: scheduler.submit(task),
            lambda error: task.push(scheduler.wall.failure(error, self.job.id)),
        )

    def _push(self, event: Event | BaseException) -> None:
        """Schedule the processing of an event on the event loop. Any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_event, self, event)

    def put(self, event: Event | BaseException) -> None:
        self._over = self._over or isinstance(event, Finished | BaseException)
        if self._events and isinstance(event, Progress) and isinstance(self._events[-1], Progress):
            self._events.pop()  # a reader that joins later needs the latest progress alone
        self._events.append(event)
        if not self._over:  # else `close` has completed the records
            for record in self._joined:
                _copy_progress(record, self.record)
        for stream in list(self._streams):
            stream.put(event)

    def take(self, piece: Piece) -> bool:
        """Record that a piece of the reply has arrived; return True if it is the first."""
        first = not self._replying
        self._replying = True
        if self._keep_pieces:
            self.pieces.append(piece)
        return first

    def accepts(self, job: Job) -> bool:
        """Return whether `job` asks for the same reply and may share this one.

        If the reply is sampled without a seed, only a request that its client marked as a retry may
        share it, because any other client expects a sample of its own. A sampled reply is shared
        only between equal values of `Job.choice`.
        """
        if self._left or self._over:
            return False
        greedy = job.sampling.temperature == 0
        if not greedy and job.choice != self.job.choice:
            return False
        drawn = not greedy and job.sampling.seed is None
        return (job.retry or not drawn) and _same_reply(self.job, job)

    def join(self, record: RequestRecord, reply: ReplyRestorer, timeout_s: float | None) -> Stream:
        """Add a reader, whose request has `record`; return a stream of the whole reply.

        After `timeout_s` seconds, unless None, the stream ends in DeadlineExceeded.
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
            stream.expires(self._loop.call_later(timeout_s, self._expire, stream, timeout_s))
        return stream

    def _expire(self, stream: Stream, seconds: float) -> None:
        error = DeadlineExceeded(
            f"The request was not done within {seconds:g} s. What was computed is kept: "
            "the same request goes on from there."
        )
        stream.put(error)
        self._leave(stream, error)

    def _leave(self, stream: Stream, error: MlxcacheError | None = None) -> None:
        """Remove a reader that has left or, with `error`, whose time limit has passed.

        The only reader stays until the task that it ends has ended.
        """
        if self._left or stream not in self._streams:
            return
        if len(self._streams) == 1:
            self._left = True
            scheduler = self._scheduler
            scheduler.thread.post(lambda: scheduler.cancel(self.task, error))
            return
        self._streams.remove(stream)
        record = stream.record
        if record is self.record:  # it is the computation's too, which goes on
            self._note_first_end = partial(_note_early_end, record, error)
        else:
            self._joined.remove(record)
            _copy_result(record, self.record)
            _note_early_end(record, error)
            self._on_left(record)
        stream.put(_cancelled(self.record))

    def fail(self, error: MlxcacheError) -> None:
        """End the streams of all readers with `error`."""
        for stream in self._streams:
            stream.put(error)

    def close(self) -> list[RequestRecord]:
        """Complete and return the records of the readers, that of the first one first."""
        for record in self._joined:
            _copy_result(record, self.record)
            record.error = self.record.error
        self._note_first_end()
        return [self.record, *self._joined]


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
    for field in fields(RequestRecord):
        if field.name not in OWN_FIELDS:
            setattr(record, field.name, getattr(of, field.name))
    record.timing = {**of.timing, **record.timing}


def _note_early_end(record: RequestRecord, error: MlxcacheError | None) -> None:
    record.status = "failed" if error else "cancelled"
    record.finish_reason = "error" if error else "cancelled"
    record.error = str(error) if error else None


def _cancelled(record: RequestRecord) -> Finished:
    return Finished(
        "cancelled",
        record.prompt_tokens,
        record.cached_tokens,
        record.restored_tokens,
        record.generated_tokens,
    )


# -- all requests ----------------------------------------------------------------------------------


class Forecast:
    def __init__(self) -> None:
        self._reply = FIRST_REPLY

    def note_end(self, record: RequestRecord) -> None:
        if record.status == "done":
            self._reply = 0.8 * self._reply + 0.2 * record.generated_tokens

    def next_place(
        self, running: Iterable[tuple[RequestRecord, int | None]], *, rate: float, round_s: float
    ) -> float:
        """Return the estimated seconds until the first of the `running` requests ends.

        Each is a record and the most tokens of its reply. The result lies between `MIN_RETRY_S`,
        also if none runs, and `MAX_RETRY_S`. `rate`: prefill speed in tokens per second. `round_s`:
        seconds of a decoding step for all replies.
        """
        prefill, decode = [], []
        for record, limit in running:
            left = record.prompt_tokens - _computed(record)
            prefill.append(max(0, left) / rate if rate > 0 else 0.0)
            likely = self._reply if limit is None else min(limit, self._reply)
            decode.append(max(1.0, likely - record.generated_tokens) * round_s)
        # both share the thread evenly while there is both
        share = 2.0 if any(prefill) and not all(prefill) else 1.0
        ends = [share * (first + then) for first, then in zip(prefill, decode, strict=True)]
        return min(MAX_RETRY_S, max(MIN_RETRY_S, min(ends, default=MIN_RETRY_S)))


class RequestTable:
    """All requests in progress, by id. Use on the event loop.

    `places`: the most requests that may wait. `note_running` is called with the number of requests
    in progress whenever it changes.
    """

    def __init__(self, places: int, note_running: Callable[[int], None]):
        self.forecast = Forecast()
        self._places, self._note_running = places, note_running
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, id: str) -> LiveRequest:
        return self._live[id]

    def running(self, job: Job) -> LiveRequest | None:
        """Return a request in progress whose reply `job` can share, or None."""
        return next((one for one in self._live.values() if one.accepts(job)), None)

    def check_places(self, job: Job, *, rate: float, round_s: float) -> None:
        """Raise QueueFull if the queue is full, or TooMany if `job`'s session has its share of it.

        All choices of one request take one place, that of the first. `rate`, `round_s`: see
        `Forecast.next_place`.
        """
        if job.choice:
            return
        live = [one for one in self._live.values() if not one.job.choice]
        waiting = Counter(asker_of(one.job) for one in live if one.record.status == "queued")
        going = [(one.record, one.job.max_tokens) for one in live if one.record.status != "queued"]
        refuse_crowd(
            waiting.total(),
            waiting[asker_of(job)] if job.session is not None else 0,
            self._places,
            "are waiting already",
            after=lambda: self.forecast.next_place(going, rate=rate, round_s=round_s),
            turns=len(waiting),  # each waiting session starts one before the next of this one
        )

    def add(self, live: LiveRequest) -> None:
        """Add a request and pass its task to the scheduler."""
        self._live[live.job.id] = live
        self._note_running(len(self._live))
        live.submit()

    def remove(self, live: LiveRequest) -> bool:
        """Remove a request that is over; return False if it was removed before."""
        if self._live.pop(live.job.id, None) is None:
            return False
        self._note_running(len(self._live))
        self.forecast.note_end(live.record)
        return True

    def all(self) -> Sequence[LiveRequest]:
        return list(self._live.values())

    def figures(self) -> Queue:
        """Any thread."""
        statuses = Counter(one.record.status for one in self.all())
        return Queue(statuses["queued"], self._places, statuses["prefill"], statuses["decode"])

    def fail_all(self, error: MlxcacheError) -> list[RequestRecord]:
        """End every request with `error` after the MLX thread has ended; return their records."""
        records: list[RequestRecord] = []
        for one in self._live.values():
            one.task.fail(error)
            one.fail(error)
            records += one.close()
        self._live.clear()
        self._note_running(0)
        return records


def refuse_crowd(
    total: int,
    own: int,
    places: int,
    waiting: str,
    *,
    after: Callable[[], float],
    turns: int = 1,
) -> None:
    """Raise QueueFull if `total` requests take all `places`, TooMany if `own` of one session do.

    One session may have 1/`QUEUE_SHARE` of the places. `waiting`: the predicate of the message.
    `after()`: estimated seconds until a place is free, of which the session needs `turns`.
    """
    if total >= places:
        raise QueueFull(
            f"{total} requests {waiting}, the most that --queue allows: try again later.",
            retry_after=after(),
        )
    if own >= max(1, places // QUEUE_SHARE):
        raise TooMany(
            f"{own} requests of this session {waiting}, its share of the queue: try again later.",
            retry_after=turns * after(),
        )


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
