"""Processes of `mlxcache launch`: the server, found or started, and the client."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, ClassVar, TextIO
from urllib.parse import urlsplit

import psutil
from packaging.version import Version
from rich.text import Text

from mlxcache.cli.connect import base_url
from mlxcache.cli.launch.clients import Client, Invocation, Service, Setup, without_script_settings
from mlxcache.cli.listen import IN_USE, listens
from mlxcache.cli.log import LongReadings, Reading, describe
from mlxcache.cli.output import console, loading_bar
from mlxcache.cli.remote import ANSWER_S, NoServer, Refused, Remote
from mlxcache.config import Settings
from mlxcache.errors import MlxcacheError
from mlxcache.private import create, make_folder
from mlxcache.store.lock import servers

STOP_S = 15.0
"""Seconds between SIGTERM and SIGKILL when a server is stopped."""

_LOADING_POLL_S = 0.2
_TAIL_LINES = 6
_TAIL_BYTES = 4096
_LOADING = "the server is loading"
_LOADING_LINE = re.compile(r"(?P<what>.*?)(?: (?P<percent>\d{1,3})%)?")


def say(text: str) -> None:
    """Print a line to standard error without wrapping it, so that it can be copied."""
    console(stderr=True).print(Text(text))


# -- a server that runs ------------------------------------------------------------------------


def query_server(url: str, key: str | None) -> Service | None:
    """Return the server at `url` with its default model; None while it loads the model. Blocks.

    Raises NoServer if no mlxcache server answers, and MlxcacheError if the server cannot serve or
    requires another key. The key is sent only after the program there has answered as an mlxcache
    server.
    """
    remote = Remote(url, key)
    if not remote.answers():
        raise NoServer(f"Nothing answers at {url}, or it is not an mlxcache server.")
    try:
        (model, *_) = remote.models(timeout=ANSWER_S)
    except Refused as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return None
        if error.status == HTTPStatus.UNAUTHORIZED:
            raise MlxcacheError(
                f"The server at {url} requires {'another' if key else 'a'} key: give it with "
                "--api-key, or in MLXCACHE_API_KEY."
            ) from error
        raise MlxcacheError(f"The server at {url} cannot serve: {error}") from error
    return Service(url, str(model["id"]), int(model["context_length"]), key)


def _was_asked(service: Service) -> bool:
    """Return whether `GET /v1/requests` lists any request; True if the server does not answer."""
    try:
        return bool(Remote(service.url, service.key).requests())
    except MlxcacheError:
        return True


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Server that this command found and leaves alone, with the verbs of `StartedServer`."""

    url: str
    is_new: ClassVar[bool] = False

    def query(self, key: str | None) -> Service | None:
        return query_server(self.url, key)

    def loading(self) -> tuple[str, float | None]:
        return _LOADING, None

    def stop(self, why: str = "") -> None:
        pass

    def leave(self, service: Service, status: int, *, stop_after: bool) -> None:
        pass


# -- a server that is started ------------------------------------------------------------------


class OtherServerStarted(MlxcacheError):
    """Error raised if another mlxcache server took the address of the one to start."""

    def __init__(self, url: str):
        super().__init__(f"Another server started first at {url}.")


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Server that this command started."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    cache_dir: Path
    is_new: ClassVar[bool] = True

    def query(self, key: str | None) -> Service | None:
        """Query the server as `query_server` does, and send the key to this process only."""
        if self.process.poll() is not None:
            if any(IN_USE in line for line in self.tail()) and Remote(self.url).answers():
                raise OtherServerStarted(self.url)
            raise self.failure()
        if not self.listens():
            return None
        try:
            return query_server(self.url, key)
        except NoServer:
            return None
        except MlxcacheError:  # it could not load its model, and ends: the log has the reason
            raise self.failure() from None

    def loading(self) -> tuple[str, float | None]:
        """Return the step of loading, and the fraction done if known, by the log's last line."""
        found = _LOADING_LINE.fullmatch("".join(self.tail(1)))
        if found is None or not found["what"]:
            return _LOADING, None
        percent = found["percent"]
        return f"server: {found['what']}", None if percent is None else int(percent) / 100

    def listens(self) -> bool:
        """Return whether this server itself listens at its address; else another program may."""
        pid, url = self.process.pid, self.url
        noted = any((one.pid, one.url) == (pid, url) for one in servers(self.cache_dir))
        if noted:
            return True
        with suppress(psutil.NoSuchProcess):  # the folder may not be writable
            return listens(psutil.Process(pid), urlsplit(url).port)
        return False

    def tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """Return the last non-empty lines of the log, at most `lines`."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def failure(self) -> MlxcacheError:
        """Wait until the server has ended, and return an error that has the end of its log."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.stop()
        last = "\n".join(self.tail())
        return MlxcacheError(f"The server ended. The end of its log, {self.log}:\n{last}")

    def stop(self, why: str = "") -> None:
        """Terminate the process and wait for it to end; kill it if it still runs after `STOP_S`."""
        if why:
            say(why)
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def leave(self, service: Service, status: int, *, stop_after: bool) -> None:
        """Stop the server, also if the client failed unasked, or print how to stop it."""
        unused = status != 0 and not _was_asked(service)
        if stop_after:
            self.stop()
        elif unused:
            self.stop(f"The client sent no request and ended with {status}: stopping its server.")
        else:
            pid = self.process.pid
            say(f"The server keeps running at {service.url}. To stop it: kill {pid}")


def find_free_port(host: str) -> int:
    """Return a port on which no program is listening at `host`, an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def start_server(
    settings: Settings, flags: Sequence[str], environ: Mapping[str, str]
) -> StartedServer:
    """Start `mlxcache serve` with `flags` in a process session of its own, out of reach of Ctrl-C.

    `settings` are those which result from `flags` and `environ`. Does not wait until the server
    listens. Raises MlxcacheError if its log cannot be written or its process cannot be started.
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
    """Open an empty log file in `folder` for a server on `port`, which inherits the file's lock.

    If another server is still writing to a log for this port, a file with another name is opened.
    Raises OSError.
    """
    make_folder(folder)
    path = folder / f"serve-{port}.log"
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        path = folder / f"serve-{port}-{os.getpid()}.log"
        return path, create(path)
    file.truncate(0)
    os.fchmod(file.fileno(), 0o600)  # an older file may have another mode
    return path, file


def wait_until_ready(
    server: RunningServer | StartedServer, key: str | None, signals: Sequence[int] = ()
) -> Service:
    """Wait until a server is ready, show its loading progress meanwhile, and stop it on an error.

    Signals may be added to `signals` meanwhile: SIGINT raises KeyboardInterrupt, another one
    SystemExit. Raises MlxcacheError if the server cannot serve, and OtherServerStarted.
    """
    try:
        with loading_bar(console(stderr=True)) as progress:
            while (served := server.query(key)) is None:
                for number in signals:
                    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
                progress(*server.loading())
                time.sleep(_LOADING_POLL_S)
            return served
    except BaseException:
        server.stop("Stopping the server that was started." if signals else "")
        raise


# -- the client's program ----------------------------------------------------------------------

_VERSION_TIMEOUT_S = 30.0
_VERSION_LINES = 4


def check_program(client: Client, invocation: Invocation) -> None:
    """Run the client's program with `--version` to check it. Blocks.

    Raises MlxcacheError if it is not installed, fails or is older than `client.oldest`.
    """
    if not invocation.installed:
        raise MlxcacheError(client.missing)
    if not client.prints_version:
        return
    printed = version_output(client, invocation.program, invocation.environ)
    found = re.search(r"\d+\.\d+\.\d+", printed)
    if client.oldest is None:
        return
    if found is None:
        raise MlxcacheError(f"{invocation.program} --version printed no version: {printed!r}.")
    if Version(found[0]) < client.oldest:
        with_node = f" with Node.js {client.node} or later" if client.node else ""
        raise MlxcacheError(
            f"{client.title} {found[0]} is too old: version {client.oldest} or later is needed. "
            f"Install it{with_node}:\n{client.install}"
        )


def version_output(client: Client, program: Path, environ: Mapping[str, str]) -> str:
    """Return what the client's program prints with `--version`. Raises MlxcacheError. Blocks."""
    try:
        done = subprocess.run(
            [str(program), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            env=without_script_settings(environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MlxcacheError(f"{program} --version failed: {error}.") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-_VERSION_LINES:]
        raise MlxcacheError(
            f"{client.title} does not work: `{program} --version` ended with status "
            f"{done.returncode}. Install it again with\n{client.install}\n" + "\n".join(said)
        )
    return done.stdout.strip()


_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], None]


@contextmanager
def _handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collect SIGTERM, SIGHUP and SIGINT in the yielded list instead of ending this command.

    The command can then stop a server that it is starting. Ignored signals stay ignored.
    """
    received: list[int] = []
    numbers = (*_FORWARDED, signal.SIGINT)
    heeded = [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]
    with _handling(dict.fromkeys(heeded, lambda number, _: received.append(number))):
        yield received


def run_client(
    invocation: Invocation, setup: Setup, service: Service, early: Sequence[int] = ()
) -> int:
    """Run a client in this terminal until it ends, and return its exit status.

    As in a shell, the status is 128 plus the signal's number if a signal ended the client. The
    signals in `early` are sent to the client as soon as it runs. Raises MlxcacheError if the client
    cannot be started.
    """
    environment = setup.environment(service, invocation.environ)
    environment["PWD"] = _working_folder(environment.get("PWD"), invocation.cwd)
    arguments = (*setup.arguments, *invocation.arguments)
    words, taker = [str(invocation.program)], setup.settings_in
    if taker is None:
        return run_process([*words, *arguments], environment, early)
    with _settings_file(setup.settings) as (path, lock):
        if taker.startswith("-"):
            words += [taker, str(path)]
        else:
            environment[taker] = str(path)
        return run_process([*words, *arguments], environment, early, (lock,))


def _working_folder(named: str | None, folder: Path) -> str:
    """Return PWD for a client that runs in `folder`: `named`, the present value, if it is its path.

    OpenCode works on the folder that PWD names, and a program that starts this command in another
    folder than its own may have left PWD unchanged.
    """
    with suppress(OSError):
        if named and Path(named).samefile(folder):
            return named
    return str(folder)


def run_process(
    words: Sequence[str],
    environment: Mapping[str, str],
    early: Sequence[int] = (),
    descriptors: Sequence[int] = (),
) -> int:
    """Run the program `words`, which inherits `descriptors`, and return its exit status."""
    running: list[subprocess.Popen[bytes]] = []
    missed: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if not running:
            missed.append(number)
        for process in running:
            process.send_signal(number)

    # a handler and not SIG_IGN, which the client would inherit
    handlers: dict[int, Handler] = dict.fromkeys(_FORWARDED, forward)
    handlers[signal.SIGINT] = lambda *_: None  # the terminal sends Ctrl-C to the client too
    try:
        with _handling(handlers):
            running.append(subprocess.Popen(words, env=environment, pass_fds=descriptors))
            for number in (*early, *missed):  # received before the process existed
                running[0].send_signal(number)
            status = running[0].wait()
    except OSError as error:
        raise MlxcacheError(f"{words[0]} cannot be run: {error.strerror}.") from error
    return 128 - status if status < 0 else status


# -- its settings file -------------------------------------------------------------------------

_PREFIX, _NAME, _LOCK = "mlxcache-launch-", "settings.json", "lock"


@contextmanager
def _settings_file(settings: Mapping[str, Any]) -> Iterator[tuple[Path, int]]:
    """Write `settings`, which may hold a key, to a temporary file and remove it at the end.

    Yields the file's path and a locked descriptor for the client to inherit. The lock shows that
    the file is in use for as long as this command or the client runs.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        path = Path(folder) / _NAME
        # a file of its own: Cline puts another file in the place of its settings
        with create(Path(folder) / _LOCK) as lock:
            # before the content: `remove_abandoned_settings` keeps empty locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(b"held while the client runs\n")
            lock.flush()
            with create(path) as file:
                file.write(json.dumps(settings).encode())
            yield path, lock.fileno()


def remove_abandoned_settings() -> list[Path]:
    """Remove settings files left by killed `launch` commands whose clients have ended too.

    Returns the files that could not be removed.
    """
    failed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if _is_abandoned(folder):
                with suppress(FileNotFoundError):  # another command removes it, too
                    shutil.rmtree(folder)  # with files that the client put there: they hold the key
        except OSError:
            failed.append(folder / _NAME)
    return failed


def _is_abandoned(folder: Path) -> bool:
    """Return whether `folder`, made by `_settings_file`, is this user's and is not locked.

    An empty lock does not count as abandoned: its owner may be about to lock it.
    """
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        held = folder / _LOCK
        held = held if held.exists() else folder / _NAME
        fd = os.open(held, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_size > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


# -- progress of long prompts, at the terminal of a client that prints nothing meanwhile -------

POLL_S = 0.3
_RECENT = 20
_ERASE = "\x1b[1A\r\x1b[2K"
"""Escape sequences that move the cursor up one line and erase it."""


class LineAbove:
    """Line that is rewritten in place while the cursor stays at the start of the next line.

    Output of another program then begins on a line of its own. It is not overwritten, unless `show`
    or `remove` is called after that. Without a terminal, only its first text is written, and
    `more`, the place where the later ones can be seen.
    """

    def __init__(self, out: TextIO, more: str):
        self._out, self._more, self._terminal = out, more, out.isatty()
        self._text = ""

    def show(self, text: str) -> None:
        """Write `text` in place of the previous text."""
        if text != self._text and (self._terminal or not self._text):
            more = "" if self._terminal else f"; to watch it: {self._more}"
            self._out.write(f"{_ERASE if self._text else ''}{text}{more}\n")
            self._out.flush()
            self._text = text

    def remove(self) -> None:
        if self._text and self._terminal:
            self._out.write(_ERASE)
            self._out.flush()
        self._text = ""

    def leave(self) -> None:
        """Keep the line on the terminal; the next `show` writes a new one."""
        self._text = ""


@contextmanager
def watching(service: Service, *, quiet: bool) -> Iterator[None]:
    """Show the progress of a `quiet` client's long prompts on standard error."""
    if not quiet:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(service, sys.stderr, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(POLL_S)


def _watch(service: Service, out: TextIO, ended: threading.Event) -> None:
    """Show progress on `out` until `ended` is set or the server does not answer. Blocks."""
    line, long = LineAbove(out, f"{service.url}/dashboard"), LongReadings()
    remote = Remote(service.url, service.key)
    with suppress(MlxcacheError):
        while not ended.wait(POLL_S):
            running = [one for one in remote.requests(_RECENT) if one["progress"]]
            # of several requests, one may be printed while another is read
            phase = running[0]["progress"]["phase"] if len(running) == 1 else None
            rows = [one for one in running if one["progress"]["phase"] == "prefill"]
            shown = long.update(_reading(one) for one in rows if one["progress"]["done_tokens"])
            if ended.is_set():
                return
            if phase == "prefill" and shown:
                line.show(describe(shown))
            elif phase == "decode":
                line.remove()  # before the client has anything to print
            elif phase is None:
                line.leave()


def _reading(row: dict[str, Any]) -> Reading:
    progress = row["progress"]
    done, total = progress["done_tokens"], progress["total_tokens"]
    return Reading(row["id"], row["session"], done, total, progress.get("left_s"))
