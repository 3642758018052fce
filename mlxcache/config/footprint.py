"""What a process takes of the machine's memory, as its operating system counts it."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Callable

import psutil

_PHYS_FOOTPRINT = 72
"""Where `ri_phys_footprint` is in `struct rusage_info_v0`: behind a UUID and seven counts.
Source: https://github.com/apple-oss-distributions/xnu/blob/main/bsd/sys/resource.h
"""

_INFO_BYTES = 96


def footprint(pid: int | None = None) -> int:
    """Bytes that process `pid`, or this one, takes; 0 where it is gone or not ours to ask about.

    On a Mac the physical footprint, which is what Activity Monitor shows and what the system
    holds against a process: it counts what Metal holds for it. Elsewhere what is resident.
    """
    pid = os.getpid() if pid is None else pid
    if sys.platform == "darwin":
        found = physical_footprint(pid)
        if found is not None:
            return found
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def physical_footprint(
    pid: int, ask: Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None = None
) -> int | None:
    """`ri_phys_footprint` of a process on a Mac, in bytes; None where it is not told.

    `ask` is `proc_pid_rusage`: a pid, the flavour 0, and a buffer to fill.
    """
    ask = ask or _proc_pid_rusage()
    buffer = ctypes.create_string_buffer(_INFO_BYTES)
    if ask is None or ask(pid, 0, buffer) != 0:
        return None
    found = int.from_bytes(buffer.raw[_PHYS_FOOTPRINT : _PHYS_FOOTPRINT + 8], sys.byteorder)
    return found or None


def _proc_pid_rusage() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    try:
        return ctypes.CDLL(ctypes.util.find_library("proc") or "libproc.dylib").proc_pid_rusage
    except (OSError, AttributeError):
        return None
