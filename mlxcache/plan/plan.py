"""A plan: hit rates and times that a machine would reach with the requests of a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any

from mlxcache.config import format_size
from mlxcache.errors import ConfigError
from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory
from mlxcache.plan.disk import UNLIMITED
from mlxcache.plan.runs import Played, Progress, Runs
from mlxcache.plan.simulate import Outcome, Speed, percentiles
from mlxcache.plan.trace import Trace

SHARES = (0.90, 0.95, 0.99)
"""Shares of the ceiling for which `make_plan` looks for the least RAM, and the least disk."""

GRID = 6
"""Sizes of RAM, and of disk, that are simulated, by equal factors; some more come near `SHARES`."""

FULL = 0.8
"""Share of its time for which the MLX thread may be busy before requests wait long."""

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Point:
    nbytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hit rates by bytes of RAM or of disk, ascending, and the least bytes for each of `SHARES`.

    A share is None if not even the largest size reaches it.
    """

    curve: tuple[Point, ...]
    enough: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds in which one user, of one day or one session, waits for the machine to compute.

    `first`: for prompts that are mostly new to any cache. `new`: for new text of other prompts.
    `again`: for text that a cache without limits would have. `restore`: for reading from disk and
    remote. `replies`: for decoding. `uncached`: all of it without a cache.
    """

    first: float
    new: float
    again: float
    restore: float
    replies: float
    uncached: float

    @property
    def total(self) -> float:
        return self.first + self.new + self.again + self.restore + self.replies


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `make_plan`.

    `outcome`: result of simulating the machine as it is, `unlimited` with a cache without limits.
    `ram`: sizes of RAM without a disk. `disk`: sizes of the disk beside this machine's RAM; empty
    if it has none, or none was asked for. `room`: bytes of the machine's RAM for conversations.
    """

    trace: Trace
    layout: Layout
    memory: Memory
    speed: Speed
    users: int | None
    outcome: Outcome
    unlimited: Outcome
    ram: Sizes
    disk: Sizes
    room: int

    @property
    def ceiling(self) -> float:
        return self.unlimited.hit_rate

    @property
    def days(self) -> int:
        """Days of one user in a trace that was made, else sessions."""
        if self.trace.form == "agents":
            return len({(one.session or "").partition("/")[0] for one in self.trace.requests})
        return len(self.trace.chains())

    def waits(self) -> Waits | None:
        """Return what a user waits for in a day or a session, None without speeds."""
        if not self.speed.times or not self.outcome.served:
            return None
        needed = dict(zip(self.unlimited.order, self.unlimited.served, strict=True))
        sums = dict.fromkeys(("first", "new", "again", "restore", "replies"), 0.0)
        speed, uncached = self.speed, 0.0
        for position, one in zip(self.outcome.order, self.outcome.served, strict=True):
            reuse, perfect = one.reuse, needed[position].reuse
            start = min(perfect.cached, reuse.prompt)
            kind = "new" if 2 * start > reuse.prompt else "first"
            sums[kind] += speed.prefill_s(max(start, reuse.cached), reuse.prompt)
            sums["again"] += speed.prefill_s(reuse.cached, max(start, reuse.cached))
            sums["restore"] += speed.restore_s(reuse, self.layout.bytes_per_token)
            sums["replies"] += speed.decode_s(one.generated)
            uncached += speed.prefill_s(0, reuse.prompt) + speed.decode_s(one.generated)
        each = {name: seconds / self.days for name, seconds in sums.items()}
        return Waits(**each, uncached=uncached / self.days)

    def first_token_s(self) -> tuple[float, float] | None:
        if not self.speed.times or not self.outcome.served:
            return None
        return percentiles([one.first_token_s for one in self.outcome.served])

    def users_per_machine(self) -> float | None:
        """Return the number of users that keep the MLX thread busy for 80 % of its time, if known.

        Each user sends the next request after the pause that the trace has before it. The hit rate
        is assumed to stay the same for any number of users.
        """
        if not self.speed.times or not self.trace.closed:
            return None
        busy = sum(one.busy_s for one in self.outcome.served)
        pauses = sum(self.trace.requests[at].delay for at in self.outcome.order)
        return FULL * (busy + pauses) / busy if busy else None

    def written_per_day(self) -> float | None:
        if not self.speed.times or not self.outcome.span_s:
            return None
        return self.outcome.written * DAY_S / self.outcome.span_s

    def as_object(self) -> dict[str, Any]:
        outcome, first, waits = self.outcome, self.first_token_s(), self.waits()
        served = outcome.served
        return {
            "object": "plan",
            "trace": {
                "form": self.trace.form,
                "block_tokens": self.trace.block_tokens,
                "requests": len(self.trace.requests),
                "sessions": len(self.trace.chains()),
                "days": self.days,
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
            "shares_of_ceiling": SHARES,
            "ram_sizes": asdict(self.ram),
            "disk_sizes": asdict(self.disk),
            "waits_s": None if waits is None else asdict(waits),
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
        requests = self.trace.requests
        if not requests or any(one.cached is None for one in requests):
            return None
        cached = sum(one.cached or 0 for one in requests)
        return cached / max(1, sum(one.prompt_tokens for one in requests))


def make_plan(
    trace: Trace,
    layout: Layout,
    memory: Memory,
    speed: Speed,
    *,
    users: int | None = None,
    at_once: int = 8,
    disk_sizes: bool = True,
    progress: Progress = lambda done, total: None,
) -> Plan:
    """Simulate the requests of `trace` on a machine, and on others with more and less RAM and disk.

    `users`: as for `Simulation.run`. `disk_sizes`: whether to look for the least disk too, which
    takes most of the time. `progress`: as for `Runs`. Blocks for seconds to minutes. Raises
    ConfigError if the longest prompt does not fit the memory, if the trace is empty, or if KV of
    this layout cannot be cached.
    """
    _check(trace, layout, memory)
    speed = replace(speed, growth=trace.growth or speed.growth)
    played = Played(trace, layout, speed, users, at_once)
    sweeps = 1 + (disk_sizes and memory.disk > 0)
    with Runs(played, 1 + sweeps * (GRID + len(SHARES)), progress) as runs:
        here, without_limits = runs.start(memory), runs.start(Memory(UNLIMITED))
        unlimited, most = runs.result(without_limits)
        least = min(most, _longest_bytes(trace, layout))
        ceiling = Point(most, unlimited.hit_rate)
        ram = _sizes(runs, lambda nbytes: Memory(nbytes, reserved={}), least, ceiling)
        disk = Sizes((), ())
        if sweeps > 1:
            all_of_it = Point(most * 5 // 4, unlimited.hit_rate)
            disk = _sizes(runs, lambda nbytes: replace(memory, disk=nbytes), least, all_of_it)
        outcome, _ = runs.result(here)
    room = memory.ram - sum(memory.set_aside(layout).values())
    return Plan(trace, layout, memory, speed, users, outcome, unlimited, ram, disk, room)


def _sizes(runs: Runs, machine: Callable[[int], Memory], least: int, ceiling: Point) -> Sizes:
    """Simulate machines from `least` bytes to those of the ceiling.

    That is, `GRID` sizes by equal factors, of which the last has the ceiling's hit rate and is not
    simulated, and for each of `SHARES` one where a line between two of them reaches it.
    """
    factor = (ceiling.nbytes / least) ** (1 / (GRID - 1))
    sizes = sorted({round(least * factor**step) for step in range(GRID - 1)} - {ceiling.nbytes})
    rates = dict(zip(sizes, runs.hit_rates(list(map(machine, sizes))), strict=True))
    rates[ceiling.nbytes] = ceiling.hit_rate
    wanted = [share * ceiling.hit_rate for share in SHARES]
    between = {_crossing(_points(rates), share) for share in wanted} - set(rates)
    nearer = sorted(one for one in between if one is not None)
    rates.update(zip(nearer, runs.hit_rates(list(map(machine, nearer))), strict=True))
    curve = _points(rates)
    return Sizes(curve, tuple(_crossing(curve, share) for share in wanted))


def _points(rates: Mapping[int, float]) -> tuple[Point, ...]:
    return tuple(Point(nbytes, rates[nbytes]) for nbytes in sorted(rates))


def _crossing(curve: Sequence[Point], wanted: float) -> int | None:
    """Return about the least bytes with a hit rate of `wanted`, between points of the curve."""
    above = next((at for at, one in enumerate(curve) if one.hit_rate >= wanted), None)
    if not above:
        return None if above is None else curve[0].nbytes
    low, high = curve[above - 1], curve[above]
    within = (wanted - low.hit_rate) / (high.hit_rate - low.hit_rate)
    return round(exp(log(low.nbytes) + within * log(high.nbytes / low.nbytes)))


def _longest_bytes(trace: Trace, layout: Layout) -> int:
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
