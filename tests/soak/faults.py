"""What is done to a server and to its files, at the moments that the plan names."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.ledger import Ledger
from tests.soak.plan import Fault
from tests.soak.server import Life


def befall(life: Life, fault: Fault, ledger: Ledger, over: threading.Event) -> None:
    """One fault, from its beginning to its end, or to the end of the round."""
    if over.wait(fault.at) or life.ending or life.server is None:
        return
    ledger.count(ledger.faults, fault.name)
    if fault.name == "stop":
        life.upset.add("stop")
        life.server.signal(signal.SIGSTOP)
        over.wait(fault.lasts)
        life.server.signal(signal.SIGCONT)
        return
    life.put(fault.name, fault.measure)
    if fault.lasts:
        over.wait(fault.lasts)
        life.faults.end(fault.name)


def end_all(life: Life) -> None:
    """No fault is on any more."""
    for path in life.faults.folder.iterdir():
        path.unlink(missing_ok=True)


def to_files(name: str, folder: Path, rng: random.Random, ledger: Ledger) -> None:
    """Damage files of a store, or its index, or remove the folder."""
    store = folder / "store"
    if not store.is_dir():
        return
    ledger.count(ledger.faults, name)
    if name == "remove":
        shutil.rmtree(folder, ignore_errors=True)
    elif name == "index":
        for index in store.glob("index.sqlite*"):
            _damage(index, rng)
    else:
        found = sorted(store.rglob("*.safetensors"))
        for path in rng.sample(found, min(len(found), 1 + len(found) // 4)):
            with contextlib.suppress(FileNotFoundError):
                _damage(path, rng)


def _damage(path: Path, rng: random.Random) -> None:
    """A file loses its end, or some of its bytes are others, or it is gone."""
    how = rng.random()
    size = path.stat().st_size
    if how < 0.2:
        path.unlink()
    elif how < 0.5:
        with path.open("r+b") as file:
            file.truncate(int(size * rng.random()))
    else:
        with path.open("r+b") as file:
            file.seek(int(max(0, size - 64) * rng.random()))
            file.write(rng.randbytes(min(size, 64)))


def within(seconds: float, done: Callable[[], bool]) -> bool:
    """Whether something came true in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
