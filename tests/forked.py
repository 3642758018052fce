"""Servers without their two seconds of imports: forks of a process that has done them.

python -m tests.forked SOCKET     waits for commands

`served` is that of `tests.served`; what a user starts, files and output are the same. Not for tests
of the start itself, nor of how much memory a process has to itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.served import COMMAND, Served, served_by, started

LOOK_S = 10.0
"""How often the process looks whether the tests that it is for still run."""

IMPORTS = (
    "mlxcache.api.app",
    "mlxcache.cli.serve",
    "mlxcache.cli.server",
    "mlxcache.engine.models",
    "mlxcache.store.cache_folder",
    "mlx_lm.models.llama",
    "mlx_lm.tool_parsers.json_tools",
    "pydantic.type_adapter",
    "transformers.models.llama.configuration_llama",
    "transformers.video_utils",
    "uvicorn.lifespan.off",
)
"""Modules that a server has imported when it is ready, some of them by way of others."""

INT = struct.Struct("i")


class Forked:
    """A process that the forking one has started, with the methods of `subprocess.Popen`.

    `stdout` has what it writes, errors too.
    """

    def __init__(self, command: Sequence[str], environ: dict[str, str]):
        reading, writing = os.pipe()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(forking_socket())
        data = json.dumps([command, os.getcwd(), environ]).encode()
        socket.send_fds(self._socket, [data], [writing])
        os.close(writing)
        self.stdout = os.fdopen(reading, encoding="utf-8", errors="replace")
        self.returncode: int | None = None
        self.pid = self._receive() or 0
        assert self.pid, "the forking process has ended"

    def _receive(self) -> int | None:
        data = self._socket.recv(INT.size, socket.MSG_WAITALL)
        return int(INT.unpack(data)[0]) if len(data) == INT.size else None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = self._receive()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
            assert self.returncode is not None, "who waited for the process was killed"
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@contextmanager
def served(
    *arguments: str,
    home: Path,
    environ: dict[str, str] | None = None,
    command: tuple[str, ...] = COMMAND,
) -> Iterator[Served]:
    """Start a server on a free port, and kill it at the end if it still runs.

    It is started as by a user on macOS, where what Metal has opened does not outlive a fork, and
    if variables are set that are read when modules are imported.
    """
    own = environ or {}
    plain = sys.platform == "darwin" or _read_at_import(os.environ | own) != AT_IMPORT
    with served_by(started if plain else Forked, arguments, home, own, command) as server:
        yield server


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k in {"HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE"}}


AT_IMPORT = _read_at_import(os.environ)


@cache
def forking_socket() -> str:
    """Start the process that forks; return the path of its socket. Blocks until it is ready."""
    folder = Path(tempfile.mkdtemp())
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLXCACHE_", "XDG_"))}
    path = folder / "socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=kept | {"HOME": str(folder), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return str(path)


def wait_for_command(path: str) -> list[str]:
    """Fork for each command that is sent, until alone; in the fork, return the command."""
    for name in IMPORTS:
        importlib.import_module(name)

    waiting = socket.socket(socket.AF_UNIX)
    waiting.bind(path)
    waiting.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that have ended
    waiting.settimeout(LOOK_S)
    parent = os.getppid()
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    while os.getppid() == parent:
        try:
            asked, _ = waiting.accept()
        except TimeoutError:
            continue
        asked.setblocking(True)
        if not os.fork():
            waiting.close()
            return _begin(asked)
        asked.close()
    sys.exit()


def _begin(asked: socket.socket) -> list[str]:
    """Let a child be the process that is asked for; wait for its end here, and tell of it."""
    for number in (signal.Signals.SIGCHLD, signal.Signals.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    data, fds, *_ = socket.recv_fds(asked, 1 << 20, 1)
    if child := os.fork():
        os.close(fds[0])
        os.closerange(0, 3)  # who reads the child's output sees its end
        asked.sendall(INT.pack(child))
        _, status = os.waitpid(child, 0)
        asked.sendall(INT.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    asked.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in (1, 2):
        os.dup2(fds[0], fd)
    os.close(fds[0])
    command, folder, environ = json.loads(data)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    return list(command)


if __name__ == "__main__":
    module, *arguments = wait_for_command(sys.argv[1])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
