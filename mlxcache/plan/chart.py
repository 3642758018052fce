"""The chart of a plan: the share of prompt tokens that are reused, by RAM, as SVG."""

from __future__ import annotations

from html import escape
from math import log

from mlxcache.config import format_size
from mlxcache.plan.plan import SHARES, Plan

NEAR = 1
"""Position of the share in `SHARES` that is shown."""

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
