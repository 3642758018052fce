"""A plan: hit rates and times that a machine would reach with the requests of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import quantiles
from typing import Any

from mlxcache.config import format_size
from mlxcache.errors import ConfigError
from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory
from mlxcache.plan.disk import UNLIMITED
from mlxcache.plan.simulate import Outcome, Simulation, Speed
from mlxcache.plan.trace import Trace

NEAR = 0.95
"""Hit rate that the bytes of RAM in `Plan.enough` must reach, as a share of the ceiling."""

STEPS = 6
"""Simulations in the search for `Plan.enough`; each halves the range of its logarithm."""

FULL = 0.8
"""Share of its time for which the MLX thread may be busy before requests wait long."""

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Point:
    """Hit rate of a server that has `nbytes` bytes of RAM for conversations, and no disk."""

    nbytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `make_plan`.

    `outcome`: result of simulating the machine as it is. `ceiling`: the hit rate of a cache without
    limits. `curve`: hit rates by bytes of RAM, ascending. `enough`: bytes of RAM with which the hit
    rate is at least 95 % (`NEAR`) of the ceiling. `room`: bytes of the machine's RAM for
    conversations. The other fields are arguments of `make_plan`; `speed` has the trace's growth, if
    that is known.
    """

    trace: Trace
    layout: Layout
    memory: Memory
    speed: Speed
    users: int | None
    outcome: Outcome
    ceiling: float
    curve: tuple[Point, ...]
    enough: int
    room: int

    def first_token_s(self) -> tuple[float, float] | None:
        """Return the median and the 95th percentile of the seconds to the first token.

        Returns None if the speed of prefill or decoding is unknown, or if no request was served.
        """
        if not self.speed.times or not self.outcome.served:
            return None
        times = [one.first_token_s for one in self.outcome.served]
        if len(times) == 1:
            return times[0], times[0]
        cuts = quantiles(times, n=20, method="inclusive")
        return cuts[9], cuts[18]

    def users_per_machine(self) -> float | None:
        """Return the number of users that keep the MLX thread busy for 80 % of its time.

        Each user sends the next request after the pause that the trace has before it. The hit rate
        is assumed to stay the same for any number of users. Returns None if the speed of prefill or
        decoding is unknown, if the trace has no pauses, or if no request was served.
        """
        if not self.speed.times or not self.trace.closed:
            return None
        busy = sum(one.busy_s for one in self.outcome.served)
        pauses = sum(one.delay or 0.0 for one in self.outcome.order)
        return FULL * (busy + pauses) / busy if busy else None

    def written_per_day(self) -> float | None:
        """Return the bytes written to disk per day at the load of the trace.

        Returns None if the speed of prefill or decoding is unknown, or if the simulation took no
        simulated time.
        """
        if not self.speed.times or not self.outcome.span_s:
            return None
        return self.outcome.written * DAY_S / self.outcome.span_s

    def as_object(self) -> dict[str, Any]:
        """Return the plan as the JSON object that `mlxcache plan --json` prints.

        Some of its keys: `machine`, `tokens`, `hit_rate`, `capacity`. Sizes are in bytes, times in
        seconds; a value that is not known is None.
        """
        outcome, first = self.outcome, self.first_token_s()
        served = outcome.served
        return {
            "object": "plan",
            "trace": {
                "form": self.trace.form,
                "block_tokens": self.trace.block_tokens,
                "requests": len(self.trace.requests),
                "sessions": len(self.trace.strands()),
                "users": self.users,
            },
            "machine": {
                "ram_bytes": self.memory.ram,
                "room_bytes": self.room,
                "disk_bytes": self.memory.disk,
                "remote": self.memory.remote,
                "bytes_per_token": self.layout.bytes_per_token,
                "checkpoint_bytes": self.layout.checkpoint_bytes,
                "speed": asdict(self.speed),
            },
            "requests": {"served": len(served), "refused": outcome.refused},
            "tokens": {
                "prompt": outcome.prompt_tokens,
                "cached": sum(one.reuse.cached for one in served),
                "restored": sum(one.reuse.restored for one in served),
                "fed": sum(one.reuse.fed for one in served),
                "generated": sum(one.generated for one in served),
            },
            "hit_rate": {
                "all": outcome.hit_rate,
                "ram": outcome.share(lambda reuse: reuse.cached - reuse.restored),
                "disk": outcome.share(lambda reuse: reuse.disk),
                "remote": outcome.share(lambda reuse: reuse.remote),
                "ceiling": self.ceiling,
                "recorded": self.recorded(),
            },
            "capacity": {
                "share_of_ceiling": NEAR,
                "bytes": self.enough,
                "tokens": self.enough // max(1, self.layout.bytes_per_token),
                "curve": [asdict(one) for one in self.curve],
            },
            "first_token_s": None if first is None else {"p50": first[0], "p95": first[1]},
            "mlx_thread": {
                "busy": outcome.busy if self.speed.times else None,
                "users_per_machine": self.users_per_machine(),
            },
            "disk": {
                "written_bytes": outcome.written,
                "written_bytes_per_day": self.written_per_day(),
            },
            "span_s": outcome.span_s if self.speed.times else None,
        }

    def recorded(self) -> float | None:
        """Return the hit rate that the recorded server had with the requests of the trace.

        Returns None if the trace does not have the cached tokens of every request.
        """
        requests = self.trace.requests
        if not requests or any(one.cached is None for one in requests):
            return None
        cached = sum(one.cached or 0 for one in requests)
        return cached / max(1, sum(one.prompt_tokens for one in requests))


Progress = Callable[[int, int], None]


def make_plan(
    trace: Trace,
    layout: Layout,
    memory: Memory,
    speed: Speed,
    *,
    users: int | None = None,
    at_once: int = 8,
    progress: Progress = lambda done, total: None,
) -> Plan:
    """Simulate the requests of `trace` on a machine, and on others with more and less RAM.

    `users`: number of strands (see `Trace.strands`) that are in progress at once, for traces whose
    later turns follow earlier ones; None lets each begin at its own time. `at_once`: requests that
    a server computes at once. `progress(played, total)` is called with the number of requests
    simulated so far, those of all simulations added up, and with the most that there may be. Blocks
    for seconds to minutes. Raises ConfigError if the longest prompt does not fit the memory, if the
    trace is empty, or if KV of this layout cannot be cached.
    """
    runs = STEPS + 4
    _check(trace, layout, memory)
    speed = replace(speed, growth=trace.growth or speed.growth)
    done = 0

    def played(one: int) -> None:
        progress(done + one, runs * len(trace.requests))

    def run(here: Memory) -> tuple[Outcome, int]:
        nonlocal done
        simulation = Simulation(layout, here, speed, at_once=at_once, on_request=played)
        outcome = simulation.run(trace, users)
        done += len(trace.requests)
        return outcome, simulation.high_water

    outcome, _ = run(memory)
    unlimited, most = run(Memory(UNLIMITED))
    curve = {most: unlimited.hit_rate}

    def measured(nbytes: int) -> float:
        if nbytes not in curve:
            curve[nbytes] = run(Memory(nbytes, reserved={}))[0].hit_rate
        return curve[nbytes]

    least = min(most, _longest_bytes(trace, layout))
    enough = _enough(measured, least, most, NEAR * unlimited.hit_rate)
    measured(round((least * most) ** 0.5))
    points = tuple(Point(nbytes, curve[nbytes]) for nbytes in sorted(curve))
    room = memory.ram - sum(memory.set_aside(layout).values())
    return Plan(
        trace, layout, memory, speed, users, outcome, unlimited.hit_rate, points, enough, room
    )


def _enough(measured: Callable[[int], float], least: int, most: int, wanted: float) -> int:
    """Search for the smallest number of bytes of RAM with which the hit rate is at least `wanted`.

    `measured(nbytes)` simulates a server with `nbytes` bytes of RAM and returns its hit rate. The
    result is approximate, between `least` and `most` bytes; `most` must be enough.
    """
    if measured(least) >= wanted:
        return least
    low, high = least, most
    for _ in range(STEPS):
        middle = round((low * high) ** 0.5)
        if measured(middle) >= wanted:
            high = middle
        else:
            low = middle
    return high


def _longest_bytes(trace: Trace, layout: Layout) -> int:
    """Return the bytes that the longest request of a trace needs, plus a small margin."""
    tokens = max(one.prompt_tokens + one.reply_tokens for one in trace.requests)
    one = (tokens + 512) * layout.bytes_per_token + layout.running_bytes
    return one + 8 * layout.checkpoint_bytes + tokens // 24 * layout.bytes_per_token


def _check(trace: Trace, layout: Layout, memory: Memory) -> None:
    if not layout.cacheable:
        raise ConfigError(
            f"nothing can be planned: this model is not cached, because its cache class "
            f"{', '.join(layout.unknown)} is unknown"
        )
    if not trace.requests:
        raise ConfigError("the trace has no requests")
    room = memory.ram - sum(memory.set_aside(layout).values())
    longest = max(one.prompt_tokens for one in trace.requests)
    needed = (longest + 64) * layout.bytes_per_token + layout.running_bytes
    if room < needed:
        raise ConfigError(
            f"the longest prompt has {longest:,} tokens and takes {format_size(needed)}, but "
            f"--ram has room for {format_size(max(0, room))}: raise --ram, or plan a shorter "
            "context or smaller KV (--kv-bits)"
        )
