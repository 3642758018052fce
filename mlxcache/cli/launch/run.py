"""Running a client in this terminal until it ends."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from mlxcache.cli.launch.client import Place, Service, Start
from mlxcache.cli.launch.settings import settings_file
from mlxcache.errors import MlxcacheError

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_signals() -> Iterator[list[int]]:
    """Those that would end this command, which come meanwhile, in order: none of them ends it.

    So that a server which is being started is not left behind. One that is ignored stays so.
    """
    came: list[int] = []

    def keep(number: int, _: FrameType | None) -> None:
        came.append(number)

    asked = [one for one in (*_PASSED_ON, signal.SIGINT) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, keep) for number in asked}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(place: Place, start: Start, service: Service, early: Sequence[int] = ()) -> int:
    """The client's exit status, as a shell tells it: 128 and the signal's number for a signal.

    It is sent the signals of `early` at once. Raises MlxcacheError where it cannot be started.
    """
    environment = start.environment(service, place.environ)
    arguments = (*start.arguments, *place.arguments)
    if start.flag is None:
        return _run([str(place.program), *arguments], environment, early)
    with settings_file(start.settings) as (path, lock):
        words = [str(place.program), start.flag, str(path), *arguments]
        return _run(words, environment, early, (lock,))


def _run(
    words: Sequence[str],
    environment: Mapping[str, str],
    early: Sequence[int] = (),
    descriptors: Sequence[int] = (),
) -> int:
    running: list[subprocess.Popen[bytes]] = []
    missed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if not running:
            missed.append(number)
        for process in running:
            process.send_signal(number)

    def ignore(_: int, __: FrameType | None) -> None:
        """The terminal sends Ctrl-C to the client too, and what it means is the client's matter."""

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        running.append(subprocess.Popen(words, env=environment, pass_fds=descriptors))
        for number in (*early, *missed):  # what came before it was there
            running[0].send_signal(number)
        status = running[0].wait()
    except OSError as error:
        raise MlxcacheError(f"{words[0]} cannot be run: {error.strerror}.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
