"""Simulation of one server over the requests of a trace, with one MLX thread.

The thread computes one prompt at a time, in the order of arrival, and divides its time evenly
between a prompt and the replies that are decoded beside it. All replies together are decoded at the
rate of one. Real batches are faster on most machines, so a plan rather overestimates times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory, PlannedCache, Reuse, Running
from mlxcache.plan.trace import Request, Trace

PAUSE_S = 5.0
"""Seconds between the sessions that one user of a trace has one after another."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speed of a machine with a model; None for what was not measured.

    `prefill`: prompt tokens per second at the beginning of a prompt. `growth`: a token after k
    earlier ones takes 1 + `growth` * k times as long as the first. `decode`: tokens per second of
    one reply. `disk` and `remote`: bytes per second of restoring from there. Times that would need
    a speed that is None are computed as 0.
    """

    prefill: float | None = None
    decode: float | None = None
    disk: float | None = None
    remote: float | None = None
    growth: float = 0.0

    def prefill_s(self, start: int, stop: int) -> float:
        """Return the seconds for feeding the prompt tokens from `start` to `stop`."""
        if self.prefill is None:
            return 0.0
        middle = (start + stop) / 2
        return (stop - start) * (1 + self.growth * middle) / self.prefill

    def restore_s(self, reuse: Reuse, bytes_per_token: int) -> float:
        """Return the seconds for reading what a request restores from disk and remote.

        `bytes_per_token`: bytes of KV per token.
        """
        seconds = 0.0
        for tokens, rate in ((reuse.disk, self.disk), (reuse.remote, self.remote)):
            seconds += tokens * bytes_per_token / rate if rate else 0.0
        return seconds

    def decode_s(self, tokens: int) -> float:
        """Return the seconds for decoding `tokens` tokens while nothing else runs."""
        return tokens / self.decode if self.decode else 0.0

    def with_given(self, **given: float | None) -> Speed:
        """Return a copy with the values of `given`, except None, in the fields of these names."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def times(self) -> bool:
        """True if the speeds of prefill and decoding are known, so that times can be computed."""
        return self.prefill is not None and self.decode is not None


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was served in a simulation.

    `at`: when it arrived, in seconds since the simulation began. `generated`: tokens of its reply.
    `first_token_s`: seconds from its arrival to its first token. `busy_s`: seconds that it took of
    the MLX thread.
    """

    at: float
    reuse: Reuse
    generated: int
    first_token_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one simulation.

    `served`: what was measured for each served request, in the order in which they started.
    `order`: the trace's request for each item of `served`. `refused`: number of requests whose
    prompt could not fit. `span_s`: seconds from the first arrival to the last end. `written`: bytes
    written to disk.
    """

    served: Sequence[Served]
    order: Sequence[Request]
    refused: int
    span_s: float
    written: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of all served requests."""
        return sum(one.reuse.prompt for one in self.served)

    def share(self, tokens: Callable[[Reuse], int]) -> float:
        """Return the sum of `tokens(reuse)` over the served requests, divided by `prompt_tokens`.

        `reuse`: that of each request. Returns 0 if no request was served.
        """
        return sum(tokens(one.reuse) for one in self.served) / max(1, self.prompt_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of the served requests' prompt tokens that were reused."""
        return self.share(lambda reuse: reuse.cached)

    @property
    def busy(self) -> float:
        """Share of the time `span_s` in which the MLX thread was busy; 0 if that time is 0."""
        return sum(one.busy_s for one in self.served) / self.span_s if self.span_s else 0.0


class _Arrivals:
    """Queue of requests by their time of arrival.

    In traces whose later turns follow earlier ones, the end of a request sets the time of the next.
    `users`: number of strands (see `Trace.strands`) that are in progress at once in such a trace;
    None lets each strand begin at the time of its first request.
    """

    def __init__(self, trace: Trace, users: int | None):
        self._heap: list[tuple[float, int, Iterator[Request], Request]] = []
        self._serial = count()
        self._later: Iterator[list[Request]] = iter(())
        if not trace.closed:
            for one in trace.requests:
                self._push(one.time, iter(()), one)
            return
        sessions = trace.strands()
        at_once = len(sessions) if users is None else users
        self._later = iter(sessions[at_once:])
        for number, turns in enumerate(sessions[:at_once]):
            begin = turns[0].time if users is None else number * PAUSE_S
            self._open(begin, turns)

    def _push(self, at: float, rest: Iterator[Request], one: Request) -> None:
        heapq.heappush(self._heap, (at, next(self._serial), rest, one))

    def _open(self, at: float, turns: Sequence[Request]) -> None:
        rest = iter(turns)
        self._push(at, rest, next(rest))

    @property
    def next_at(self) -> float:
        """Time of the next arrival; infinite if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self) -> tuple[float, Iterator[Request], Request]:
        """Remove the next request; return its time, the later turns of its strand, and itself.

        Fails if no request is queued: `next_at` is infinite then.
        """
        at, _, rest, one = heapq.heappop(self._heap)
        return at, rest, one

    def ended(self, at: float, rest: Iterator[Request]) -> None:
        """Queue the request that follows one that ended, if there is any.

        That is the next turn of its strand or, after the last turn, the first one of a strand that
        has not begun. `at`: time of the end. `rest`: the later turns of the strand.
        """
        following = next(rest, None)
        if following is not None:
            self._push(at + (following.delay or 0.0), rest, following)
        elif (turns := next(self._later, None)) is not None:
            self._open(at + PAUSE_S, turns)


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply in progress, with its request `running`.

    `left_s`: seconds that it still needs if it is decoded alone. `rest`: later turns of its strand.
    """

    left_s: float
    running: Running
    rest: Iterator[Request]

    def advance(self, seconds: float) -> None:
        """Subtract `seconds` from the time that the reply still needs."""
        self.left_s = max(0.0, self.left_s - seconds)


class Simulation:
    """Simulation of one server.

    `at_once`: most requests in progress at the same time. `on_request(n)` is called after each
    prompt, computed or refused, with the number of requests so far. Unless the speeds of prefill
    and decoding are known, a reply takes as long as its request took on the recorded server, or no
    time if the trace does not tell.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        speed: Speed,
        *,
        at_once: int = 8,
        on_request: Callable[[int], None] = lambda done: None,
    ):
        self._layout = layout
        self._speed = speed
        self._at_once = at_once
        self._on_request = on_request
        self._now = 0.0
        self._cache = PlannedCache(layout, memory, lambda: self._now, speed.growth)
        self._replies: list[_Reply] = []
        self._served: list[Served] = []
        self._order: list[Request] = []
        self._refused = 0

    @property
    def high_water(self) -> int:
        """Most bytes of RAM that were in use at once."""
        return self._cache.kv.budget.high_water

    def run(self, trace: Trace, users: int | None = None) -> Outcome:
        """Play `trace` and return the outcome; call once. Blocks.

        `users`: number of strands (see `Trace.strands`) that are in progress at once, in a trace
        whose later turns follow earlier ones; None lets each strand begin at the time of its first
        request.
        """
        arrivals = _Arrivals(trace, users)
        began = self._now = arrivals.next_at
        try:
            while arrivals.next_at < float("inf") or self._replies:
                due = max(arrivals.next_at, self._now)
                full = len(self._replies) >= self._at_once
                if self._replies and (full or self._now + self._until_end() <= due):
                    self._end_one(arrivals)
                    continue
                self._pass(due - self._now)
                self._start(*arrivals.take(), arrivals)
                self._on_request(len(self._served) + self._refused)
        finally:
            self._cache.close()
        span_s = self._now - began if self._served else 0.0
        written = self._cache.disk.written if self._cache.disk is not None else 0
        return Outcome(self._served, self._order, self._refused, span_s, written)

    def _start(
        self, at: float, rest: Iterator[Request], request: Request, arrivals: _Arrivals
    ) -> None:
        """Compute one prompt, and begin its reply.

        If the prompt can never fit in memory, counts the request as refused instead. `at`: when the
        request arrived. `rest`: the later turns of its strand. `arrivals`: the queue that gets the
        next turn after each reply that ends in the meantime.
        """
        running = self._cache.start(request)
        while running is None and self._replies:
            self._end_one(arrivals)  # it holds memory that the prompt needs
            running = self._cache.start(request)
        if running is None:
            self._refused += 1
            arrivals.ended(self._now, rest)
            return
        reuse, speed, generated = running.reuse, self._speed, request.reply_tokens
        busy = speed.restore_s(reuse, self._layout.bytes_per_token)
        busy += speed.prefill_s(reuse.cached, reuse.prompt)
        self._feed(busy, arrivals)
        waited = self._now + speed.decode_s(1) - at
        decode = speed.decode_s(generated)
        # without speeds, requests take as long as they did where they were recorded
        self._replies.append(_Reply(decode if speed.times else request.took, running, rest))
        self._served.append(Served(at, reuse, generated, waited, busy + decode))
        self._order.append(request)

    def _feed(self, seconds: float, arrivals: _Arrivals) -> None:
        """Advance the time until the MLX thread has spent `seconds` on one prompt.

        While replies are decoded, the prompt gets half of the thread's time. `arrivals`: the queue
        that gets the next turn after each reply that ends in the meantime.
        """
        while self._replies and seconds > 0:
            step = min(2 * seconds, self._until_end(share=0.5))
            self._pass(step, share=0.5)
            seconds -= step / 2
            if self._until_end() <= 0:
                self._end_one(arrivals)
        self._now += max(0.0, seconds)

    def _each(self, share: float) -> float:
        """Return the speed of each reply in progress, as a share of the speed that it has alone.

        `share`: share of the MLX thread's time that all replies together get. Returns 1 if the
        speeds of prefill and decoding are not known.
        """
        return share / len(self._replies) if self._speed.times else 1.0

    def _until_end(self, share: float = 1.0) -> float:
        """Return the seconds until the next end of a reply. At least one must be in progress.

        `share`: share of the MLX thread's time that all replies together get.
        """
        return min(one.left_s for one in self._replies) / self._each(share)

    def _pass(self, seconds: float, share: float = 1.0) -> None:
        """Advance the time by `seconds`, in which the replies in progress are decoded.

        `share`: share of the MLX thread's time that all replies together get.
        """
        self._now += seconds
        if self._replies:
            each = seconds * self._each(share)
            for one in self._replies:
                one.advance(each)

    def _end_one(self, arrivals: _Arrivals) -> None:
        """Advance the time to the end of the reply that ends next, and end its request.

        The request that follows it, if there is any, is added to `arrivals`.
        """
        first = min(self._replies, key=lambda one: one.left_s)
        self._pass(self._until_end())
        self._replies.remove(first)
        self._cache.end(first.running)
        arrivals.ended(self._now, first.rest)
