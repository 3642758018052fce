"""Draw docs/images/fed.svg from the tables in docs/benchmarks.md.

    bin/_chart.py [PAGE PICTURE]

The chart shows how many tokens of a turn's prompt are fed to the model, which are the same on any
machine, and the time to the first token on the machine of the page.
"""

import re
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
CASES = (
    ("llama (18,500 tokens)", "attribution line changed", "A client's line at the top has changed"),
    ("qwen3_5", "second branch there", "A second branch, in a model like Qwen 3.5"),
    ("gemma3", "second branch there", "A second branch, in a model like Gemma 3"),
    ("llama", "last message edited", "The last message, edited"),
)
"""Model family and case as in the tables, and the label in the chart."""

STYLE = """\
    .card { fill: #ffffff; stroke: #d0d7de }
    text { fill: #1f2328 }
    .soft { fill: #59636e }
    .track { fill: #eef1f4 }
    .ours { fill: #2c8a43 }
    .theirs { fill: #8c959f }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #30363d }
      text { fill: #e6edf3 }
      .soft { fill: #9da7b3 }
      .track { fill: #21262d }
      .ours { fill: #46b463 }
      .theirs { fill: #6e7681 }
    }"""

WIDTH, LEFT, BAR, ROW, TOP = 760, 24, 440, 74, 58


class Figures(NamedTuple):
    """What mlxcache fed and the tokens of the prompt, what mlx_lm.server fed, and first tokens."""

    ours: int
    prompt: int
    theirs: int
    our_time: str
    their_time: str


def figures(page: str) -> dict[tuple[str, str], Figures]:
    """Return the figures in the tables of `page`, by model family and case."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        fed = re.fullmatch(r"([\d,]+) of ([\d,]+)", cells[2]) if len(cells) == 8 else None
        if fed:
            numbers = (fed[1], fed[2], cells[3])
            ours, prompt, theirs = (int(text.replace(",", "")) for text in numbers)
            found[cells[0], cells[1]] = Figures(ours, prompt, theirs, cells[5], cells[6])
    return found


def chart(page: str) -> str:
    """Return the chart as SVG text. Raises KeyError if the page lacks a case."""
    known = figures(page)
    rows, words = [], []
    for at, (family, case, name) in enumerate(CASES):
        rows += _case(TOP + at * ROW, name, known[family, case])
        words.append(f"{name}: {'; '.join(_labels(known[family, case]))}.")
    height = TOP + len(CASES) * ROW + 34
    foot = "Tokens: the same on any machine. Seconds: two busy CPU cores. See docs/benchmarks.md"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            ' aria-labelledby="title desc" font-family="system-ui, -apple-system, \'Segoe UI\','
            ' sans-serif" font-size="13">',
            '  <title id="title">Tokens of a turn that are computed, and seconds</title>',
            f'  <desc id="desc">{escape(" ".join(words))}</desc>',
            f"  <style>\n{STYLE}\n  </style>",
            f'  <rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>',
            f'  <text x="{LEFT}" y="32" font-size="16" font-weight="600">Tokens of a turn that are '
            "computed, of its prompt, and time to the first token</text>",
            *rows,
            f'  <text class="soft" x="{LEFT}" y="{height - 18}">{foot}</text>',
            "</svg>\n",
        ]
    )


def _labels(case: Figures) -> tuple[str, str]:
    ours = f"mlxcache {case.ours:,} of {case.prompt:,}, {case.our_time}"
    return ours, f"mlx_lm.server {case.theirs:,}, {case.their_time}"


def _case(y: int, name: str, case: Figures) -> list[str]:
    ours, theirs = _labels(case)
    return [
        f'  <text x="{LEFT}" y="{y + 14}">{escape(name)}</text>',
        *_bar(y + 20, "ours", case.ours, case.prompt, ours),
        *_bar(y + 40, "theirs", case.theirs, case.prompt, theirs),
    ]


def _bar(y: int, kind: str, fed: int, prompt: int, label: str) -> list[str]:
    width = max(2.0, BAR * min(1.0, fed / prompt))
    return [
        f'  <rect class="track" x="{LEFT}" y="{y}" width="{BAR}" height="16" rx="3"/>',
        f'  <rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="16" rx="3"/>',
        f'  <text x="{LEFT + BAR + 12}" y="{y + 12}">{label}</text>',
    ]


if __name__ == "__main__":
    page, picture = map(Path, sys.argv[1:] or (DOCS / "benchmarks.md", DOCS / "images" / "fed.svg"))
    picture.write_text(chart(page.read_text(encoding="utf-8")), encoding="utf-8")
