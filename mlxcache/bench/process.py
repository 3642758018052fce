"""Servers and other programs as child processes: start, readiness, memory samples, end."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from mlxcache.bench.client import Client, Refused
from mlxcache.config.memory import read_footprint
from mlxcache.kernels import kernel_variables

SAMPLE_S = 0.05
END_S = 10.0
OURS, THEIRS = "mlxcache", "mlx_lm.server"


class NotStarted(Exception):
    """Error raised if a server cannot be started, ends early, or does not answer in time.

    If it was started, the text of the error has the last lines of its output.
    """


@dataclass(frozen=True, slots=True)
class Launch:
    """Command that starts a server, and the server's `name`.

    {model} and {port} in the command stand for the model's folder and the port to serve on; see
    `filled`. A `foreign` program has a Python environment of its own: it does not inherit
    PYTHONPATH and VIRTUAL_ENV. LD_PRELOAD is always inherited. `variables` are set for the program
    besides those that it inherits.
    """

    name: str
    command: tuple[str, ...]
    foreign: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def filled(self, model: str, port: int) -> list[str]:
        """Return the command line, with {model} and {port} replaced by `model` and `port`."""
        return [
            part.replace("{model}", model).replace("{port}", str(port)) for part in self.command
        ]


def ours(cache_dir: Path, *extra: str) -> Launch:
    """Return how to start `mlxcache serve` with this Python and the cache folder `cache_dir`.

    `extra` are further arguments of `serve`.
    """
    command = (sys.executable, "-m", "mlxcache.cli.main", "serve", "--model", "{model}")
    where = ("--port", "{port}", "--cache-dir", str(cache_dir), "--log-level", "warning")
    return Launch(OURS, command + where + extra)


def mlx_lm_server() -> Launch:
    """Return how to start mlx_lm.server with its defaults."""
    command = (sys.executable, "-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}")
    return Launch(THEIRS, (*command, "--log-level", "WARNING"))


def parse_against(text: str) -> Launch:
    """Return how to start the server that `text`, in the form NAME=COMMAND, describes.

    Raises ValueError if NAME is missing, or if COMMAND does not contain {model} and {port}.
    """
    name, equals, command = text.partition("=")
    if not (name and equals and "{model}" in command and "{port}" in command):
        raise ValueError(
            f"--against must be NAME='COMMAND' with {{model}} and {{port}} in COMMAND: {text}"
        )
    return Launch(name.strip(), tuple(shlex.split(command)), foreign=True)


def free_port() -> int:
    """Return a port of this machine on which no program is listening."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server and its memory use.

    `idle_bytes` is the memory when `watch` is called, and `peak_bytes` the maximum after that; both
    are 0 before. Memory, in bytes, includes child processes. It is the footprint on a Mac, and the
    resident memory elsewhere (`read_footprint`).
    """

    def __init__(
        self, launch: Launch, process: subprocess.Popen[bytes], client: Client, model: str = ""
    ):
        self._model = model
        self.name = launch.name
        self.client = client
        self.idle_bytes = 0
        self.peak_bytes = 0
        self._process = process
        self._tree = [psutil.Process(process.pid)]
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the server, not of its children."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send the signal `number` to the server's process, if that is still running."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the process to end; return its exit status, or None if `seconds` pass before."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def watch(self) -> None:
        """Set `idle_bytes` to the memory used now, and begin to measure `peak_bytes`.

        A thread measures every `SAMPLE_S` seconds until `kill` or `end` is called.
        """
        self._tree += self._tree[0].children(recursive=True)
        self.idle_bytes = self.resident()
        self._sampler.start()

    def resident(self) -> int:
        """Return the memory in use by the server and its children, in bytes; 0 if it has ended."""
        return sum(read_footprint(process.pid) for process in self._tree)

    @property
    def weights_bytes(self) -> int:
        """Total size of the model's weight files, in bytes."""
        return sum(file.stat().st_size for file in Path(self._model).glob("*.safetensors"))

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, self.resident())

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL, and wait for the server's end."""
        self._over.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """End the whole process group. Blocks.

        All its processes get SIGTERM, then SIGKILL when the server has ended or 10 s have passed.
        """
        self._over.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)


class Lives:
    """A server that can be killed and started again with the same model and cache folder.

    It is started when `server` is used and none is running. Each start uses a new port. `server`
    raises NotStarted if the server does not start.
    """

    def __init__(self, launch: Launch, model: Path, logs: Path, wait_s: float):
        self.name = launch.name
        self._start = (launch, model, logs, wait_s)
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        """The running server, started if none is running."""
        if self._server is None:
            self._server = self._stack.enter_context(running(*self._start))
        return self._server

    def kill(self) -> None:
        """Kill the running server with SIGKILL. The next use of `server` starts another one."""
        if self._server is not None:
            self._server.kill()
            self.end()

    def stop(self, seconds: float) -> None:
        """Stop the running server, if any, by SIGTERM, so that it finishes pending writes.

        It is killed if it still runs after `seconds`. Blocks.
        """
        if self._server is not None:
            self._server.signal(signal.SIGTERM)
            if self._server.wait(seconds) is None:
                self._server.kill()
            self.end()

    def kill_starting(self, seconds: float) -> None:
        """Start a server and kill it after `seconds`, ready or not. Blocks.

        Raises NotStarted if the command cannot be run.
        """
        launch, model, logs, _ = self._start
        with (logs / f"{self.name}-starting.log").open("wb") as output:
            server = _begun(launch, str(model), free_port(), output)
        time.sleep(seconds)
        server.kill()

    def end(self) -> None:
        """End the running server, if there is one, as `Server.end` does."""
        self._server = None
        self._stack.close()


@contextlib.contextmanager
def running(launch: Launch, model: Path, logs: Path, wait_s: float) -> Iterator[Server]:
    """Yield a running server, which ends with the block. Raises NotStarted.

    The server is ready when it has answered /v1/models or /health, and then one chat request.
    `wait_s`: maximum seconds until it answers, and again for the chat. `model`: the model's folder.
    The server's output goes to a file in the folder `logs`.
    """
    port = free_port()
    log = logs / f"{launch.name.replace('/', '_')}-{port}.log"
    with log.open("wb") as output:
        server = _begun(launch, str(model), port, output)
    try:
        _await(server, wait_s, log)
        server.watch()
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def program(
    command: Sequence[str], log: Path, *, stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """Yield a running program, whose process group is killed at the end of the block.

    Its standard output is a pipe of text, and its standard error goes to the file `log`. `stdin` is
    as for `subprocess.Popen`.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        process.wait()


def run_to_end(command: Sequence[str], log: Path) -> tuple[int, list[str]]:
    """Run a program to its end; return its exit status and the lines that it printed. Blocks.

    Standard error goes to the file `log`. An exception raised while waiting kills the program.
    """
    with program(command, log) as process:
        printed, _ = process.communicate()
    return process.returncode, printed.strip().splitlines()


def _begun(launch: Launch, model: str, port: int, output: IO[bytes]) -> Server:
    env = {**os.environ, **kernel_variables(), **launch.variables}
    if launch.foreign:
        env.pop("PYTHONPATH", None)
        env.pop("VIRTUAL_ENV", None)
    try:
        process = subprocess.Popen(
            launch.filled(model, port), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, env=env,
        )  # fmt: skip
    except OSError as error:
        raise NotStarted(f"{launch.name}: {error}") from error
    return Server(launch, process, Client(port, model), model)


def _await(server: Server, wait_s: float, log: Path) -> None:
    quick = Client(server.client.port, server.client.model, timeout=5.0)
    patient = Client(server.client.port, server.client.model, timeout=wait_s)
    asked = "neither /v1/models nor /health answers"
    deadline = time.monotonic() + wait_s
    while server.alive() and time.monotonic() < deadline:
        try:
            if _well(quick, ("/v1/models", "/health")):
                patient.chat([{"role": "user", "content": "hello"}], 4)
                return
        except Refused as refused:
            asked = f"its first chat failed, {refused}"
        time.sleep(0.1)
    why = asked if server.alive() else "it ended"
    raise NotStarted(f"{server.name} did not start within {wait_s:.0f} s: {why}\n{tail(log)}")


def _well(client: Client, paths: Sequence[str]) -> bool:
    for path in paths:
        with contextlib.suppress(Refused):
            client.get(path)
            return True
    return False


def tail(log: Path, lines: int = 25) -> str:
    """Return the last `lines` of a log file as text."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
