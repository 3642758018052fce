"""A run of the soak: its rounds, and the servers and agents that outlive a round."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mlxcache.bench.turns import Filler
from tests.proofs import models
from tests.proofs.features.plan import draw_conversation
from tests.proofs.features.play import Difference, Pair, play
from tests.proofs.features.servers import Outside, Running
from tests.soak import checks, wire
from tests.soak.agent import Agent
from tests.soak.ledger import Ledger, SessionTracker
from tests.soak.plan import Round, draw_rounds, draw_steps
from tests.soak.reference import Reference
from tests.soak.round import RoundRun, terminate
from tests.soak.server import Flags, SoakServer, SteadyServer

STEADY = Flags(ram="32MB")
WIDE = "wide"

FUZZED = 3
"""Conversations of the fuzzer after each round with a steady server."""


class Soak:
    """One run in `folder`; its results are in `ledger` and `steady`.

    `agents`: number of concurrent clients. `pause`: seconds between the steps of each. `print_line`
    prints a line of progress.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        families: tuple[str, ...],
        print_line: Callable[[str], None],
        *,
        agents: int = 5,
        pause: float = 0.0,
    ):
        self.folder, self.seed, self.families = folder, seed, families
        self.logs = folder / "logs"
        self.ledger = Ledger(print_line)
        self.steady: dict[str, SteadyServer] = {}
        self._sessions: dict[str, SessionTracker] = {}
        self._cold: dict[str, Outside] = {}
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
        """Run rounds of `seconds` until the time is over, then end all servers; blocks.

        Raises NotStarted.
        """
        deadline = self.began + 60 * minutes
        try:
            for round_ in draw_rounds(self.seed, self.families, seconds):
                if time.monotonic() + seconds > deadline and round_.number:
                    break
                self._round(round_)
                self.rounds += 1
                self._report(round_)
            self._finish()
        finally:
            for one in self.steady.values():
                one.server.close()
            for cold in self._cold.values():
                cold.close()

    def _round(self, round_: Round) -> None:
        round_run = RoundRun(self, round_)
        round_run.run()
        if round_run.steady is not None and round_.clear:
            self._clear(round_run.steady)
        if any(one.server is round_run.steady for one in self.steady.values()):
            assert round_run.steady is not None
            self._play_features(round_run.steady, round_.number)
        family = round_run.brief.family
        if family not in self._references:
            self._references[family] = Reference(self.model(family))
        checks.check_tokens(self.ledger.take_samples(), self._references, self._rng, self.ledger)

    def _play_features(self, steady: SoakServer, number: int) -> None:
        """Play some conversations of the fuzzer to a server that has been through the round."""
        family, model = steady.family, self.model(steady.family)
        if family not in self._cold:
            self._cold[family] = Outside(model, self.folder / f"cold-{family}", "--disk", "off")
        warm = Running(f"http://127.0.0.1:{steady.port}")
        pair = Pair(family, model, warm, self._cold[family], thinks=False, roomy=False)
        first = 1000 * self.seed + FUZZED * number
        for seed in range(first, first + FUZZED):
            try:
                play(draw_conversation(seed), pair)
            except Difference as error:
                self.ledger.add_violation("features", f"{steady.name}, seed {seed}: {error}")
        self.ledger.count(self.ledger.checks, "computed", pair.counts.tokens)
        self.ledger.count(self.ledger.requests, "of the fuzzer", pair.counts.requests)

    def _report(self, round_: Round) -> None:
        ledger, since = self.ledger, time.monotonic() - self.began
        held = ", ".join(
            f"{name} {one.rests[-1].nbytes >> 20} MiB"
            for name, one in self.steady.items()
            if one.rests
        )
        faults = ", ".join(fault.name for fault in round_.faults)
        ledger.print_line(
            f"{since / 60:5.1f} min, round {round_.number} ({round_.family}, {round_.place}; "
            f"{faults}; {round_.end}): {ledger.requests['all']} requests, "
            f"{sum(ledger.faults.values())} faults, {len(self.shared_sessions)} sessions with "
            f"{self.shared_sessions.durable_tokens} durable tokens, "
            f"{ledger.checks['checked']} replies verified, "
            f"{len(ledger.violations)} violations; {held}"
        )

    # -- shared by all rounds -----------------------------------------------------

    @property
    def shared_sessions(self) -> SessionTracker:
        return self.sessions_of("shared")

    def sessions_of(self, place: str) -> SessionTracker:
        return self._sessions.setdefault(place, SessionTracker())

    def model(self, family: str) -> Path:
        if family not in self._models:
            path = self.folder / "models" / family
            made = models.wide(path) if family == WIDE else models.tiny(path, family)
            self._models[family] = made
        return self._models[family]

    def steady_of(self, family: str, folder: Path) -> SoakServer:
        """Return the steady server of a family, started on first use. Raises NotStarted."""
        if family not in self.steady:
            where = {"model": self.model(family), "folder": folder, "logs": self.logs}
            server = SoakServer(f"steady-{family}", family, STEADY, **where)
            server.start(self.ledger, self.shared_sessions)
            self.steady[family] = SteadyServer(server)
        return self.steady[family].server

    def agents_of(self, place: str, family: str) -> list[Agent]:
        key = (place, family)
        if key not in self._agents:
            filler = Filler(self.model(family))
            names = [f"{place}.{family}.{number}" for number in range(self._count)]
            self._agents[key] = [
                Agent(one, filler, draw_steps(self.seed, one), self.ledger, self.sessions_of(place))
                for one in names
            ]
        return self._agents[key]

    def record_idle(self, server: SoakServer) -> None:
        for one in self.steady.values():
            if one.server is server:
                one.rests.append(checks.measure_idle(server, self.began))

    def drop_steady(self, server: SoakServer) -> None:
        self.steady = {name: one for name, one in self.steady.items() if one.server is not server}

    # -- ends --------------------------------------------------------------------------------

    def _clear(self, steady: SoakServer) -> None:
        """Clear the cache and all sessions, and check that none is left."""
        out = wire.call(steady.port, "DELETE", "/v1/cache?pinned=true")
        self.shared_sessions.clear()
        self.ledger.checks["computed"] = 0
        for (place, _), agents in self._agents.items():
            if place == "shared":  # servers of other families have lost their files too
                for agent in agents:
                    agent.forget_computed()
        left = checks.get_json(steady, "/v1/sessions", self.ledger)
        if out.status != 200 or (left and left["data"]):
            self.ledger.add_violation("clear", f"{steady.name}: {out.status} {out.error}, {left}")

    def _finish(self) -> None:
        for name, one in self.steady.items():
            checks.check_sessions(one.server, self.shared_sessions, self.ledger)
            checks.check_leaks(name, one.rests, self.ledger)
            checks.check_overshoot(one.server, self.ledger)
            terminate(one.server, self.ledger)
        command = [sys.executable, "-m", "mlxcache.cli.main", "cache", "check"]
        where = ["--cache-dir", str(self.folder / "shared")]
        done = subprocess.run([*command, *where], capture_output=True, text=True, check=False)
        if done.returncode:
            self.ledger.add_violation("files", f"cache check: {done.stdout}{done.stderr}")
