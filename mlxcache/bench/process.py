"""Servers and other programs as child processes: start, readiness, memory samples, end."""

from __future__ import annotations

import contextlib
import json
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
from typing import IO

import psutil

from mlxcache.bench.client import Client, Refused
from mlxcache.bench.findings import NotApplicable
from mlxcache.config.memory import read_footprint
from mlxcache.kernels import kernel_variables

SAMPLE_S = 0.05
END_S = 10.0
TIMEOUT_S = 600.0
OURS, THEIRS = "mlxcache", "mlx_lm.server"


class NotStarted(Exception):
    """Error raised if a server cannot be started, ends early, or does not answer in time."""


class NoOwnTime(Exception):
    """Error raised if a model cannot be measured without a server."""


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
    """A running server and its memory use, child processes included, in bytes."""

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
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None if `seconds` pass before the end."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def watch(self) -> None:
        """Set `idle_bytes` to the memory used now; sample `peak_bytes` until the server ends."""
        self._tree += self._tree[0].children(recursive=True)
        self.idle_bytes = self.resident()
        self._sampler.start()

    def resident(self) -> int:
        return sum(read_footprint(process.pid) for process in self._tree)

    @property
    def weights_bytes(self) -> int:
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
        """End the whole process group: SIGTERM, then SIGKILL after the server's end or 10 s."""
        self._over.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)


class Lives:
    """A server that can be killed and started again with the same model and cache folder.

    Its arguments are those of `running`. It ends with the block of a `with` statement.
    """

    def __init__(
        self, launch: Launch, model: Path, logs: Path, wait_s: float, timeout: float = TIMEOUT_S
    ):
        self.name = launch.name
        self._start = (launch, model, logs, wait_s, timeout)
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def server(self) -> Server:
        """The running server, started on a new port if none is running. Raises NotStarted."""
        if self._server is None:
            self._server = self._stack.enter_context(running(*self._start))
        return self._server

    @property
    def client(self) -> Client:
        return self.server.client

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self.end()

    def stop(self, seconds: float) -> None:
        """Stop the server, if any, so that it finishes pending writes; kill it after `seconds`."""
        if self._server is not None:
            self._server.signal(signal.SIGTERM)
            if self._server.wait(seconds) is None:
                self._server.kill()
            self.end()

    def kill_starting(self, seconds: float) -> None:
        launch, model, logs, *_ = self._start
        with (logs / f"{self.name}-starting.log").open("wb") as output:
            server = _begun(launch, str(model), output)
        time.sleep(seconds)
        server.kill()

    def end(self) -> None:
        self._server = None
        self._stack.close()


@contextlib.contextmanager
def running(
    launch: Launch, model: Path, logs: Path, wait_s: float, timeout: float = TIMEOUT_S
) -> Iterator[Server]:
    """Yield a running server, which ends with the block. Raises NotStarted.

    It is ready when it has answered /v1/models or /health, and then one chat request; each may take
    `wait_s`. `timeout`: that of its client. Its output goes to a file in the folder `logs`.
    """
    port = free_port()
    log = logs / f"{launch.name.replace('/', '_')}-{port}.log"
    with log.open("wb") as output:
        server = _begun(launch, str(model), output, port, timeout)
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
    """Yield a running program, whose process group is killed at the end of the block."""
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
    """Run a program to its end; return its exit status and the lines that it printed."""
    with program(command, log) as process:
        printed, _ = process.communicate()
    return process.returncode, printed.strip().splitlines()


def _begun(
    launch: Launch,
    model: str,
    output: IO[bytes],
    port: int | None = None,
    timeout: float = TIMEOUT_S,
) -> Server:
    port = port or free_port()
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
    return Server(launch, process, Client(port, model, timeout), model)


def _await(server: Server, wait_s: float, log: Path) -> None:
    quick, patient = (replace(server.client, timeout=one) for one in (5.0, wait_s))
    asked = "neither /v1/models nor /health answers"
    deadline = time.monotonic() + wait_s
    while server.alive() and time.monotonic() < deadline:
        try:
            if _answers(quick, "/v1/models") or _answers(quick, "/health"):
                patient.chat([{"role": "user", "content": "hello"}], 4)
                return
        except Refused as refused:
            asked = f"its first chat failed, {refused}"
        time.sleep(0.1)
    why = asked if server.alive() else "it ended"
    raise NotStarted(f"{server.name} did not start within {wait_s:.0f} s: {why}\n{tail(log)}")


def _answers(client: Client, path: str) -> bool:
    try:
        client.get(path)
    except Refused:
        return False
    return True


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Process that measures mlx-lm without a server. Methods block, and raise NoOwnTime."""

    process: subprocess.Popen[str]

    def ask(self, prefix: int, fed: int) -> tuple[float, float]:
        """Return seconds to the token after `fed` new ones, and KV bytes a token."""
        answer = self._answer(prefix=prefix, fed=fed)
        return answer["seconds"], answer["kv_bytes_per_token"]

    def decode(self, prefix: int, reply: int) -> tuple[float, float]:
        """Return tokens per second, and peak bytes beyond those held at the first token."""
        answer = self._answer(prefix=prefix, reply=reply)
        return answer["tokens_s"], answer["peak_bytes"]

    def prefill(self, prompt: int, step: int) -> float:
        return self._answer(prompt=prompt, step=step)["tokens_s"]

    def _answer(self, **question: int) -> dict[str, float]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the measuring process ended"}
        if "error" in answer:
            raise NoOwnTime(answer["error"])
        return {name: float(value) for name, value in answer.items()}


@contextlib.contextmanager
def measuring(model: Path, logs: Path) -> Iterator[OwnTime]:
    """Yield a process with a model loaded by mlx-lm. Raises NotApplicable if it can't be timed."""
    command = [sys.executable, "-m", "mlxcache.model.own_time", str(model)]
    with program(command, logs / "own_time.log", stdin=subprocess.PIPE) as process:
        own = OwnTime(process)
        try:
            own.read()
        except NoOwnTime as why:
            raise NotApplicable(f"mlx-lm alone cannot be timed: {why}") from why
        yield own
