"""Stopping while the engine loads, and with an engine that hangs."""

import asyncio
import subprocess
import sys
import time
from typing import Any, cast

from mlxcache.cli.server import _load


class Slow:
    """An engine that never finishes loading."""

    def __init__(self) -> None:
        self.cancelled = False

    async def start(self) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_a_stop_while_loading_takes_effect_at_once():
    """A download is not waited for."""
    engine, stop = Slow(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(2):
        assert await _load(cast(Any, engine), stop) is False
    await asyncio.sleep(0)
    assert engine.cancelled


HANGING = """
import asyncio, threading
from mlxcache.cli import main
from mlxcache.engine.models import Models

async def stop(self, seconds):
    await asyncio.sleep(HOW_LONG)

Models.stop = stop
threading.Thread(target=threading.Event().wait).start()
main.main()
"""
"""A server whose engines take long to end, and leave a thread that never ends."""


def hanging(seconds: float) -> subprocess.Popen[str]:
    code = HANGING.replace("HOW_LONG", str(seconds))
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    read_until(process, "Ctrl-C stops")
    process.terminate()
    read_until(process, "Stopping")
    return process


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def test_a_second_signal_exits_at_once():
    process = hanging(3600)
    began = time.monotonic()
    process.terminate()
    assert process.wait(60) == 1
    assert time.monotonic() - began < 30  # the stop itself takes an hour


def test_a_thread_that_cannot_be_interrupted_does_not_delay_the_end():
    """Downloads run in such threads."""
    assert hanging(0).wait(10) == 0


def test_mlx_lm_lowers_no_limit_of_open_files() -> None:
    """It would, as it is imported, and for good: then a server could not have 16,384."""
    code = (
        "import resource\n"
        "from mlxcache.cli.serve import _kept_descriptor_limit\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "with _kept_descriptor_limit():\n"
        "    import mlx_lm.utils\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == before, before)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines[0].startswith("True")
    assert lines[1] == "300"
