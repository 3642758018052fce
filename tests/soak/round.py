"""One round of the soak: servers under agents and faults for some seconds, then the checks."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcache.bench.process import Server, tail
from mlxcache.config import parse_size
from tests.soak import checks, wire
from tests.soak.agent import Agent
from tests.soak.ledger import Ledger
from tests.soak.plan import Fault, Round
from tests.soak.server import START_S, Flags, SoakServer, launch

if TYPE_CHECKING:
    from tests.soak.run import Soak

END_S = 90.0
JOIN_S = 2 * wire.LONGEST_S


class Servers:
    """The servers of a round. `ready`: set once the brief one has started."""

    def __init__(self, steady: SoakServer | None, brief: SoakServer):
        self.steady = steady
        self.brief = brief
        self.ready = threading.Event()

    def pick(self, share: float) -> SoakServer | None:
        """Pick the brief server for `share` < 0.5 if it runs, else the steady one, else either."""
        brief = self.brief if self.ready.is_set() and not self.brief.ending else None
        return (brief if share < 0.5 else self.steady) or self.steady or brief

    def every(self) -> list[SoakServer]:
        return [server for server in (self.steady, self.brief) if server is not None]


class RoundRun:
    """Execution of one planned round; `run` does all of it."""

    def __init__(self, soak: Soak, round_: Round):
        self.soak, self.round, self.ledger = soak, round_, soak.ledger
        self.shared = round_.place == "shared"
        family = "wide" if round_.place == "wide" else round_.family
        names = {"shared": "shared", "private": f"private-{family}", "wide": "wide"}
        self.folder: Path = soak.folder / names[round_.place]
        self.sessions = soak.sessions_of(self.folder.name)
        self.sessions.drop_unconfirmed()
        flags = Flags(round_.ram, round_.disk, round_.concurrency, round_.chunk)
        name = f"brief-{round_.number}"
        where = {"model": soak.model(family), "folder": self.folder, "logs": soak.logs}
        self.brief = SoakServer(name, family, flags, **where)
        self.steady = soak.steady_of(family, self.folder) if self.shared else None
        self.servers = Servers(self.steady, self.brief)
        self.agents: list[Agent] = soak.agents_of(self.folder.name, family)

    def run(self) -> None:
        damage_later = self._damage_before_start()
        over = threading.Event()
        threads = [
            self._thread(agent.work, self.servers, over, self.soak.pause) for agent in self.agents
        ]
        try:
            if self.shared:
                _start(threads)
            self._start_brief()
            self.servers.ready.set()
            if not self.shared:
                _start(threads)
            self._inject_faults(damage_later)
        finally:
            over.set()
            self._join(threads)
        try:
            resting = [server for server in self.servers.every() if self._comes_to_rest(server)]
            if self.shared:  # opening the store also repairs what the killed server left
                checks.check_files(self.folder, self.ledger)
            for server in resting:
                self._check(server)
        finally:
            self._end_brief()

    # -- faults and ends ------------------------------------------------------------------------

    def _damage_before_start(self) -> Callable[[], None]:
        """Damage the folder before the server starts; returns the damage to do while it runs."""
        rng = random.Random(f"{self.soak.seed} files {self.round.number}")
        self.brief.note_fault(*self.round.files)

        def damage(names: Sequence[str]) -> None:
            for name in names:
                damage_folder(name, self.folder, rng, self.ledger)

        now = [name for name in self.round.files if name == "index"] or self.round.files[:1]
        damage(now)
        return lambda: damage([name for name in self.round.files if name not in now])

    def _start_brief(self) -> None:
        brief = self.brief
        if self.round.starting is not None:
            what = launch("starting", brief.faults.folder, brief.folder, brief.flags)
            starting = Server(what, self.soak.model(brief.family), self.soak.logs, START_S)
            starting.kill_starting(self.round.starting)
            self.ledger.count(self.ledger.ends, "kill while starting")
        brief.start(self.ledger, self.sessions)

    def _inject_faults(self, damage_later: Callable[[], None]) -> None:
        round_, over, began = self.round, threading.Event(), time.monotonic()
        threads = []
        for fault in round_.faults:
            server = self.steady if fault.on == "steady" and self.steady else self.brief
            threads.append(self._thread(inject, server, fault, self.ledger, over))
        _start(threads)
        try:
            time.sleep(round_.end_at / 2)
            damage_later()
            time.sleep(max(0.0, began + round_.end_at - time.monotonic()))
            self._end_under_load()
            time.sleep(max(0.0, began + round_.seconds - time.monotonic()))
        finally:
            over.set()
            self._join(threads)
            for server in self.servers.every():
                end_faults(server)

    def _end_under_load(self) -> None:
        """End the brief server as planned; a late SIGTERM is sent at rest instead."""
        brief, round_ = self.brief, self.round
        assert brief.process is not None
        if round_.end == "term" and round_.end_at > 0.75 * round_.seconds:
            return
        if round_.end == "kill":
            brief.expect_end()
            brief.process.kill()
            self.ledger.count(self.ledger.ends, "kill")
        elif round_.end == "die":
            brief.expect_end()
            brief.put("die")
            wire.call(brief.port, "GET", "/v1/sessions")  # an idle thread takes no step
            check_end(brief, 1, self.ledger)
        else:
            terminate(brief, self.ledger)

    def _end_brief(self) -> None:
        """End the brief server if it still runs, and check its peak memory and its log."""
        brief = self.brief
        if brief.process is None:
            return
        if not brief.ending:
            terminate(brief, self.ledger)
        if brief.figures.polls:
            checks.check_overshoot(brief, self.ledger)
        if not brief.injected and brief.tracebacks():
            self.ledger.add_violation("log", f"{brief.name} logged a traceback")
        brief.close()

    # -- at rest -----------------------------------------------------------------------------

    def _comes_to_rest(self, server: SoakServer) -> bool:
        """Wait until a server is idle; False if it does not run.

        Its unexpected end is a violation.
        """
        if server.ending or server.process is None:
            return False
        if server.process.alive():
            return checks.wait_at_rest(server, self.ledger)
        logged = tail(server.log())
        self.ledger.add_violation("died", f"{server.name} ended by itself: {logged}")
        server.expect_end()
        self.soak.drop_steady(server)
        return False

    def _check(self, server: SoakServer) -> None:
        ledger, round_ = self.ledger, self.round
        checks.check_counts(server, ledger)
        checks.check_budget(server, ledger)
        if self.shared:
            checks.check_sessions(server, self.sessions, ledger)
            checks.check_growth(server, ledger)
        else:
            wire.call(server.port, "POST", "/v1/cache/prune")
        if round_.place == "private":
            limit = parse_size(round_.disk, total=0)
            assert limit is not None
            checks.check_disk_limit(server, ledger, limit)
        checks.verify_files(server, ledger)
        self.soak.record_idle(server)

    # -- threads -----------------------------------------------------------------------------

    def _thread(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.ledger.add_violation("soak", f"{type(error).__name__}: {error}")
                raise

        return threading.Thread(target=guarded)

    def _join(self, threads: list[threading.Thread]) -> None:
        end = time.monotonic() + JOIN_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
                if thread.is_alive():
                    self.ledger.add_violation("hang", "a client got neither a reply nor an error")


def _start(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()


def terminate(server: SoakServer, ledger: Ledger) -> None:
    """Send SIGTERM and check that the server ends in time with status 0."""
    assert server.process is not None
    server.expect_end()
    server.process.signal(signal.SIGTERM)
    check_end(server, 0, ledger)


def check_end(server: SoakServer, status: int, ledger: Ledger) -> None:
    assert server.process is not None
    found = server.process.wait(END_S)
    ledger.count(ledger.ends, "die" if status else "term")
    if found is None:
        ledger.add_violation("hang", f"{server.name} does not end")
    elif found != status:
        ledger.add_violation(
            "end", f"{server.name} ended with {found}, not {status}: {tail(server.log())}"
        )


# -- faults ----------------------------------------------------------------------------------------


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
