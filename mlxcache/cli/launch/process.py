"""Client process: signals, exit status, and a settings file that exists while the client runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from mlxcache.cli.launch.setup import Invocation, Service, Setup
from mlxcache.errors import MlxcacheError
from mlxcache.private import create

_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collect SIGTERM, SIGHUP and SIGINT in the yielded list instead of ending this command.

    The command can then stop a server that it is starting. Ignored signals stay ignored.
    """
    received: list[int] = []

    def collect(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {
        number: signal.signal(number, collect)
        for number in (*_FORWARDED, signal.SIGINT)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    words = [str(invocation.program)]
    if setup.settings_flag is None and setup.settings_variable is None:
        return run_process([*words, *arguments], environment, early)
    with _settings_file(setup.settings) as (path, lock):
        if setup.settings_variable is not None:
            environment[setup.settings_variable] = str(path)
        if setup.settings_flag is not None:
            words += [setup.settings_flag, str(path)]
        return run_process([*words, *arguments], environment, early, (lock,))


def _working_folder(named: str | None, folder: Path) -> str:
    """Return the value of the variable PWD for a client that runs in `folder`.

    It is `named`, the variable's present value, if that is a path of `folder`, else the path
    `folder`. OpenCode works on the folder that PWD names, and a program that starts this command in
    another folder than its own may have left PWD unchanged.
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
    """Run the program `words` in this terminal until it ends, and return its exit status.

    The status is 128 plus the signal's number if a signal ended the program. `environment` holds
    all variables of the program, which inherits the open file `descriptors`. The signals in `early`
    are sent to it first. Raises MlxcacheError if the program cannot be started.
    """
    running: list[subprocess.Popen[bytes]] = []
    missed: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if not running:
            missed.append(number)
        for process in running:
            process.send_signal(number)

    def ignore(_: int, __: FrameType | None) -> None:
        """Ignore Ctrl-C, which the terminal also sends to the client."""

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        running.append(subprocess.Popen(words, env=environment, pass_fds=descriptors))
        for number in (*early, *missed):  # received before the process existed
            running[0].send_signal(number)
        status = running[0].wait()
    except OSError as error:
        raise MlxcacheError(f"{words[0]} cannot be run: {error.strerror}.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


# -- settings files ----------------------------------------------------------------------------

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

    The file to lock is the lock file in `folder`, or the settings file if there is no lock file.
    Returns False if the file to lock is missing, or if it is empty, because its owner may be about
    to lock it. Raises OSError if it cannot be examined.
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
