"""One round: servers, agents and faults for some seconds, and then the checks."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcache.bench.process import Lives, tail
from mlxcache.config import parse_size
from tests.soak import checks, faults, wire
from tests.soak.agent import Agent
from tests.soak.ledger import Ledger, Sessions
from tests.soak.plan import Round
from tests.soak.server import START_S, Flags, Life, launch

if TYPE_CHECKING:
    from tests.soak.run import Soak

END_S = 90.0
JOIN_S = 2 * wire.LONGEST_S


class Servers:
    """The servers of a round, of which each request goes to one."""

    def __init__(self, steady: Life | None, mortal: Life):
        self.steady = steady
        self.mortal = mortal
        self.ready = threading.Event()

    def pick(self, share: float) -> Life | None:
        """The mortal one half of the time, if it runs; in a round of its own always."""
        mortal = self.mortal if self.ready.is_set() and not self.mortal.ending else None
        return (mortal if share < 0.5 else self.steady) or self.steady or mortal

    def every(self) -> list[Life]:
        """Both."""
        return [life for life in (self.steady, self.mortal) if life is not None]


class RoundRun:
    """What a round is made of, begun by `run`."""

    def __init__(self, soak: Soak, round_: Round):
        self.soak, self.round, self.ledger = soak, round_, soak.ledger
        self.shared = round_.place == "shared"
        family = "wide" if round_.place == "wide" else round_.family
        names = {"shared": "shared", "private": f"private-{family}", "wide": "wide"}
        self.folder: Path = soak.folder / names[round_.place]
        self.sessions = soak.shared if self.shared else Sessions()
        self.sessions.again()
        flags = Flags(round_.ram, round_.disk, round_.concurrency, round_.chunk)
        name = f"mortal-{round_.number}"
        where = {"model": soak.model(family), "folder": self.folder, "logs": soak.logs}
        self.mortal = Life(name, family, flags, **where)
        self.steady = soak.steady_of(family, self.folder) if self.shared else None
        self.servers = Servers(self.steady, self.mortal)
        self.agents: list[Agent] = soak.agents_of(self.folder.name, family, self.sessions)

    def run(self) -> None:
        """The whole round. Raises NotStarted."""
        harm = self._harm()
        over = threading.Event()
        threads = [
            self._thread(agent.work, self.servers, over, self.soak.pause) for agent in self.agents
        ]
        try:
            if self.shared:
                _start(threads)
            self._begin()
            self.servers.ready.set()
            if not self.shared:
                _start(threads)
            self._befall(harm)
        finally:
            over.set()
            self._join(threads)
        try:
            resting = [life for life in self.servers.every() if self._rests(life)]
            if self.shared:  # it also puts right what the killed one left
                checks.files(self.folder, self.ledger)
            for life in resting:
                self._look(life)
        finally:
            self._over()

    # -- what happens ------------------------------------------------------------------------

    def _harm(self) -> Callable[[], None]:
        """Harm the folder now; what is returned harms it while the server runs."""
        rng = random.Random(f"{self.soak.seed} files {self.round.number}")
        self.mortal.upset.update(self.round.files)

        def harm(names: Sequence[str]) -> None:
            for name in names:
                faults.to_files(name, self.folder, rng, self.ledger)

        now = [name for name in self.round.files if name == "index"] or self.round.files[:1]
        harm(now)
        return lambda: harm([name for name in self.round.files if name not in now])

    def _begin(self) -> None:
        mortal = self.mortal
        if self.round.starting is not None:
            what = launch("starting", mortal.faults.folder, mortal.folder, mortal.flags)
            lives = Lives(what, self.soak.model(mortal.family), self.soak.logs, START_S)
            lives.kill_starting(self.round.starting)
            self.ledger.count(self.ledger.ends, "kill while starting")
        mortal.start(self.ledger, self.sessions)

    def _befall(self, harm: Callable[[], None]) -> None:
        """All faults of a round, and the end of its server."""
        round_, over, began = self.round, threading.Event(), time.monotonic()
        threads = []
        for fault in round_.faults:
            life = self.steady if fault.on == "steady" and self.steady else self.mortal
            threads.append(self._thread(faults.befall, life, fault, self.ledger, over))
        _start(threads)
        try:
            time.sleep(round_.end_at / 2)
            harm()
            time.sleep(max(0.0, began + round_.end_at - time.monotonic()))
            self._end_under_load()
            time.sleep(max(0.0, began + round_.seconds - time.monotonic()))
        finally:
            over.set()
            self._join(threads)
            for life in self.servers.every():
                faults.end_all(life)

    def _end_under_load(self) -> None:
        """Kill it, let its thread die, or have it end; some of the last come at rest instead."""
        mortal, round_ = self.mortal, self.round
        assert mortal.server is not None
        if round_.end == "term" and round_.end_at > 0.75 * round_.seconds:
            return
        if round_.end == "kill":
            mortal.ending = True
            mortal.unwatch()
            mortal.server.kill()
            self.ledger.count(self.ledger.ends, "kill")
        elif round_.end == "die":
            mortal.ending = True
            mortal.unwatch()
            mortal.put("die")
            wire.call(mortal.port, "GET", "/v1/sessions")  # an idle thread takes no step by itself
            ends(mortal, 1, self.ledger)
        else:
            terminate(mortal, self.ledger)

    def _over(self) -> None:
        """What is left of the mortal server is ended."""
        mortal = self.mortal
        if mortal.server is None:
            return
        if not mortal.ending:
            terminate(mortal, self.ledger)
        if mortal.figures.looks:
            checks.took_too_much(mortal, self.ledger)
        if not mortal.upset and mortal.tracebacks():
            self.ledger.violation("log", f"{mortal.name} logged a traceback")
        mortal.end()

    # -- at rest -----------------------------------------------------------------------------

    def _rests(self, life: Life) -> bool:
        """Whether a server runs, and comes to rest."""
        if life.ending or life.server is None:
            return False
        if life.server.alive():
            return checks.at_rest(life, self.ledger)
        logged = tail(life.log())
        self.ledger.violation("died", f"{life.name} ended by itself: {logged}")
        life.ending = True
        self.soak.lost(life)
        return False

    def _look(self, life: Life) -> None:
        """All that can be seen of a server at rest."""
        ledger, round_ = self.ledger, self.round
        checks.counts(life, ledger)
        checks.budget(life, ledger)
        if self.shared:
            checks.kept(life, self.sessions, ledger)
            checks.linear(life, ledger)
        else:
            wire.call(life.port, "POST", "/v1/cache/prune")
        if round_.place == "private":
            checks.capped(life, ledger, parse_size(round_.disk, total=0))
        checks.clean(life, ledger)
        self.soak.rests(life)

    # -- threads -----------------------------------------------------------------------------

    def _thread(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.ledger.violation("soak", f"{type(error).__name__}: {error}")
                raise

        return threading.Thread(target=guarded)

    def _join(self, threads: list[threading.Thread]) -> None:
        end = time.monotonic() + JOIN_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
                if thread.is_alive():
                    self.ledger.violation("hang", "a client is not answered and not told why")


def _start(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()


def terminate(life: Life, ledger: Ledger) -> None:
    """SIGTERM, after which it must end in time with status 0."""
    assert life.server is not None
    life.ending = True
    life.unwatch()
    life.server.signal(signal.SIGTERM)
    ends(life, 0, ledger)


def ends(life: Life, status: int, ledger: Ledger) -> None:
    """It must be over in time, and with that status."""
    assert life.server is not None
    found = life.server.wait(END_S)
    ledger.count(ledger.ends, "die" if status else "term")
    if found is None:
        ledger.violation("hang", f"{life.name} does not end")
    elif found != status:
        ledger.violation("end", f"{life.name} ended with {found}, not {status}: {tail(life.log())}")
