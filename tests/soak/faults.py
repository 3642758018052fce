"""Injection of faults into a server and its files, at the times of the plan."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
from pathlib import Path

from tests.soak.ledger import Ledger
from tests.soak.plan import Fault
from tests.soak.server import SoakServer


def inject(server: SoakServer, fault: Fault, ledger: Ledger, over: threading.Event) -> None:
    """Inject one fault at its time and end it after its duration, or at the end of the round.

    Blocks until then. `over`: set at the end of the round.
    """
    if over.wait(fault.at) or server.ending or server.process is None:
        return
    ledger.count(ledger.faults, fault.name)
    if fault.name == "stop":
        server.note_fault("stop")
        server.process.signal(signal.SIGSTOP)
        over.wait(fault.lasts)
        server.process.signal(signal.SIGCONT)
        return
    server.put(fault.name, fault.measure)
    if fault.lasts:
        over.wait(fault.lasts)
        server.faults.end(fault.name)


def end_faults(server: SoakServer) -> None:
    for path in server.faults.folder.iterdir():
        path.unlink(missing_ok=True)


def damage_folder(name: str, folder: Path, rng: random.Random, ledger: Ledger) -> None:
    """Damage the files of a store (`damage`), its index (`index`), or `remove` the folder."""
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
