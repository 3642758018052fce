"""Simulation of one server over the requests of a trace, with one MLX thread.

The thread computes one prompt at a time, in the order of arrival, and divides its time evenly
between a prompt and the replies that are decoded beside it. All replies together are decoded at the
rate of one. Real batches are faster on most machines, so a plan rather overestimates times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any

import numpy as np

from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory, PlannedCache, Reuse, Running
from mlxcache.plan.trace import Trace
from mlxcache.tree.eviction import EvictionOrder

PAUSE_S = 5.0
"""Seconds between the sessions that one user of a trace has one after another."""

LEAST_FED = 128
"""Fewest prompt tokens fed by a request whose prefill counts; shorter ones show fixed costs."""


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
        if self.prefill is None:
            return 0.0
        middle = (start + stop) / 2
        return (stop - start) * (1 + self.growth * middle) / self.prefill

    def restore_s(self, reuse: Reuse, bytes_per_token: int) -> float:
        seconds = 0.0
        for tokens, rate in ((reuse.disk, self.disk), (reuse.remote, self.remote)):
            seconds += tokens * bytes_per_token / rate if rate else 0.0
        return seconds

    def decode_s(self, tokens: int) -> float:
        return tokens / self.decode if self.decode else 0.0

    def with_given(self, **given: float | None) -> Speed:
        """Return a copy with the values of `given`, except None, in the fields of these names."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def times(self) -> bool:
        """True if the speeds of prefill and decoding are known, so that times can be computed."""
        return self.prefill is not None and self.decode is not None


def speed_of(records: Iterable[Mapping[str, Any]], bytes_per_token: int) -> Speed:
    """Compute speeds from records of requests, as `GET /v1/requests` returns them.

    Only requests with the status "done" or "cancelled" count. A speed that no record shows is None;
    that of the remote always is. Prefill is fitted by least squares: the seconds per token rise
    linearly with the position.
    """
    ended = [one for one in records if one.get("status") in ("done", "cancelled")]
    prefill, growth = _prefill(ended)
    steps = seconds = restored = reading = 0.0
    for one in ended:
        timing = one.get("timing") or {}
        if timing.get("decode_s") and one["generated_tokens"] > 1:
            steps += one["generated_tokens"] - 1
            seconds += timing["decode_s"]
        if timing.get("restore_s") and one["restored_tokens"]:
            restored += one["restored_tokens"]
            reading += timing["restore_s"]
    return Speed(
        prefill=prefill,
        growth=growth,
        decode=steps / seconds if seconds else None,
        disk=restored * bytes_per_token / reading if reading else None,
    )


def _prefill(records: Iterable[Mapping[str, Any]]) -> tuple[float | None, float]:
    rows, times = [], []
    for one in records:
        fed, seconds = one["fed_tokens"], (one.get("timing") or {}).get("prefill_s")
        if seconds and fed >= LEAST_FED:
            rows.append((fed, fed * (one["prompt_tokens"] - fed / 2)))
            times.append(seconds)
    if not times:
        return None, 0.0
    matrix = np.array(rows, float)
    average = float(matrix[:, 0].sum() / sum(times))
    if len(times) < 3:
        return average, 0.0
    (base, slope), *_ = np.linalg.lstsq(matrix, np.array(times), rcond=None)
    if base <= 0 or slope < 0:
        return average, 0.0
    return 1 / float(base), float(slope / base)


def percentiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) == 1:
        return times[0], times[0]
    cuts = quantiles(times, n=20, method="inclusive")
    return cuts[9], cuts[18]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was served, which arrived `at` seconds after the simulation began.

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

    `served`: what was measured for each served request, in the order in which they started, and
    `order` their positions in the trace. `refused`: number of requests whose prompt could not fit.
    `span_s`: seconds from the first arrival to the last end. `written`: bytes written to disk.
    """

    served: Sequence[Served]
    order: Sequence[int]
    refused: int
    span_s: float
    written: int

    @property
    def prompt_tokens(self) -> int:
        return sum(one.reuse.prompt for one in self.served)

    def share(self, tokens: Callable[[Reuse], int]) -> float:
        return sum(tokens(one.reuse) for one in self.served) / max(1, self.prompt_tokens)

    @property
    def hit_rate(self) -> float:
        return self.share(lambda reuse: reuse.cached)

    @property
    def busy(self) -> float:
        return sum(one.busy_s for one in self.served) / self.span_s if self.span_s else 0.0


class _Arrivals:
    """Queue of requests by their time of arrival.

    The end of a request may set the time of others. `users`: as for `Simulation.run`.
    """

    def __init__(self, trace: Trace, users: int | None):
        self.requests = trace.requests
        self._heap: list[tuple[float, int]] = []
        self._chains = trace.chains()
        self._chain = {one: number for number, chain in enumerate(self._chains) for one in chain}
        self._left = [len(chain) for chain in self._chains]
        self._awaited = [len(one.after) for one in self.requests]
        self._followers: dict[int, list[int]] = {}
        for position, one in enumerate(self.requests):
            for before in one.after:
                self._followers.setdefault(before, []).append(position)
        turns = users if trace.closed else None
        self._later = iter(() if turns is None else self._chains[turns:])
        for number, chain in enumerate(self._chains[:turns]):
            time = self.requests[chain[0]].time
            self._push(time if turns is None else number * PAUSE_S, chain[0])

    def _push(self, at: float, position: int) -> None:
        heapq.heappush(self._heap, (at, position))

    @property
    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def take(self) -> tuple[float, int]:
        return heapq.heappop(self._heap)

    def ended(self, at: float, position: int) -> None:
        for one in self._followers.get(position, ()):
            self._awaited[one] -= 1
            if not self._awaited[one]:
                self._push(at + self.requests[one].delay, one)
        chain = self._chain[position]
        self._left[chain] -= 1
        if not self._left[chain] and (following := next(self._later, None)) is not None:
            self._push(at + PAUSE_S, following[0])


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply in progress, which needs `left_s` seconds if it is decoded alone."""

    left_s: float
    running: Running
    position: int

    def advance(self, seconds: float) -> None:
        self.left_s = max(0.0, self.left_s - seconds)


class Simulation:
    """Simulation of one server with at most `at_once` requests in progress.

    `on_request(n)` is called after each prompt, computed or refused, with the number of requests so
    far. Unless the speeds of prefill and decoding are known, a reply takes as long as its request
    took on the recorded server, or no time if the trace does not tell.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        speed: Speed,
        *,
        at_once: int = 8,
        on_request: Callable[[int], None] = lambda done: None,
        order: type[EvictionOrder] = EvictionOrder,
    ):
        self._layout = layout
        self._speed = speed
        self._at_once = at_once
        self._on_request = on_request
        self._now = 0.0
        self._cache = PlannedCache(layout, memory, lambda: self._now, speed.growth, order)
        self._replies: list[_Reply] = []
        self._served: list[Served] = []
        self._order: list[int] = []
        self._refused = 0

    @property
    def high_water(self) -> int:
        return self._cache.kv.budget.high_water

    def run(self, trace: Trace, users: int | None = None) -> Outcome:
        """Play `trace` and return the outcome; call once. Blocks.

        `users`: number of chains (see `Trace.chains`) that are in progress at once, in a trace
        whose later requests follow earlier ones; None lets each begin at its own time.
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
        written = self._cache.disk.written
        return Outcome(self._served, self._order, self._refused, span_s, written)

    def _start(self, at: float, position: int, arrivals: _Arrivals) -> None:
        """Compute one prompt and begin its reply, or count it as refused if it can never fit.

        `arrivals` is told of the ends of other replies in the meantime.
        """
        request = arrivals.requests[position]
        running = self._cache.start(request)
        while running is None and self._replies:
            self._end_one(arrivals)  # it holds memory that the prompt needs
            running = self._cache.start(request)
        if running is None:
            self._refused += 1
            arrivals.ended(self._now, position)
            return
        reuse, speed, generated = running.reuse, self._speed, request.reply_tokens
        busy = speed.restore_s(reuse, self._layout.bytes_per_token)
        busy += speed.prefill_s(reuse.cached, reuse.prompt)
        self._feed(busy, arrivals)
        waited = self._now + speed.decode_s(1) - at
        decode = speed.decode_s(generated)
        # without speeds, requests take as long as they did where they were recorded
        self._replies.append(_Reply(decode if speed.times else request.took, running, position))
        self._served.append(Served(at, reuse, generated, waited, busy + decode))
        self._order.append(position)

    def _feed(self, seconds: float, arrivals: _Arrivals) -> None:
        """Advance the time until the MLX thread has spent `seconds` on one prompt.

        While replies are decoded, the prompt gets half of the thread's time.
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

        `share`: share of the MLX thread's time that all replies together get.
        """
        return share / len(self._replies) if self._speed.times else 1.0

    def _until_end(self, share: float = 1.0) -> float:
        return min(one.left_s for one in self._replies) / self._each(share)

    def _pass(self, seconds: float, share: float = 1.0) -> None:
        self._now += seconds
        if self._replies:
            done = seconds * self._each(share)
            for one in self._replies:
                one.advance(done)

    def _end_one(self, arrivals: _Arrivals) -> None:
        first = min(self._replies, key=lambda one: one.left_s)
        self._pass(self._until_end())
        self._replies.remove(first)
        self._cache.end(first.running)
        arrivals.ended(self._now, first.position)
