"""`mlxcache` without its second of imports: a process that has them, and forks for each command.

python forking.py SOCKET               waits for commands
python forking.py SOCKET ARGUMENTS...  has one run, with its own output, folder and variables
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

LOOK_S = 10.0
"""How often it looks whether the tests that it is for still run."""


def serve(path: str) -> None:
    """Wait for commands until killed, or alone. Says `ready` once it does."""
    from mlxcache.cli import main, offline, remote  # noqa: F401 - what commands import late

    waiting = socket.socket(socket.AF_UNIX)
    waiting.bind(path)
    waiting.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that have ended
    waiting.settimeout(LOOK_S)
    parent = os.getppid()
    print("ready", flush=True)
    while os.getppid() == parent:
        try:
            asked, _ = waiting.accept()
        except TimeoutError:
            continue
        asked.setblocking(True)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _handle(asked, main.main)
        asked.close()


def _handle(asked: socket.socket, main: Callable[[], None]) -> NoReturn:
    """Run the command in a child, for `main` may end its process, and say how it ended."""
    data, fds, *_ = socket.recv_fds(asked, 1 << 20, 3)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        asked.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
        os._exit(0)
    arguments, folder, environ = json.loads(data)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["mlxcache", *arguments]
    status = 1
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask(path: str, arguments: list[str]) -> int:
    """Have one command run; its exit status."""
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(path)
        data = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(to, [data], [0, 1, 2])
        return (to.recv(1) or b"\x01")[0]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
