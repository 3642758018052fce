"""Check that a Mac is kept awake while a request runs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

from mlxcache.bench.client import Refused
from mlxcache.bench.prove.context import Context, NotApplicable

CAFFEINATE = re.compile(r"pid (\d+)\(caffeinate\)")
POLL_S = 0.1
PATIENCE_S = 90.0
"""Maximum seconds for which sleep may still be prevented after a request. The server waits a while
for the next request before it allows sleep."""

PROMPT_TOKENS, REPLY_TOKENS = 2_000, 512


class NotHeld(Exception):
    """Error raised if the Mac could sleep during a request, or was kept awake after it.

    It is also raised if `pmset` fails, so that this cannot be found out.
    """


def awake(context: Context) -> None:
    """Check that mlxcache's `caffeinate` prevents sleep during a request, and ends afterwards.

    Starts a server, which runs `caffeinate`, and sends it one request. Blocks. Raises NotApplicable
    on systems other than macOS, NotHeld if the check fails, and Refused if the request fails.
    Source: man pmset, man caffeinate.
    """
    if sys.platform != "darwin":
        raise NotApplicable("only macOS puts a machine to sleep during unattended work")
    with context.serving() as lives:
        client = lives.server.client
        before = asserting()
        text = context.filler.text(PROMPT_TOKENS, "awake")
        failed: list[Refused] = []

        def ask() -> None:
            try:
                client.chat([{"role": "user", "content": text}], REPLY_TOKENS)
            except Refused as refused:
                failed.append(refused)

        request = threading.Thread(target=ask, daemon=True)
        request.start()
        held: set[int] = set()
        while request.is_alive() and not held:
            held = asserting() - before
            time.sleep(POLL_S)
        request.join()
        if failed:
            raise failed[0]
        if not held:
            raise NotHeld("`pmset -g assertions` showed no caffeinate while a request ran")
        _await_end(held)
    context.found.notes.append(
        "caffeinate held an assertion while a request ran, and ended after it"
    )


def _await_end(held: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while asserting() & held:
        if time.monotonic() > deadline:
            raise NotHeld(f"the assertion was still held {PATIENCE_S:.0f} s after the request")
        time.sleep(POLL_S)


def asserting() -> set[int]:
    """Return the ids of the `caffeinate` processes that prevent sleep now, as pmset lists them.

    Raises OSError if pmset cannot be run, and NotHeld if pmset fails.
    """
    done = subprocess.run(
        ["pmset", "-g", "assertions"], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise NotHeld(f"`pmset -g assertions` ended with status {done.returncode}")
    return {int(found) for found in CAFFEINATE.findall(done.stdout)}
