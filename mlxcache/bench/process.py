"""Servers as child processes: start, readiness, memory samples, end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from mlxcache.bench.client import Client, Refused
from mlxcache.config.memory import read_footprint
from mlxcache.kernels import kernel_variables

SAMPLE_S = 0.05
END_S = 10.0
TIMEOUT_S = 600.0
OURS, THEIRS = "mlxcache", "mlx_lm.server"


class NotStarted(Exception):
    """Error raised if a server cannot be started, ends early, or does not answer in time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Command that starts a server, with {model} and {port} for the model's folder and the port.

    A `foreign` program has a Python environment of its own: it does not inherit PYTHONPATH and
    VIRTUAL_ENV. LD_PRELOAD is always inherited.
    """

    name: str
    command: tuple[str, ...]
    foreign: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def filled(self, model: str, port: int) -> list[str]:
        return [
            part.replace("{model}", model).replace("{port}", str(port)) for part in self.command
        ]


def ours(cache_dir: Path, *extra: str) -> Launch:
    """Return how to start `mlxcache serve` with this Python; `extra` are further arguments."""
    command = (sys.executable, "-m", "mlxcache.cli.main", "serve", "--model", "{model}")
    where = ("--port", "{port}", "--cache-dir", str(cache_dir), "--log-level", "warning")
    return Launch(OURS, command + where + extra)


def mlx_lm_server() -> Launch:
    command = (sys.executable, "-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}")
    return Launch(THEIRS, (*command, "--log-level", "WARNING"))


def parse_against(text: str) -> Launch:
    """Return the server that NAME=COMMAND describes. Raises ValueError."""
    name, equals, command = text.partition("=")
    if not (name and equals and "{model}" in command and "{port}" in command):
        raise ValueError(
            f"--against must be NAME='COMMAND' with {{model}} and {{port}} in COMMAND: {text}"
        )
    return Launch(name.strip(), tuple(shlex.split(command)), foreign=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server as a child process, begun when `client` is first used, and again after a kill.

    Its model and cache folder stay the same, its port does not. `wait_s`: the time that a start may
    take; `timeout`: that of the client. Output goes to files in the folder `logs`. `idle_bytes` and
    `peak_bytes`: memory of the process and its children after the last start, and at most since.
    It ends with the block of a `with` statement.
    """

    def __init__(
        self, launch: Launch, model: Path, logs: Path, wait_s: float, timeout: float = TIMEOUT_S
    ):
        self.name = launch.name
        self.idle_bytes = self.peak_bytes = 0
        self._launch, self._model, self._logs = launch, model, logs
        self._wait_s, self._timeout = wait_s, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._client = Client(0, str(model))
        self._tree: list[psutil.Process] = []
        self._over = threading.Event()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def client(self) -> Client:
        """A client of the running server, started if none is running. Raises NotStarted."""
        if self._process is None:
            self.start()
        return self._client

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it has answered /health or /v1/models, and one chat request.

        Raises NotStarted.
        """
        port = free_port()
        log = self._logs / f"{self.name.replace('/', '_')}-{port}.log"
        self._process = self._begun(port, log)
        self._client = Client(port, str(self._model), self._timeout)
        try:
            self._await(log)
        except BaseException:
            self.end()
            raise
        self._tree = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        self.idle_bytes, self.peak_bytes, self._over = self.resident(), 0, threading.Event()
        threading.Thread(target=self._sample, args=(self._over,), daemon=True).start()

    def _begun(self, port: int, log: Path) -> subprocess.Popen[bytes]:
        launch = self._launch
        env = {**os.environ, **kernel_variables(), **launch.variables}
        if launch.foreign:
            env.pop("PYTHONPATH", None)
            env.pop("VIRTUAL_ENV", None)
        command = launch.filled(str(self._model), port)
        try:
            with log.open("wb") as output:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, env=env,
                )  # fmt: skip
        except OSError as error:
            raise NotStarted(f"{launch.name}: {error}") from error

    def _await(self, log: Path) -> None:
        quick, patient = (replace(self._client, timeout=one) for one in (5.0, self._wait_s))
        asked = "neither /v1/models nor /health answers"
        deadline = time.monotonic() + self._wait_s
        while self.alive() and time.monotonic() < deadline:
            try:
                if _answers(quick, "/health") or _answers(quick, "/v1/models"):
                    patient.chat([{"role": "user", "content": "hello"}], 4)
                    return
            except Refused as refused:
                asked = f"its first chat failed, {refused}"
            time.sleep(0.1)
        why = asked if self.alive() else "it ended"
        raise NotStarted(
            f"{self.name} did not start within {self._wait_s:.0f} s: {why}\n{tail(log)}"
        )

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def resident(self) -> int:
        return sum(read_footprint(process.pid) for process in self._tree)

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._model.glob("*.safetensors"))

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, self.resident())

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None if `seconds` pass before the end."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL, and wait for the server's end."""
        self._end((signal.SIGKILL,))

    def end(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after the server's end or 10 s."""
        self._end((signal.SIGTERM, signal.SIGKILL))

    def stop(self, seconds: float) -> None:
        """Stop the server, so that it finishes pending writes; kill it after `seconds`."""
        if self._process is not None:
            self.signal(signal.SIGTERM)
            self.wait(seconds)
            self.kill()

    def kill_starting(self, seconds: float) -> None:
        self._process = self._begun(free_port(), self._logs / f"{self.name}-starting.log")
        time.sleep(seconds)
        self.kill()

    def _end(self, signals: Sequence[int]) -> None:
        self._over.set()
        process, self._process = self._process, None
        if process is None:
            return
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def _answers(client: Client, path: str) -> bool:
    try:
        client.get(path)
    except Refused:
        return False
    return True


@contextlib.contextmanager
def running(launch: Launch, model: Path, logs: Path, wait_s: float) -> Iterator[Server]:
    """Yield a server that has started, and ends with the block. Raises NotStarted."""
    with Server(launch, model, logs, wait_s) as server:
        server.start()
        yield server


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
