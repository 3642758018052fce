"""Memory and bytes read of a server, as the operating system counts them, many times a second."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mlxcache.config.memory import read_footprint

SAMPLE_S = 0.02


@dataclass(slots=True)
class Count:
    """Samples of one process: times, in seconds of `time.perf_counter`, and bytes.

    `footprints`: as `read_footprint`. `reads`: bytes that the process has read from files so far;
    empty on systems that do not count them for each process.
    """

    times: list[float] = field(default_factory=list)
    footprints: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        return max(self.footprints, default=0)

    @property
    def per_second(self) -> float:
        span = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return (len(self.times) - 1) / span if span else 0.0

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)

    def read_between(self, began: float, ended: float) -> int | None:
        """Return the bytes read between two times, None if they are not known."""
        first, last = bisect_left(self.times, began), bisect_right(self.times, ended) - 1
        if last >= len(self.reads) or last <= first:
            return None
        return self.reads[last] - self.reads[first]


@contextlib.contextmanager
def counting(pid: int) -> Iterator[Count]:
    """Sample process `pid` every 20 ms while the block lasts."""
    count, process = Count(), psutil.Process(pid)

    def look() -> None:
        count.footprints.append(read_footprint(pid))
        if (read := _read_bytes(process)) is not None:
            count.reads.append(read)
        count.times.append(time.perf_counter())

    with sampling(look, SAMPLE_S):
        yield count


@contextlib.contextmanager
def sampling(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `look` in a thread every so many seconds while the block lasts."""
    over = threading.Event()

    def loop() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_peak(pid: int) -> int | None:
    """Return the largest resident bytes that a process has ever had; None except on Linux.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_status.5.html
    """
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _read_bytes(process: psutil.Process) -> int | None:
    """Return the bytes that a process has read by system calls, from the page cache too."""
    counters = getattr(process, "io_counters", None)  # a Mac has none
    return int(counters().read_chars) if counters is not None else None
