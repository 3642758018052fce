"""Cost of the next turn after a server was killed right after a reply and started again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from mlxcache.bench import report
from mlxcache.bench.checks import Check
from mlxcache.bench.client import Client, Refused, Reply
from mlxcache.bench.measure import by, middle
from mlxcache.bench.process import OURS, Lives, NotStarted
from mlxcache.bench.scenarios import Visit

LONG_S, SOONER = 10.0, 20.0
"""Seconds of a cold first token, and how many times sooner it must come after a restart.

The bound is checked if the cold one takes at least LONG_S seconds."""


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of three turns: cold, warm, and one after kill -9 and a new start.

    The times `cold_s`, `warm_s` and, of the third turn, `again_s` are seconds until the first text.
    Counts are those of the third turn, None if the server reports none: `restored_tokens` came from
    disk, and `lost_tokens` is the number of tokens of the cold turn and its reply whose
    KV was computed, less `cached_tokens`. It is 0 or less if all of them were still cached.
    """

    cold_s: float
    warm_s: float
    again_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    restored_tokens: int | None
    lost_tokens: int | None


@dataclass(slots=True)
class Rounds:
    """Rounds of each server by its name, and failures as text."""

    taken: dict[str, list[Round]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def medians(self, server: str) -> dict[str, float | None]:
        """Return the median of each field of `Round`, by name, over the rounds of `server`.

        The additional entry `sooner` is the median of `cold_s` divided by `again_s` of the same
        round. An entry is None if no round has the figure.
        """
        rounds = self.taken[server]
        found = {name: middle(getattr(one, name) for one in rounds) for name in _FIGURES}
        return found | {"sooner": middle(by(one.cold_s, one.again_s) for one in rounds)}

    def ratio(self, server: str) -> float | None:
        """Return mlxcache's first-token time after a restart, divided by that of `server`.

        It is the median of this ratio over the rounds, or None if no round can be compared.
        """
        pairs = zip(self.taken[OURS], self.taken[server], strict=False)
        return middle(by(mine.again_s, other.again_s) for mine, other in pairs)


_FIGURES = tuple(Round.__dataclass_fields__)
_COLUMNS = {
    "cold_s": "cold",
    "warm_s": "warm",
    "again_s": "restarted",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "restored_tokens": "from disk",
}


def play(
    lives: Sequence[Lives],
    runs: int,
    visit: Callable[[Client, int], Visit],
    on_step: Callable[[str], None],
) -> Rounds:
    """Run `runs` rounds at each server in turn and return their figures. Blocks.

    A server that fails is left out of later rounds. `visit(client, round)` makes the conversations
    of a round at the server of `client`; `round` counts from 0. `on_step` is called with a text at
    the start of each round at each server.
    """
    rounds = Rounds({one.name: [] for one in lives})
    out: set[str] = set()
    for run in range(runs):
        for one in [*lives[run % len(lives) :], *lives[: run % len(lives)]]:
            if one.name in out:
                continue
            on_step(f"{run + 1}/{runs} restart {one.name}")
            try:
                rounds.taken[one.name].append(_round(one, visit(one.server.client, run)))
            except (Refused, NotStarted) as error:
                out.add(one.name)
                rounds.failures.append(f"{one.name}, restart: {error}")
    return rounds


def _round(lives: Lives, visit: Visit) -> Round:
    cold = visit.open("main")
    talk = visit.talk("main")
    warm = talk.ask(visit.words())
    lives.kill()
    talk.reconnect(lives.server.client)
    again = talk.ask(visit.words())
    cached = again.cached_tokens
    return Round(
        cold_s=cold.first_s,
        warm_s=warm.first_s,
        again_s=again.first_s,
        prompt_tokens=again.prompt_tokens,
        cached_tokens=cached,
        restored_tokens=_restored(talk.client, again),
        lost_tokens=None if cached is None else cold.conversation_tokens - cached,
    )


def _restored(client: Client, reply: Reply) -> int | None:
    """Fetch the number of restored tokens of the request of `reply`.

    Returns None if the server does not report it; only mlxcache does.
    """
    if reply.request is None:
        return None
    with contextlib.suppress(Refused):
        record: Mapping[str, Any] = client.get(f"/v1/requests/{reply.request}")
        return record.get("restored_tokens")
    return None


def checks(rounds: Rounds) -> list[Check]:
    """Return the bounds on mlxcache's rounds.

    No round may fail, and no token of a round's cold turn may be lost: `Round.lost_tokens` must be
    0 or less. If the median of `Round.cold_s` is at least `LONG_S` seconds, the figure `sooner` of
    `Rounds.medians` must be at least `SOONER`.
    """
    failed = sum(failure.startswith(f"{OURS},") for failure in rounds.failures)
    found = [Check("restarts that failed here", failed, 0)]
    mine = rounds.medians(OURS)
    lost = max((one.lost_tokens or 0 for one in rounds.taken[OURS]), default=0)
    found.append(Check("tokens of the turn before the last that a kill cost", lost, 0))
    if (mine["cold_s"] or 0) >= LONG_S and mine["sooner"] is not None:
        name = "first token after a restart, times sooner than cold"
        found.append(Check(name, mine["sooner"], SOONER, least=True))
    return found


def show(console: Console, rounds: Rounds, title: str) -> None:
    """Print a table of the medians of each server, then the failures."""
    table = report.table_of(f"{title}: killed after the second turn; first tokens", "server")
    for name in (*_COLUMNS.values(), "sooner than cold", "× restarted"):
        table.add_column(name, justify="right")
    for server in rounds.taken:
        found = rounds.medians(server)
        cells = [report.cell(figure, found[figure]) for figure in _COLUMNS]
        ratio = None if server == OURS else rounds.ratio(server)
        table.add_row(server, *cells, report.ratio(found["sooner"]), report.ratio(ratio))
    console.print(table)
    for failure in rounds.failures:
        console.print(failure, style="red", markup=False)


def as_json(rounds: Rounds) -> dict[str, Any]:
    """Return an object for JSON with `medians`, `ratios`, `rounds` and `failures`.

    The first three are objects by the server's name: the results of `Rounds.medians` and
    `Rounds.ratio` (for servers other than mlxcache), and the list of rounds. Times are in seconds.
    """
    return {
        "medians": {server: rounds.medians(server) for server in rounds.taken},
        "ratios": {server: rounds.ratio(server) for server in rounds.taken if server != OURS},
        "rounds": {name: [asdict(one) for one in taken] for name, taken in rounds.taken.items()},
        "failures": rounds.failures,
    }
