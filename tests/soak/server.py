"""One server of a run: its process, the faults injected into it, and its peak figures."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxcache.bench.process import Launch, Server, running
from tests.faulty import Faults
from tests.soak import wire
from tests.soak.ledger import Ledger, Overshoot, SessionTracker
from tests.soak.wire import Outcome

START_S = 240.0
POLL_S = 0.25
LISTED = 24
"""Number of recently used sessions listed on each poll."""

WORDS = {
    "nan": "produced NaN",
    "malloc": "Unable to allocate",
    "template": "no such macro",
    "tokenizer": "no such byte",
    "die": "MLX thread failed",
    "remove": "was removed",
}
"""Text in the error of a request that met a fault, by the name of the fault."""

SLACK_BYTES, SLACK_SHARE = 160 << 20, 0.05
"""Memory allowed beyond weights, budget and the idle process: the larger of bytes and share.

Mostly unused parts of the heap.
"""


@dataclass(frozen=True, slots=True)
class Flags:
    ram: str
    disk: str = "8GB"
    concurrency: int = 8
    chunk: int = 256

    def arguments(self) -> tuple[str, ...]:
        return (
            "--ram", self.ram, "--disk", self.disk, "--concurrency", str(self.concurrency),
            "--prefill-chunk", str(self.chunk),
        )  # fmt: skip


def launch(name: str, faults: Path, cache_dir: Path, flags: Flags) -> Launch:
    command = (sys.executable, "-m", "tests.faulty", str(faults), "serve", "--model", "{model}")
    where = ("--port", "{port}", "--cache-dir", str(cache_dir), "--log-level", "warning")
    return Launch(name, command + where + flags.arguments())


@dataclass(slots=True)
class PeakFigures:
    """Peaks of the figures that a server reported, in bytes; `polls` counts the reports."""

    limit: int = 0
    high_water: int = 0
    taken: int = 0
    disk: int = 0
    polls: int = 0

    def update(self, cache: dict[str, Any]) -> None:
        ram = cache["ram"]
        taken = ram["used_bytes"] + cache["active_bytes"] + cache["reserved_bytes"]
        self.polls += 1
        self.limit = ram["limit_bytes"]
        self.high_water = max(self.high_water, ram["high_water_bytes"])
        self.taken = max(self.taken, taken)
        self.disk = max(self.disk, cache["disk"]["used_bytes"])


class SoakServer:
    """A server in a process of its own, with fault injection.

    `folder`: its cache folder. `logs`: folder of its log. `injected`: names of the faults it was
    given. `ending`: True once its end was requested, after which connections may be cut off.
    """

    def __init__(
        self, name: str, family: str, flags: Flags, *, model: Path, folder: Path, logs: Path
    ):
        self.name, self.family, self.flags = name, family, flags
        self.folder, self.logs = folder, logs
        self._model = model
        self.faults = Faults(logs / f"{name}-faults")
        self.faults.folder.mkdir(parents=True, exist_ok=True)
        for left in self.faults.folder.iterdir():
            left.unlink()
        self.injected: set[str] = set()
        self.ending = False
        self.figures = PeakFigures()
        self.stack = contextlib.ExitStack()
        self.process: Server | None = None
        self.port = 0
        self._over = threading.Event()
        self._base = 0

    def start(self, ledger: Ledger, sessions: SessionTracker) -> None:
        """Start the process and poll its figures in a thread. Raises NotStarted."""
        what = launch(self.name, self.faults.folder, self.folder, self.flags)
        self.process = self.stack.enter_context(running(what, self._model, self.logs, START_S))
        self.port = self.process.client.port
        ledger.count(ledger.ends, "starts")
        self._base = self._idle()
        thread = threading.Thread(target=self._poll, args=(sessions,), daemon=True)
        thread.start()

    def _idle(self) -> int:
        assert self.process is not None
        mlx = self.process.client.get("/v1/cache")["mlx"]
        return self.process.idle_bytes - int(mlx["active_bytes"]) - int(mlx["pool_bytes"])

    def _poll(self, sessions: SessionTracker) -> None:
        while not self._over.wait(POLL_S):
            cleared = sessions.cleared
            listed = wire.call(self.port, "GET", f"/v1/sessions?limit={LISTED}")
            if listed.status == 200:
                sessions.observe(json.loads(listed.body)["data"], cleared)
            found = wire.call(self.port, "GET", "/v1/cache")
            if found.status == 200:
                self.figures.update(json.loads(found.body))

    def put(self, name: str, measure: str = "") -> None:
        self.note_fault(name)
        self.faults.put(name, measure)

    def note_fault(self, *names: str) -> None:
        """Record faults that were injected from outside: by a signal, or into the files."""
        self.injected.update(names)

    def expect_end(self) -> None:
        """Note that the process ends on purpose from now on, and stop polling it."""
        self.ending = True
        self._over.set()

    def permits(self, out: Outcome) -> bool:
        """Return True if the outcome is allowed, given the injected faults and the server's end."""
        if out.timed_out:
            return False
        if out.status == 0:
            return self.ending
        if out.status in (429, 503):
            return out.retry_after is not None or "table of sessions" in out.error
        if any(name in self.injected and words in out.error for name, words in WORDS.items()):
            return True
        return self.ending and ("stopping" in out.error or "died" in out.error)

    def overshoot(self) -> Overshoot:
        assert self.process is not None
        weights = self.process.weights_bytes
        allowed = self.figures.limit + weights
        over = self.process.peak_bytes - self._base - allowed
        return Overshoot(over, over / allowed, f"{self.name} --ram {self.flags.ram}")

    def close(self) -> None:
        self.expect_end()
        self.stack.close()

    def log(self) -> Path:
        return self.logs / f"{self.name}-{self.port}.log"

    def tracebacks(self) -> int:
        return self.log().read_text("utf-8", "replace").count("Traceback (most recent call last)")


@dataclass(slots=True)
class IdleUsage:
    """Resources held by an idle server, `at` seconds after the start of the run."""

    at: float
    nbytes: int
    files: int
    threads: int


@dataclass(slots=True)
class SteadyServer:
    """A server that runs until the end of the run, and what it held when idle after each round."""

    server: SoakServer
    rests: list[IdleUsage] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
