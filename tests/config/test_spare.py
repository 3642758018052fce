"""What the C library keeps for later goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlxcache.config import spare

HOLES = """
import ctypes
from mlxcache.config import spare
from mlxcache.config.footprint import footprint

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
held = [libc.malloc(8192) for _ in range(8192)]
for one in held:
    ctypes.memset(one, 1, 8192)
for one in held[:-1]:
    libc.free(one)
before = footprint()
assert spare.give_back()
print(before - footprint())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or spare._call() is None, reason="how much goes is told of glibc alone"
)
def test_free_pages_below_one_in_use_go_back() -> None:
    """64 MB of them, which a library keeps since the last one is not free."""
    command = [sys.executable, "-c", HOLES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 48 << 20


def test_a_library_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str | None) -> object:
        return object()

    spare._call.cache_clear()
    monkeypatch.setattr(spare.ctypes, "CDLL", none)
    try:
        assert not spare.give_back()
    finally:
        spare._call.cache_clear()
