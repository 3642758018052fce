"""A server that is started in the background: its process, its log, its end."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import psutil

from mlxcache.cli.connect import base_url
from mlxcache.cli.listen import IN_USE
from mlxcache.cli.remote import ANSWER_S
from mlxcache.config import Settings
from mlxcache.errors import MlxcacheError
from mlxcache.private import create, make_folder
from mlxcache.store.lock import servers

STOP_S = 15.0
"""How long a server that is told to end may take."""

_TAIL_LINES = 6
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Background:
    """A server that was started here: its process, the file that it logs to, and its address."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    cache_dir: Path

    @property
    def ended(self) -> bool:
        """Whether the process is over."""
        return self.process.poll() is not None

    def listens(self) -> bool:
        """Whether this very process has the port: until then whoever answers there is another."""
        pid, url = self.process.pid, self.url
        noted = any((one.pid, one.url) == (pid, url) for one in servers(self.cache_dir))
        return noted or _listens(pid, urlsplit(url).port)  # a folder may take no notes

    def lost_its_port(self) -> bool:
        """Whether it ended because another program has the port."""
        return self.ended and any(IN_USE in line for line in self.tail())

    def tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """The last lines of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def failure(self) -> MlxcacheError:
        """Why it ended, which it has or is about to."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.stop()
        last = "\n".join(self.tail())
        return MlxcacheError(f"The server ended. The end of its log, {self.log}:\n{last}")

    def stop(self) -> None:
        """End it, and wait until it has."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _listens(pid: int, port: int | None) -> bool:
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):  # it ended, or the system does not tell
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr[1] == port for one in found)


def free_port(host: str) -> int:
    """A port of `host` on which nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def taken(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((host, port), ANSWER_S):
            return True
    except OSError:
        return False


def start(settings: Settings, flags: Sequence[str], environ: Mapping[str, str]) -> Background:
    """`mlxcache serve` with `flags`, in a session of its own, so that no Ctrl-C reaches it.

    Raises MlxcacheError where its log cannot be written.
    """
    command = [sys.executable, "-m", "mlxcache.cli.main", "serve", *flags]
    try:
        log, file = empty_log(settings.cache_dir / "log", settings.port)
        with file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environ, "PYTHONUNBUFFERED": "1"},
            )
    except OSError as error:
        raise MlxcacheError(f"The server cannot be started: {error}.") from error
    url = base_url(settings.host, settings.port)
    return Background(process, log, url, settings.cache_dir)


def empty_log(folder: Path, port: int) -> tuple[Path, BinaryIO]:
    """A server's log in `folder`, and locked by whoever writes it.

    One that another server still writes is left alone. Raises OSError.
    """
    make_folder(folder)
    path = folder / f"serve-{port}.log"
    file = _locked(path)
    if file is None:
        path = folder / f"serve-{port}-{os.getpid()}.log"
        file = create(path)
    return path, file


def _locked(path: Path) -> BinaryIO | None:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    os.fchmod(file.fileno(), 0o600)  # it may have been there
    return file


def environment(key: str | None) -> dict[str, str]:
    """A server's: a key that was given as a flag is passed on where `ps` does not show it."""
    return {**os.environ, **({"MLXCACHE_API_KEY": key} if key else {})}
