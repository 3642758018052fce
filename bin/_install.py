"""Run `pip install ARGS` and show its progress on standard error.

On a terminal the progress is one line that is rewritten in place. Otherwise a line is printed every
ten seconds. If pip fails, the end of its output is printed. The exit status is pip's.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pip

SITE = Path(sysconfig.get_path("purelib"))
TICK_S = 0.5
REPORT_S = 10.0
TAIL_LINES = 25
RAW_SINCE = (24, 1)
"""The first version of pip that prints its progress in lines."""

STEPS = (
    (r"Collecting ([\w.-]+).*", r"looking for \1"),
    (r"Downloading ([\w.]+?)-\d[^ ]* \((.*)\)", r"downloading \1 (\2)"),
    (r"Using cached ([\w.]+?)-\d.*", r"reading \1 from pip's cache"),
    (r"Building .*|Preparing .*|Installing build .*|Getting requirements .*", "preparing mlxcache"),
    (r"WARNING: Retrying .*", "no answer from the package index; trying again"),
)
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def main(arguments: list[str]) -> int:
    """Run pip with `arguments` and return its exit status."""
    began, words = time.monotonic(), [sys.executable, "-m", "pip", "install", *arguments]
    if tuple(int(one) for one in re.findall(r"\d+", pip.__version__)[:2]) >= RAW_SINCE:
        words.append("--progress-bar=raw")
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    said: list[str] = []
    shown = Shown()
    step, part = "asking the package index", ""
    total = before = 0
    try:
        for line in lines(process):
            done = PROGRESS.fullmatch(line)
            if done:
                part = f", {int(done[1]) * 100 // max(1, int(done[2]))}%" if int(done[2]) else ""
            elif line.startswith("Installing collected packages:"):
                total, before, part = line.count(",") + 1, count_installed(), ""
            elif line:
                said.append(line)
                found = describe(line)
                step, part = (found, "") if found else (step, part)
            if total:
                step = f"installed {max(0, count_installed() - before)} of {total} packages"
            shown.show(f"{step}{part}, {time.monotonic() - began:.0f} s")
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        shown.end()
    status = process.wait()
    if status:
        print("\n".join(said[-TAIL_LINES:]), file=sys.stderr)
        print(f"pip ended with status {status}: the reason is above.", file=sys.stderr)
    return status


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the output lines of a process, and an empty line after each `TICK_S` without one."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.put(line.strip())
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = found.get(timeout=TICK_S)
        except queue.Empty:
            line = ""
        if line is None:
            return
        yield line


def count_installed() -> int:
    return sum(1 for _ in SITE.glob("*.dist-info"))


def describe(line: str) -> str | None:
    """Return what pip is doing, according to a line of its output; None if unknown."""
    for pattern, words in STEPS:
        if found := re.fullmatch(pattern, line):
            return found.expand(words)
    return None


class Shown:
    """Progress line on standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._text, self._at = "", time.monotonic()

    def show(self, text: str) -> None:
        """Show `text` as the progress.

        On a terminal the line is rewritten. Otherwise a line is printed at most every `REPORT_S`
        seconds.
        """
        if self._terminal and text != self._text:
            self._text = text
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            print(f"\r\x1b[2K  {text}"[: width + 4], end="", file=sys.stderr, flush=True)
        elif not self._terminal and time.monotonic() - self._at >= REPORT_S:
            self._at = time.monotonic()
            print(f"  {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the progress line from the terminal."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # bin/_env.sh says what to do
