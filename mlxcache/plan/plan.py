"""A plan: hit rates and times that a machine would reach with a trace's requests, and a chart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from html import escape
from math import log
from typing import Any

from mlxcache.config import format_size
from mlxcache.errors import ConfigError
from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory
from mlxcache.plan.disk import UNLIMITED
from mlxcache.plan.simulate import Outcome, Simulation, Speed, percentiles
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
    nbytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `make_plan`.

    `outcome`: result of simulating the machine as it is. `ceiling`: the hit rate of a cache without
    limits. `curve`: hit rates by bytes of RAM, ascending. `enough`: bytes of RAM with which the hit
    rate is at least 95 % (`NEAR`) of the ceiling. `room`: bytes of the machine's RAM for
    conversations.
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
        pauses = sum(one.delay for one in self.outcome.order)
        return FULL * (busy + pauses) / busy if busy else None

    def written_per_day(self) -> float | None:
        if not self.speed.times or not self.outcome.span_s:
            return None
        return self.outcome.written * DAY_S / self.outcome.span_s

    def as_object(self) -> dict[str, Any]:
        outcome, first = self.outcome, self.first_token_s()
        served = outcome.served
        return {
            "object": "plan",
            "trace": {
                "form": self.trace.form,
                "block_tokens": self.trace.block_tokens,
                "requests": len(self.trace.requests),
                "sessions": len(self.trace.chains()),
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

    `users`: as for `Simulation.run`. `progress(played, total)` is called with the number of
    requests simulated so far, in all simulations, and with the most that there may be. Blocks for
    seconds to minutes. Raises ConfigError if the longest prompt does not fit the memory, if the
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
    """Search for about the least bytes of RAM, up to `most`, with a hit rate of `wanted`."""
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
    sizes = [max(1, one.nbytes) for one in plan.curve] + [max(1, plan.room), plan.enough]
    least, most = min(sizes), max(*sizes, min(sizes) + 1)

    def x(nbytes: int) -> float:
        return LEFT + (RIGHT - LEFT) * log(max(1, nbytes) / least) / log(most / least)

    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share

    points = " ".join(f"{x(one.nbytes):.1f},{y(one.hit_rate):.1f}" for one in plan.curve)
    words = "; ".join(f"{format_size(one.nbytes)}: {one.hit_rate:.0%}" for one in plan.curve)
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
        for one in plan.curve
    ]
    for row, (nbytes, name) in enumerate(
        ((plan.room, "this machine"), (plan.enough, f"{NEAR:.0%} of the ceiling"))
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
