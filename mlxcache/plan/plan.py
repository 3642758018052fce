"""A plan: hit rates and times that a machine would reach with a trace's requests, and a chart."""

from __future__ import annotations

import copyreg
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from math import exp, log
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import mlx.core as mx

from mlxcache.config import format_size
from mlxcache.errors import ConfigError
from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory
from mlxcache.plan.disk import UNLIMITED
from mlxcache.plan.simulate import Outcome, Simulation, Speed, percentiles
from mlxcache.plan.trace import Trace

SHARES = (0.90, 0.95, 0.99)
"""Shares of the ceiling for which `make_plan` looks for the least RAM, and the least disk."""

GRID = 6
"""Sizes of RAM, and of disk, that are simulated, by equal factors; some more come near `SHARES`."""

NEAR = 1
"""Position of the share in `SHARES` that the chart shows."""

WORK = 5_000
"""Requests, counted in each simulation, for which another process pays."""

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
        speed, sums = (
            self.speed,
            dict.fromkeys(("first", "new", "again", "restore", "replies"), 0.0),
        )
        uncached = 0.0
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


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Played:
    """What is the same in all simulations of a plan."""

    trace: Trace
    layout: Layout
    speed: Speed
    users: int | None
    at_once: int


class _Runs:
    """Simulations of one trace on machines of several sizes, in processes of their own if it pays.

    `most`: number of simulations that there may be. `progress`: as for `make_plan`.
    """

    def __init__(self, played: _Played, most: int, progress: Progress):
        self._total = most * len(played.trace.requests)
        self._progress = progress
        workers = min(os.cpu_count() or 1, self._total // WORK)
        spawn = get_context("spawn")  # a fork would share the GPU's connection
        self._played = spawn.Array("q", 1)
        self._executor: Executor = _Here()
        if workers > 1:
            bare = replace(played, layout=replace(played.layout, make=list))
            self._executor = ProcessPoolExecutor(workers, spawn, _begin, (bare, self._played))
        else:
            _begin(played, self._played)

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def start(self, memory: Memory) -> Future[tuple[Outcome, int]]:
        """Begin a simulation, which returns its outcome and the most bytes of RAM in use."""
        return self._executor.submit(_simulate, memory)

    def hit_rates(self, memories: Sequence[Memory]) -> list[float]:
        return [self.result(one)[0].hit_rate for one in [self.start(one) for one in memories]]

    def result(self, future: Future[tuple[Outcome, int]]) -> tuple[Outcome, int]:
        while True:
            self._progress(self._played[0], self._total)
            with suppress(TimeoutError):
                return future.result(timeout=0.2)


class _Here(Executor):
    """Executor that runs what it is given at once, in this thread."""

    def submit(self, run: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(run(*args, **more))
        return future


_PROCESS: dict[str, Any] = {}
"""What the simulations of this process share: "played", and "done", which counts requests."""


def _begin(played: _Played, done: Any) -> None:
    _PROCESS.update(played=played, done=done)
    if (parent := parent_process()) is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command's own Ctrl-C ends it
        Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _simulate(memory: Memory) -> tuple[Outcome, int]:
    played, done = _PROCESS["played"], _PROCESS["done"]

    def on_request(count: int) -> None:
        with done.get_lock():
            done[0] += 1

    simulation = Simulation(
        played.layout, memory, played.speed, at_once=played.at_once, on_request=on_request
    )
    return simulation.run(played.trace, played.users), simulation.high_water


def _dtype(name: str) -> mx.Dtype:
    found: mx.Dtype = getattr(mx, name)
    return found


copyreg.pickle(mx.Dtype, lambda one: (_dtype, (str(one).rpartition(".")[2],)))


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
    takes most of the time. `progress(played, total)` is called with the number of requests
    simulated so far, in all simulations, and with the most that there may be. Blocks for seconds to
    minutes. Raises ConfigError if the longest prompt does not fit the memory, if the trace is
    empty, or if KV of this layout cannot be cached.
    """
    _check(trace, layout, memory)
    played = _Played(
        trace, layout, replace(speed, growth=trace.growth or speed.growth), users, at_once
    )
    disk_sizes = disk_sizes and memory.disk > 0
    more = GRID + len(SHARES)
    with _Runs(played, 1 + more * (1 + disk_sizes), progress) as runs:
        here, without_limits = runs.start(memory), runs.start(Memory(UNLIMITED))
        unlimited, most = runs.result(without_limits)
        least = min(most, _longest_bytes(trace, layout))
        ceiling = Point(most, unlimited.hit_rate)
        ram = _sizes(runs, lambda nbytes: Memory(nbytes, reserved={}), least, ceiling)
        disk = Sizes((), ())
        if disk_sizes:
            all_of_it = Point(most * 5 // 4, unlimited.hit_rate)
            disk = _sizes(runs, lambda nbytes: replace(memory, disk=nbytes), least, all_of_it)
        outcome, _ = runs.result(here)
    room = memory.ram - sum(memory.set_aside(layout).values())
    return Plan(trace, layout, memory, played.speed, users, outcome, unlimited, ram, disk, room)


def _sizes(runs: _Runs, machine: Callable[[int], Memory], least: int, ceiling: Point) -> Sizes:
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


# -- the chart -------------------------------------------------------------------------------------

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 732, 64, 340

_STYLE = """\
    .card { fill: #ffffff; stroke: #d0d7de }
    text { fill: #1f2328 }
    .soft { fill: #59636e }
    .grid { stroke: #d0d7de }
    .ceiling { stroke: #8c959f; stroke-dasharray: 6 4 }
    .curve { stroke: #2c8a43; fill: none; stroke-width: 2.5 }
    .point { fill: #2c8a43 }
    .here { stroke: #0969da; stroke-dasharray: 2 3 }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #30363d }
      text { fill: #e6edf3 }
      .soft { fill: #9da7b3 }
      .grid { stroke: #30363d }
      .curve { stroke: #46b463 }
      .point { fill: #46b463 }
      .here { stroke: #4493f8 }
    }"""


def draw(plan: Plan) -> str:
    curve, near = plan.ram.curve, plan.ram.enough[NEAR]
    sizes = [max(1, one.nbytes) for one in curve] + [max(1, plan.room)]
    least, most = min(sizes), max(*sizes, min(sizes) + 1)

    def x(nbytes: int) -> float:
        return LEFT + (RIGHT - LEFT) * log(max(1, nbytes) / least) / log(most / least)

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share

    points = " ".join(f"{x(one.nbytes):.1f},{y(one.hit_rate):.1f}" for one in curve)
    words = "; ".join(f"{format_size(one.nbytes)}: {one.hit_rate:.0%}" for one in curve)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="13">',
        '  <title id="title">Share of prompt tokens that are reused, by RAM</title>',
        f'  <desc id="desc">{escape(words)}</desc>',
        f"  <style>\n{_STYLE}\n  </style>",
        f'  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>',
        f'  <text x="{LEFT}" y="34" font-size="16" font-weight="600">'
        "Prompt tokens that are reused, by RAM for conversations</text>",
    ]
    for percent in range(0, 101, 25):
        at = y(percent / 100)
        lines.append(f'  <line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(
            f'  <text class="soft" x="{LEFT - 10}" y="{at + 4:.1f}" text-anchor="end">'
            f"{percent}%</text>"
        )
    at = y(plan.ceiling)
    lines += [
        f'  <line class="ceiling" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>',
        f'  <text class="soft" x="{RIGHT}" y="{at - 6:.1f}" text-anchor="end">'
        f"ceiling {plan.ceiling:.1%}</text>",
        f'  <polyline class="curve" points="{points}"/>',
    ]
    lines += [
        f'  <circle class="point" cx="{x(one.nbytes):.1f}" cy="{y(one.hit_rate):.1f}" r="3.5"/>'
        for one in curve
    ]
    for row, (nbytes, name) in enumerate(
        ((plan.room, "this machine"), (near or sizes[0], f"{SHARES[NEAR]:.0%} of the ceiling"))
    ):
        here, words_y = x(nbytes), BOTTOM + 22 + 20 * row
        side = "end" if here > (LEFT + RIGHT) / 2 else "start"
        lines += [
            f'  <line class="here" x1="{here:.1f}" x2="{here:.1f}" y1="{TOP}"'
            f' y2="{words_y - 12}"/>',
            f'  <text x="{here:.1f}" y="{words_y}" text-anchor="{side}">'
            f"{name}: {format_size(nbytes)}</text>",
        ]
    lines.append(
        f'  <text class="soft" x="{LEFT}" y="{HEIGHT - 16}">RAM alone, without a disk; '
        "a logarithmic scale</text>"
    )
    return "\n".join([*lines, "</svg>\n"])
