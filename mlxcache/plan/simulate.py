"""A trace over time: one MLX thread, requests in the order in which it gets to them.

The thread feeds one prompt at a time, and shares its time evenly between a prompt and the replies
that decode beside it. Replies are decoded at one rate in total, however many there are: a batch is
faster on most machines, so a plan is on the safe side.
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

    `prefill`: prompt tokens per second at the beginning of a prompt. `growth`: share by which each
    token before it slows a token down. `decode`: tokens per second of one reply. `disk` and
    `remote`: bytes per second restored.
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
        """Return the seconds for reading what a request restores."""
        seconds = 0.0
        for tokens, rate in ((reuse.disk, self.disk), (reuse.remote, self.remote)):
            seconds += tokens * bytes_per_token / rate if rate else 0.0
        return seconds

    def decode_s(self, tokens: int) -> float:
        """Return the seconds for decoding `tokens` tokens alone."""
        return tokens / self.decode if self.decode else 0.0

    def with_given(self, **given: float | None) -> Speed:
        """Return these speeds with those of `given` in their place that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def times(self) -> bool:
        """True if times can be computed."""
        return self.prefill is not None and self.decode is not None


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a plan that was served.

    `at`: seconds since the plan began when it arrived. `first_token_s`: seconds until its first
    token. `busy_s`: seconds of the MLX thread.
    """

    at: float
    reuse: Reuse
    generated: int
    first_token_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run of a trace.

    `refused`: requests whose prompt cannot fit. `span_s`: seconds from the first arrival to the
    last end. `written`: bytes written to disk. `order`: the requests in the order of their starts.
    """

    served: Sequence[Served]
    order: Sequence[Request]
    refused: int
    span_s: float
    written: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(one.reuse.prompt for one in self.served)

    def share(self, tokens: Callable[[Reuse], int]) -> float:
        """Return `tokens` of all requests divided by the tokens of all prompts; 0 without any."""
        return sum(tokens(one.reuse) for one in self.served) / max(1, self.prompt_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were reused."""
        return self.share(lambda reuse: reuse.cached)

    @property
    def busy(self) -> float:
        """Share of the time that the MLX thread was busy."""
        return sum(one.busy_s for one in self.served) / self.span_s if self.span_s else 0.0


class _Arrivals:
    """Requests by the time of their arrival, some of which follow from the end of others.

    `users`: sessions that are open at once, if later turns follow earlier ones; None for each
    session at the time of its first request.
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
        """Remove the next request; return its time, what follows it, and the request."""
        at, _, rest, one = heapq.heappop(self._heap)
        return at, rest, one

    def ended(self, at: float, rest: Iterator[Request]) -> None:
        """Note that a request ended: its session continues, or its user's next one begins."""
        following = next(rest, None)
        if following is not None:
            self._push(at + (following.delay or 0.0), rest, following)
        elif (turns := next(self._later, None)) is not None:
            self._open(at + PAUSE_S, turns)


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply in progress. `left_s`: seconds that it would still take alone."""

    left_s: float
    running: Running
    rest: Iterator[Request]

    def advance(self, seconds: float) -> None:
        """Let `seconds` of its time pass."""
        self.left_s = max(0.0, self.left_s - seconds)


class Simulation:
    """One run of a trace on one server.

    `at_once`: requests in progress at the same time. `on_request(done)` is called after each.
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
        """Play `trace`, once, and return what came of it. `users`: see `_Arrivals`; blocks."""
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
        """Feed one prompt, and begin its reply."""
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
        """Let the thread feed a prompt, for half of its time while replies decode beside it."""
        while self._replies and seconds > 0:
            step = min(2 * seconds, self._until_end(share=0.5))
            self._pass(step, share=0.5)
            seconds -= step / 2
            if self._until_end() <= 0:
                self._end_one(arrivals)
        self._now += max(0.0, seconds)

    def _each(self, share: float) -> float:
        """Return the share of its own speed that each reply has."""
        return share / len(self._replies) if self._speed.times else 1.0

    def _until_end(self, share: float = 1.0) -> float:
        """Return the seconds until the first reply ends. `share`: of the thread for replies."""
        return min(one.left_s for one in self._replies) / self._each(share)

    def _pass(self, seconds: float, share: float = 1.0) -> None:
        """Let time pass, in which replies are decoded."""
        self._now += seconds
        if self._replies:
            each = seconds * self._each(share)
            for one in self._replies:
                one.advance(each)

    def _end_one(self, arrivals: _Arrivals) -> None:
        """Let time pass until the first reply ends, and end it."""
        first = min(self._replies, key=lambda one: one.left_s)
        self._pass(self._until_end())
        self._replies.remove(first)
        self._cache.end(first.running)
        arrivals.ended(self._now, first.rest)
