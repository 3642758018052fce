"""A run: one round after another, what goes on through all of them, and its end."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxcache.bench.text import Filler
from tests.proofs import models
from tests.soak import checks, wire
from tests.soak.agent import Agent
from tests.soak.ledger import Ledger, Sessions
from tests.soak.plan import Round, rounds, steps
from tests.soak.reference import Reference
from tests.soak.round import RoundRun, terminate
from tests.soak.server import Flags, Life, Steady

STEADY = Flags(ram="32MB")
WIDE = "wide"


class Soak:
    """One run in `folder`. What came of it is in `ledger` and `steady`.

    `agents`: clients at once, each of which waits `pause` seconds between its steps.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        families: tuple[str, ...],
        say: Callable[[str], None],
        *,
        agents: int = 5,
        pause: float = 0.0,
    ):
        self.folder, self.seed, self.families = folder, seed, families
        self.logs = folder / "logs"
        self.ledger = Ledger(say)
        self.steady: dict[str, Steady] = {}
        self.shared = Sessions()
        self.rounds = 0
        self.pause = pause
        self.began = time.monotonic()
        self._count = agents
        self._agents: dict[tuple[str, str], list[Agent]] = {}
        self._models: dict[str, Path] = {}
        self._references: dict[str, Reference] = {}
        self._rng = random.Random(f"{seed} checks")
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self, minutes: float, seconds: float) -> None:
        """Rounds of so many seconds until the time is over, then all servers are ended.

        Raises NotStarted.
        """
        deadline = self.began + 60 * minutes
        try:
            for round_ in rounds(self.seed, self.families, seconds):
                if time.monotonic() + seconds > deadline and round_.number:
                    break
                self._round(round_)
                self.rounds += 1
                self._tell(round_)
            self._finish()
        finally:
            for one in self.steady.values():
                one.life.end()

    def _round(self, round_: Round) -> None:
        ordeal = RoundRun(self, round_)
        ordeal.run()
        if ordeal.steady is not None and round_.clear:
            self._clear(ordeal.steady)
        family = ordeal.mortal.family
        if family not in self._references:
            self._references[family] = Reference(self.model(family))
        checks.tokens(self.ledger.samples(), self._references, self._rng, self.ledger)

    def _tell(self, round_: Round) -> None:
        ledger, since = self.ledger, time.monotonic() - self.began
        held = ", ".join(
            f"{name} {one.rests[-1].nbytes >> 20} MiB"
            for name, one in self.steady.items()
            if one.rests
        )
        faults = ", ".join(fault.name for fault in round_.faults)
        ledger.say(
            f"{since / 60:5.1f} min, round {round_.number} ({round_.family}, {round_.place}; "
            f"{faults}; {round_.end}): {ledger.requests['all']} requests, "
            f"{sum(ledger.faults.values())} faults, {len(self.shared)} sessions with "
            f"{self.shared.durable_tokens} durable tokens, {ledger.checked} replies verified, "
            f"{len(ledger.violations)} violations; {held}"
        )

    # -- what goes on through all rounds -----------------------------------------------------

    def model(self, family: str) -> Path:
        """The folder of a model, made when first asked for."""
        if family not in self._models:
            path = self.folder / "models" / family
            made = models.wide(path) if family == WIDE else models.tiny(path, family)
            self._models[family] = made
        return self._models[family]

    def steady_of(self, family: str, folder: Path) -> Life:
        """The server of a family that lives as long as the run, started at its first round."""
        if family not in self.steady:
            where = {"model": self.model(family), "folder": folder, "logs": self.logs}
            life = Life(f"steady-{family}", family, STEADY, **where)
            life.start(self.ledger, self.shared)
            self.steady[family] = Steady(life)
        return self.steady[family].life

    def agents_of(self, place: str, family: str, sessions: Any) -> list[Agent]:
        """The agents of a folder and a family, whose conversations go on from round to round."""
        key = (place, family)
        if key not in self._agents:
            filler = Filler(self.model(family))
            names = [f"{place}.{family}.{number}" for number in range(self._count)]
            self._agents[key] = [
                Agent(one, filler, steps(self.seed, one), self.ledger, sessions) for one in names
            ]
        for agent in self._agents[key]:
            agent.sessions = sessions
        return self._agents[key]

    def rests(self, life: Life) -> None:
        """Note what a steady server holds now."""
        for one in self.steady.values():
            if one.life is life:
                one.rests.append(checks.rest(life, self.began))

    def lost(self, life: Life) -> None:
        """A server ended by itself; the next round starts another."""
        self.steady = {name: one for name, one in self.steady.items() if one.life is not life}

    # -- ends --------------------------------------------------------------------------------

    def _clear(self, steady: Life) -> None:
        """Everything goes, on purpose."""
        out = wire.call(steady.port, "DELETE", "/v1/cache?pinned=true")
        self.shared.clear()
        self.ledger.computed = 0
        left = checks.read(steady, "/v1/sessions", self.ledger)
        if out.status != 200 or (left and left["data"]):
            self.ledger.violation("clear", f"{steady.name}: {out.status} {out.error}, {left}")

    def _finish(self) -> None:
        """The steady servers end, and the folder that they shared is whole."""
        for name, one in self.steady.items():
            checks.kept(one.life, self.shared, self.ledger)
            checks.leaks(name, one.rests, self.ledger)
            checks.took_too_much(one.life, self.ledger)
            terminate(one.life, self.ledger)
        command = [sys.executable, "-m", "mlxcache.cli.main", "cache", "check"]
        where = ["--cache-dir", str(self.folder / "shared")]
        done = subprocess.run([*command, *where], capture_output=True, text=True, check=False)
        if done.returncode:
            self.ledger.violation("files", f"cache check: {done.stdout}{done.stderr}")
