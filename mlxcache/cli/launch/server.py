"""Server for a client: find one, or start one in the background, and wait until it is ready."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx
import psutil

from mlxcache.cli.connect import base_url
from mlxcache.cli.launch.setup import Service
from mlxcache.cli.listen import IN_USE
from mlxcache.cli.output import console
from mlxcache.cli.progress import loading_bar
from mlxcache.cli.remote import ANSWER_S, NoServer, Remote, proxied
from mlxcache.config import Settings
from mlxcache.errors import MlxcacheError
from mlxcache.private import create, make_folder
from mlxcache.store.lock import servers
from mlxcache.store.mac_folder import locate_cache_dir

STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL when a server is stopped."""

POLL_S = 0.2

_TAIL_LINES = 6
_TAIL_BYTES = 4096
_LOADING_LINE = re.compile(r"(?P<what>.*?)(?: (?P<percent>\d{1,3})%)?")


# -- a server that runs ------------------------------------------------------------------------


def server_answers(url: str) -> bool:
    """Return whether an mlxcache server answers at `url`, even if its model is still loading."""
    return Remote(url).health() is not None


def query_server(url: str, key: str | None) -> Service | None:
    """Return the server at `url` with its default model and that model's context length. Blocks.

    Returns None while the server loads the model. Raises NoServer if no mlxcache server answers,
    and MlxcacheError if the server cannot serve or requires another key. The key is sent only after
    the program at `url` has answered as an mlxcache server.
    """
    if not server_answers(url):
        raise NoServer(f"Nothing answers at {url}, or it is not an mlxcache server.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(
            f"{url}/v1/models", headers=headers, timeout=ANSWER_S, trust_env=proxied(url)
        )
    except httpx.HTTPError as error:
        raise NoServer(f"Nothing answers at {url}: {error}.") from error
    if response.status_code == 503:
        return None
    if response.status_code == 401:
        raise MlxcacheError(
            f"The server at {url} requires a key: give it with --api-key, or in MLXCACHE_API_KEY."
        )
    if response.is_error:
        raise MlxcacheError(f"The server at {url} cannot serve: {_message(response)}")
    (model, *_) = response.json()["data"]
    return Service(url, str(model["id"]), int(model["context_length"]), key)


def was_asked(service: Service) -> bool:
    """Return whether `GET /v1/requests` lists any request; True if the server does not answer."""
    try:
        return bool(Remote(service.url, service.key).requests())
    except MlxcacheError:
        return True


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}."


# -- a server that is started ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Server that this command started: its process, log file, address and cache folder."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    cache_dir: Path

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return self.process.poll() is not None

    def listens(self) -> bool:
        """Return whether this server's own process is listening at its address.

        While this is False, another program may hold the port.
        """
        pid, url = self.process.pid, self.url
        folder = locate_cache_dir(self.cache_dir)
        noted = any((one.pid, one.url) == (pid, url) for one in servers(folder))
        return noted or _listens(pid, urlsplit(url).port)  # the folder may not be writable

    def lost_its_port(self) -> bool:
        """Return whether the server ended because another program holds the port."""
        return self.ended and any(IN_USE in line for line in self.tail())

    def tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """Return the last non-empty lines of the log, at most `lines`."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def failure(self) -> MlxcacheError:
        """Wait until the server has ended, and return an error that has the end of its log.

        If the server still runs after `STOP_S`, it is stopped.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.stop()
        last = "\n".join(self.tail())
        return MlxcacheError(f"The server ended. The end of its log, {self.log}:\n{last}")

    def stop(self) -> None:
        """Terminate the process and wait for it to end; kill it if it still runs after `STOP_S`."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _listens(pid: int, port: int | None) -> bool:
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):  # it ended, or the system does not allow the query
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr[1] == port for one in found)


def find_free_port(host: str) -> int:
    """Return a port on which no program is listening at `host`, an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def start_server(
    settings: Settings, flags: Sequence[str], environ: Mapping[str, str]
) -> StartedServer:
    """Start `mlxcache serve` with `flags` in a process session of its own, out of reach of Ctrl-C.

    `flags` are words of the command line, and `environ` holds the process's variables. `settings`
    are those which result from both: the address and the cache folder are taken from them. Does not
    wait until the server listens. Raises MlxcacheError if its log cannot be written or its process
    cannot be started.
    """
    command = [sys.executable, "-m", "mlxcache.cli.main", "serve", *flags]
    try:
        log, file = open_log(settings.cache_dir / "log", settings.port)
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
    return StartedServer(process, log, url, settings.cache_dir)


def open_log(folder: Path, port: int) -> tuple[Path, BinaryIO]:
    """Open an empty, locked log file in `folder` for a server on `port`; return its path and file.

    The server inherits the lock. If another server is still writing to a log for this port, that
    log is kept and a file with another name is opened. Raises OSError.
    """
    make_folder(folder)
    path = folder / f"serve-{port}.log"
    file = _open_locked(path)
    if file is None:
        path = folder / f"serve-{port}-{os.getpid()}.log"
        file = create(path)
    return path, file


def _open_locked(path: Path) -> BinaryIO | None:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    os.fchmod(file.fileno(), 0o600)  # an older file may have another mode
    return file


# -- waiting until it serves -------------------------------------------------------------------


class OtherServerStarted(MlxcacheError):
    """Error raised if another mlxcache server took the address of the one to start."""

    def __init__(self, url: str):
        super().__init__(f"Another server started first at {url}.")


def wait_until_ready(
    url: str, key: str | None, started: StartedServer | None, signals: Sequence[int] = ()
) -> Service:
    """Wait until the server at `url` is ready, and show its loading progress meanwhile.

    With `started`, only that process is queried and sent the key, and it is stopped if this
    function raises. Signals may be added to `signals` meanwhile: SIGINT raises KeyboardInterrupt,
    another one SystemExit. Raises MlxcacheError if the server cannot serve, and OtherServerStarted
    if another mlxcache server took the port.
    """
    served = None
    try:
        with loading_bar(console(stderr=True)) as progress:
            while served is None:
                _exit_on_signal(signals)
                served = query_server(url, key) if started is None else _query_started(key, started)
                if served is None:
                    progress(*_loading(started))
                    time.sleep(POLL_S)
    finally:
        if served is None and started is not None:
            if signals:
                console(stderr=True).print("Stopping the server that was started.")
            started.stop()
    return served


def _exit_on_signal(signals: Sequence[int]) -> None:
    for number in signals:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _query_started(key: str | None, started: StartedServer) -> Service | None:
    """Return the started server with its model and context length; None until it has loaded.

    Raises OtherServerStarted if another server took the port, and MlxcacheError if the started one
    ended or cannot serve.
    """
    if started.ended:
        if started.lost_its_port() and server_answers(started.url):
            raise OtherServerStarted(started.url)
        raise started.failure()
    if not started.listens():
        return None
    try:
        return query_server(started.url, key)
    except NoServer:
        return None
    except MlxcacheError:  # it could not load its model, and ends: the log has the reason
        raise started.failure() from None


def _loading(started: StartedServer | None) -> tuple[str, float | None]:
    """Return the step of loading as text, and the fraction of it that is done, from 0 to 1.

    Both are from the last line of the log of `started`. The fraction is None if that line has none.
    Without `started`, it is None too, and the text only says that the server is loading.
    """
    last = started.tail(1) if started is not None else []
    found = _LOADING_LINE.fullmatch(last[0]) if last else None
    if found is None:
        return "the server is loading", None
    percent = found["percent"]
    return f"server: {found['what']}", None if percent is None else int(percent) / 100
