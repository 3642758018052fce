"""Running a client in this terminal until it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mlxcache.cli.launch.client import Place, Service, Start
from mlxcache.errors import MlxcacheError
from mlxcache.private import create

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def run(place: Place, start: Start, service: Service) -> int:
    """The client's exit status, as a shell tells it: 128 and the signal's number for a signal.

    Raises MlxcacheError where it cannot be started.
    """
    environment = start.environment(service, place.environ)
    with _settings(start) as own:
        words = [str(place.program), *own, *start.arguments, *place.arguments]
        return _run(words, environment)


@contextmanager
def _settings(start: Start) -> Iterator[tuple[str, ...]]:
    """The arguments that name a file with the client's settings, which is there meanwhile."""
    if start.flag is None:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="mlxcache-launch-") as folder:
        path = Path(folder) / "settings.json"
        with create(path) as file:  # a key may be in it
            file.write(json.dumps(start.settings).encode())
        yield (start.flag, str(path))


def _run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if not running:
            early.append(number)
        for process in running:
            process.send_signal(number)

    def ignore(_: int, __: FrameType | None) -> None:
        """The terminal sends Ctrl-C to the client too, and what it means is the client's matter."""

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        running.append(subprocess.Popen(words, env=environment))
        for number in early:  # what came while it was being started
            running[0].send_signal(number)
        status = running[0].wait()
    except OSError as error:
        raise MlxcacheError(f"{words[0]} cannot be run: {error.strerror}.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
