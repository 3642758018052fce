"""Draw the output of commands as SVG pictures for the documentation.

    bin/terminal-pictures [FOLDER]

The menu of `launch` and the result of `explain` are made from the code alone, and a test fails if
they are outdated. The picture of `top` needs a server, so bin/dashboard-picture draws it.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from typer.testing import CliRunner

from mlxcache.cli.launch.launching import GB, print_menu
from mlxcache.cli.main import app

FOLDER = Path(__file__).parents[1] / "docs" / "images"
COLUMNS = 84

THEME = TerminalTheme(
    (27, 30, 36),
    (217, 221, 228),
    [
        *((90, 96, 108), (240, 113, 104), (143, 200, 120), (229, 184, 98)),
        *((110, 168, 238), (198, 140, 224), (92, 196, 200), (217, 221, 228)),
    ],
)
"""Colours of the terminal: the background, the text, and eight colours."""

_FORMAT = """\
<svg viewBox="0 0 PICTURE" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-labelledby="title desc">
<title id="title">TITLE</title>
<desc id="desc">DESCRIPTION</desc>
<style>
.{unique_id}-matrix {{ \
font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
.frame {{ fill: #1b1e24; stroke: #d0d3da; }}
@media (prefers-color-scheme: dark) {{ .frame {{ stroke: #464c59; }} }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect class="frame" x="1" y="1" FRAME rx="8"/>
<g transform="translate(13, 11)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def to_svg(output: str, title: str, description: str) -> str:
    """Return an SVG picture of a terminal's output, which may have ANSI colours."""
    lines = [line.rstrip() for line in output.strip("\n").split("\n")]
    width = max(len(Text.from_ansi(line).plain) for line in lines)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    made = console.export_svg(theme=THEME, code_format=_FORMAT, unique_id="terminal")
    found = re.search(r'<rect x="0" y="0" width="([\d.]+)" height="([\d.]+)"/>', made)
    assert found
    wide, high = (round(float(size)) for size in found.groups())
    made = made.replace("PICTURE", f"{wide + 26} {high + 24}")
    made = made.replace("FRAME", f'width="{wide + 24}" height="{high + 22}"')
    made = made.replace("TITLE", escape(title)).replace("DESCRIPTION", escape(description))
    return re.sub(r"[ \t]+\n", "\n", made)


def menu() -> str:
    """Return the picture of the menu of `mlxcache launch`, on a Mac with two clients installed."""
    out = Console(
        file=io.StringIO(), force_terminal=True, width=COLUMNS, color_system="standard",
        highlight=False, markup=False, legacy_windows=False,
    )  # fmt: skip
    installed = {"claude": "/usr/local/bin/claude", "opencode": "/usr/local/bin/opencode"}
    model = "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"
    out.print(Text("$ mlxcache launch --model " + model, "dim"))
    print_menu(out, None, model, 262_144, which=installed.get, memory=64 * GB)
    assert isinstance(out.file, io.StringIO)
    return to_svg(
        out.file.getvalue(),
        "The menu of mlxcache launch",
        "The machine's memory and the model, then a line for each client: what it is good for, how "
        "long its first prompt is, and that all but two are not installed.",
    )


RULES = "\n".join(
    f"{number}. {rule}"
    for number, rule in enumerate(
        (
            "Read a file before you change it, and name the lines that you changed.",
            "Run the tests that cover a change, and show what failed.",
            "Ask before you delete anything that is not under version control.",
            "Prefer a small change that a reader can check to a large one.",
        )
        * 40,
        start=1,
    )
)


def explain() -> str:
    """Return the picture of the output of `mlxcache explain` for two turns on different days."""
    answer = "The test waits for a second that never comes. I made the clock a parameter."
    history = [
        {"role": "user", "content": "The login test fails one time in five. Find out why."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Write the test that shows it."},
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for day, turns in ((21, history[:1]), (22, history)):
            system = f"You are a coding agent. Today is 2026-11-{day}.\n{RULES}"
            messages = [{"role": "system", "content": system}, *turns]
            paths.append(Path(folder) / f"{day}.json")
            paths[-1].write_text(json.dumps({"messages": messages}))
        env = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(COLUMNS), "NO_COLOR": ""}
        done = CliRunner().invoke(app, ["explain", *map(str, paths)], env=env, color=True)
    assert done.exit_code == 0, done.output
    printed = "\x1b[2m$ mlxcache explain monday.json tuesday.json\x1b[0m\n" + done.stdout
    return to_svg(
        printed,
        "A result of mlxcache explain",
        "Two requests differ at the date in the system message. Both texts are shown, then the "
        "number of tokens that are computed again, and what to do.",
    )


PICTURES: dict[str, Callable[[], str]] = {"launch-menu.svg": menu, "explain.svg": explain}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
