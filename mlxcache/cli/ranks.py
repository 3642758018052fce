"""`mlxcache serve --hosts`: start one process on each machine, with mlx.launch.

Each process is a rank: it computes its part of a model that is divided among the machines.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from mlxcache.cli.options import FRONT
from mlxcache.config import Settings
from mlxcache.errors import ConfigError

END_S = 1.0
"""Seconds that the processes have to end after one of them has ended."""

STOP_S = 20.0
"""Seconds that the processes have to end after a signal: conversations are written to disk."""

WATCH_S = 1.0

POLL_S = 0.2

QUIET_S = (5.0, 10.0, 20.0, 60.0)
"""Seconds after the start at which mlx.launch gets a line on stdin; see `Ranks._quieten`."""

RANK = "MLX_RANK"
"""Variable that mlx.launch sets in each process: its rank, from 0 on."""

FIRST_PORT, LAST_PORT = 32323, 60000
"""First and last port over which ranks exchange tensors; the first is mlx.launch's default."""

LOCAL = "127.0.0.1"
"""The address for which mlx.launch starts a process without ssh."""


def read_hosts(hosts: str) -> list[dict[str, object]]:
    """Return the machines of `--hosts`, names or addresses, as mlx.launch's hostfile lists them.

    The first must be this machine: its process is started here, and not through ssh.
    """
    names = [name.strip() for name in hosts.split(",")]
    if len(names) < 2:
        raise ConfigError(f"--hosts {hosts}: name two machines or more, such as 10.0.0.1,10.0.0.2")
    found: list[dict[str, object]] = []
    for name in names:
        try:
            address = socket.gethostbyname(name) if name else ""
        except OSError as error:
            raise ConfigError(f"--hosts: {name} has no address: {error.strerror}") from error
        if not address:
            raise ConfigError(f"--hosts {hosts}: there is a name missing between two commas")
        found.append({"ssh": LOCAL if address == LOCAL else name, "ips": [address]})
    own = {one.address for each in psutil.net_if_addrs().values() for one in each}
    if (first := found[0]["ips"]) and not set(own) & set(first):  # type: ignore[call-overload]
        raise ConfigError(f"--hosts {hosts}: the first must be this machine, and {names[0]} is not")
    return [found[0] | {"ssh": LOCAL}, *found[1:]]


def free_port(count: int) -> int:
    """Return the first of `count` consecutive ports that are free on this machine."""
    for first in range(FIRST_PORT, LAST_PORT, count):
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    one = held.enter_context(socket.socket())
                    one.bind((LOCAL, port))
            except OSError:
                continue
        return first
    raise ConfigError(f"--hosts: no {count} ports in a row are free on this machine")


def launch_command(hostfile: Path, arguments: Sequence[str], port: int = FIRST_PORT) -> list[str]:
    """Return the command that starts `mlxcache` with `arguments` on every machine of `hostfile`.

    `port`: the first over which ranks exchange tensors.
    """
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not launcher.exists():
        raise ConfigError(f"--hosts needs mlx.launch, which is not in {launcher.parent}")
    if not hostfile.is_file():
        raise ConfigError(f"--hostfile {hostfile}: there is no such file")
    own = [sys.executable, "-m", "mlxcache.cli.main", *arguments]
    machines = ["--hostfile", str(hostfile), "--starting-port", str(port)]
    return [str(launcher), *machines, "--", *own]


def run_ranks(settings: Settings, arguments: Sequence[str]) -> int:
    """Run `mlxcache` with `arguments` on every machine of the settings, until all have ended.

    Returns 0 if SIGINT or SIGTERM ended the processes, else 1. These signals are passed on to rank
    0, which ends the other processes. Blocks.
    """
    settings.check_divisible()
    if settings.hostfile is not None:
        return Ranks(launch_command(settings.hostfile, arguments)).run()
    with tempfile.TemporaryDirectory(prefix="mlxcache-") as folder:
        hostfile = Path(folder) / "hosts.json"
        hosts = read_hosts(settings.hosts or "")
        hostfile.write_text(json.dumps(hosts))
        here = all(one["ssh"] == LOCAL for one in hosts)
        port = free_port(len(hosts)) if here else FIRST_PORT
        return Ranks(launch_command(hostfile, arguments, port)).run()


def close_input() -> None:
    """Close this process's standard input, which mlx.launch keeps trying to write to."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def watch_launcher() -> None:
    """End this process, rank 0, when mlx.launch or the process that started mlx.launch has ended.

    They send no signal if they are killed, so a thread checks them. This process gets SIGTERM then,
    and exits `STOP_S` seconds later if it still runs. Does nothing in a process that was started in
    another way, which may outlive its parent, such as a shell.
    """
    launchers = []
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        launchers += [parent] if any("mlx.launch" in word for word in parent.cmdline()) else []
    with suppress(KeyError, ValueError, psutil.Error):
        launchers.append(psutil.Process(int(os.environ[FRONT])))

    def watch() -> None:
        while all(_lives(one) for one in launchers):
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_S)
        os._exit(1)

    if launchers:
        threading.Thread(target=watch, name="mlxcache-launcher", daemon=True).start()


class Ranks:
    """mlx.launch, started at once with `command`, and its processes on this machine.

    Unlike mlx.launch alone, `run` ends all of them on a signal, and when one of them has ended,
    even if another one is frozen.
    """

    def __init__(self, command: Sequence[str]):
        # a session of its own: Ctrl-C in a terminal is for rank 0 alone, which ends the others.
        # stdin is a pipe that stays open: mlx.launch reads it, and would spin at its end
        self._launcher = psutil.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {FRONT: str(os.getpid())},
        )
        self._lines = [time.monotonic() + delay for delay in QUIET_S]
        self._seen: dict[int, psutil.Process] = {}
        self._told = threading.Event()
        self._stopped = False
        self._stop_by: float | None = None

    def run(self) -> int:
        """Wait until all processes have ended; return 0 if a signal ended them, else 1."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while self._launcher.poll() is None or self._running():
            self._told.wait(POLL_S)
            self._told.clear()
            self._quieten()
            ended = len(self._running()) < len(self._seen) or self._launcher.poll() is not None
            if ended and self._stop_by is None:
                self._stop_by = time.monotonic() + END_S
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                for each in [*self._running(), self._launcher]:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
        return 0 if self._stopped else 1

    def _quieten(self) -> None:
        """Write a line to the standard input of mlx.launch, once after each delay in `QUIET_S`.

        mlx.launch tries to pass it on to its processes, which have closed their input: writing
        fails, and mlx.launch stops polling them, which would use a whole CPU core.
        """
        if self._lines and time.monotonic() > self._lines[0]:
            del self._lines[0]
            with suppress(OSError):
                self._launcher.stdin.write(b"\n")
                self._launcher.stdin.flush()

    def _stop(self, number: int, frame: object) -> None:
        running = self._running()
        for each in [one for one in running if _rank(one) == 0] or [*running, self._launcher]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        self._stopped, self._stop_by = True, time.monotonic() + STOP_S
        self._told.set()

    def _running(self) -> list[psutil.Process]:
        """Return the processes that mlx.launch started on this machine and that have not ended."""
        with suppress(psutil.NoSuchProcess):
            for one in self._launcher.children():
                self._seen.setdefault(one.pid, one)
        return [one for one in self._seen.values() if _lives(one)]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _rank(process: psutil.Process) -> int | None:
    try:
        return int(process.environ()[RANK])
    except (psutil.Error, KeyError, ValueError):
        return None
