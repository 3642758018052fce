"""One server from its start to its end: what faults it was given, and what it may say of them."""

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
from tests.soak.ledger import Ledger, Overshoot, Sessions
from tests.soak.wire import Outcome

START_S = 240.0
WATCH_S = 0.25
LISTED = 24
"""Sessions, those used last, that are looked at each time."""

WORDS = {
    "nan": "no numbers",
    "malloc": "Unable to allocate",
    "template": "no such macro",
    "tokenizer": "no such byte",
    "die": "MLX thread died",
    "remove": "vanished",
}
"""What a server says of a fault to whoever met it."""

ROOM, ROOM_SHARE = 96 << 20, 0.05
"""What a process may take beyond weights, budget and its start, or of them where that is more."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What a server is started with."""

    ram: str
    disk: str = "8GB"
    concurrency: int = 8
    chunk: int = 256

    def arguments(self) -> tuple[str, ...]:
        """As `mlxcache serve` takes them."""
        return (
            "--ram", self.ram, "--disk", self.disk, "--concurrency", str(self.concurrency),
            "--prefill-chunk", str(self.chunk),
        )  # fmt: skip


def launch(name: str, faults: Path, cache_dir: Path, flags: Flags) -> Launch:
    """A server with the layer of faults in it."""
    command = (sys.executable, "-m", "tests.faulty", str(faults), "serve", "--model", "{model}")
    where = ("--port", "{port}", "--cache-dir", str(cache_dir), "--log-level", "warning")
    return Launch(name, command + where + flags.arguments())


@dataclass(slots=True)
class Figures:
    """The most that a server said of itself, in bytes."""

    limit: int = 0
    high_water: int = 0
    taken: int = 0
    disk: int = 0
    looks: int = 0


class Life:
    """A running server. `ending`: it is being ended, so that whoever is connected is cut off.

    `upset`: faults that it was given, by name. `folder` has its cache, `logs` what it prints.
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
        self.upset: set[str] = set()
        self.ending = False
        self.figures = Figures()
        self.stack = contextlib.ExitStack()
        self.server: Server | None = None
        self._over = threading.Event()

    def start(self, ledger: Ledger, sessions: Sessions) -> None:
        """Start it and watch it. Raises NotStarted."""
        what = launch(self.name, self.faults.folder, self.folder, self.flags)
        self.server = self.stack.enter_context(running(what, self._model, self.logs, START_S))
        ledger.count(ledger.ends, "starts")
        self._base = self._idle()
        thread = threading.Thread(target=self._watch, args=(sessions,), daemon=True)
        thread.start()

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.client.port

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises Refused."""
        assert self.server is not None
        return self.server.client.get(path)

    def _idle(self) -> int:
        """What the process took when it was ready, less what MLX held then."""
        assert self.server is not None
        mlx = self.get("/v1/cache")["mlx"]
        return self.server.idle_bytes - int(mlx["active_bytes"]) - int(mlx["pool_bytes"])

    def _watch(self, sessions: Sessions) -> None:
        while not self._over.wait(WATCH_S):
            cleared = sessions.cleared
            listed = wire.call(self.port, "GET", f"/v1/sessions?limit={LISTED}")
            if listed.status == 200:
                sessions.take(json.loads(listed.body)["data"], cleared)
            found = wire.call(self.port, "GET", "/v1/cache")
            if found.status == 200:
                self._note(json.loads(found.body))

    def _note(self, cache: dict[str, Any]) -> None:
        figures, ram = self.figures, cache["ram"]
        taken = ram["used_bytes"] + cache["active_bytes"] + cache["reserved_bytes"]
        figures.looks += 1
        figures.limit = ram["limit_bytes"]
        figures.high_water = max(figures.high_water, ram["high_water_bytes"])
        figures.taken = max(figures.taken, taken)
        figures.disk = max(figures.disk, cache["disk"]["used_bytes"])

    def put(self, name: str, measure: str = "") -> None:
        """Turn a fault on."""
        self.upset.add(name)
        self.faults.put(name, measure)

    def permits(self, out: Outcome) -> bool:
        """Whether what came of a request is what a client of such a server has to expect."""
        if out.hang:
            return False
        if out.status == 0:
            return self.ending
        if out.status in (429, 503):
            return out.retry_after is not None or "table of sessions" in out.error
        if any(name in self.upset and words in out.error for name, words in WORDS.items()):
            return True
        return self.ending and ("stopping" in out.error or "died" in out.error)

    def overshoot(self) -> Overshoot:
        """By what the operating system says that the process takes."""
        assert self.server is not None
        weights = self.server.weights_bytes
        allowed = self.figures.limit + weights
        over = self.server.peak_bytes - self._base - allowed
        return Overshoot(over, over / allowed, f"{self.name} --ram {self.flags.ram}")

    def unwatch(self) -> None:
        """Look no more."""
        self._over.set()

    def end(self) -> None:
        """See to the end of the process."""
        self.ending = True
        self.unwatch()
        self.stack.close()

    def log(self) -> Path:
        """What it prints."""
        return self.logs / f"{self.name}-{self.port}.log"

    def tracebacks(self) -> int:
        """Errors with a traceback in what it logged."""
        return self.log().read_text("utf-8", "replace").count("Traceback (most recent call last)")


@dataclass(slots=True)
class Rest:
    """What a server held when nothing ran, `at` seconds since the run began."""

    at: float
    nbytes: int
    files: int
    threads: int


@dataclass(slots=True)
class Steady:
    """A server that lives as long as the run, and what it held after each of its rounds."""

    life: Life
    rests: list[Rest] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
