"""The server for a client: the one that runs, or one that is started in the background."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from mlxcache.cli.launch.client import Service
from mlxcache.cli.output import Loading, console
from mlxcache.cli.remote import ANSWER_S, NoServer, Remote, proxied
from mlxcache.config import Settings
from mlxcache.errors import MlxcacheError
from mlxcache.private import create, make_folder

POLL_S = 0.2
STOP_S = 15.0
"""How long a server that is told to end may take."""

_TAIL_LINES = 6
_TAIL_BYTES = 4096
_STEP = re.compile(r"(?P<what>.*?)(?: (?P<percent>\d{1,3})%)?")


@dataclass(frozen=True, slots=True)
class Background:
    """A server that was started here: its process, and the file that it logs to."""

    process: subprocess.Popen[bytes]
    log: Path

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
    log = settings.cache_dir / "log" / f"serve-{settings.port}.log"
    command = [sys.executable, "-m", "mlxcache.cli.main", "serve", *flags]
    try:
        make_folder(log.parent)
        with create(log) as file:
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
    return Background(process, log)


def ask(url: str, key: str | None) -> Service | None:
    """The server at `url` as clients see it; None while it loads its model.

    Raises NoServer where none answers, MlxcacheError where it cannot serve or wants another key.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not answers(url):  # before it is told the key
        raise NoServer(f"Nothing answers at {url}, or it is no mlxcache server.")
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
            f"The server at {url} asks for a key: give it with --api-key, or in MLXCACHE_API_KEY."
        )
    if response.is_error:
        raise MlxcacheError(f"The server at {url} cannot serve: {_message(response)}")
    (model, *_) = response.json()["data"]
    return Service(url, str(model["id"]), int(model["context_length"]), key)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}."


def answers(url: str) -> bool:
    """Whether an mlxcache server is there, also one that is still loading."""
    return Remote(url).answers()


def wait(url: str, key: str | None, started: Background | None) -> Service:
    """The server at `url`, once it serves; what it loads is shown meanwhile.

    Raises MlxcacheError where it ends before that; one that was started here is then told to end.
    """
    served = None
    try:
        with Loading(console(stderr=True)) as progress:
            while served is None:
                served = _ask_again(url, key, started, progress)
                if served is None:
                    time.sleep(POLL_S)
    finally:
        if served is None and started is not None:
            started.stop()
    return served


def _ask_again(
    url: str,
    key: str | None,
    started: Background | None,
    progress: Callable[[str, float | None], None],
) -> Service | None:
    ended = started is not None and started.process.poll() is not None
    try:
        served = ask(url, key)
    except MlxcacheError as error:
        if started is None:
            raise
        served = None
        # One that could not load its model says so before it ends. And where another server was
        # quicker to listen there, that one is asked.
        if ended or not isinstance(error, NoServer):
            raise started.failure() from None
    if served is None:
        progress(*_step(started))
    return served


def _step(started: Background | None) -> tuple[str, float | None]:
    """What is being loaded and the share done, as the log's last line tells."""
    last = started.tail(1) if started is not None else []
    found = _STEP.fullmatch(last[0]) if last else None
    if found is None:
        return "the server is loading", None
    percent = found["percent"]
    return f"server: {found['what']}", None if percent is None else int(percent) / 100


def environment(key: str | None) -> dict[str, str]:
    """A server's: a key that was given as a flag is passed on where `ps` does not show it."""
    return {**os.environ, **({"MLXCACHE_API_KEY": key} if key else {})}
