"""Crash proof: kill -9 at random moments under load, and checks of the store after each.

`python -m tests.proofs.crash --kills 200` takes about 20 minutes; exit status 1 on a violation.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxcache.bench.client import Client, Refused
from mlxcache.bench.process import NotStarted, Server, ours
from mlxcache.bench.turns import Filler
from mlxcache.errors import NotFound, StoreError
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store
from tests.proofs import models
from tests.proofs.pair import Conversation

TALKERS, TURNS = 3, 6
FIRST_TOKENS, TURN_TOKENS, REPLY_TOKENS = 400, 60, 24
FAMILIES = ("llama", "qwen3_5", "gemma3")
LIMIT = "2GB"
LATEST_S = 2.5
"""Longest time from the start of the load to a kill, in seconds."""

STARTING, START_KILL_S = 0.1, 3.0
"""Share of kills preceded by one while the server starts; longest time until that, in seconds."""

WATCH_S, WATCHED = 0.03, 16
"""Interval in seconds at which the latest sessions are read, and their number."""

OTHER_FILES = 16
"""Most files of a store besides runs and checkpoints: the index and its log, locks."""

START_S = 60.0


@dataclass(slots=True)
class Seen:
    """Reports of servers before they were killed: largest `durable_tokens` by session."""

    durable: dict[str, int] = field(default_factory=dict)
    turns: int = 0

    def take(self, sessions: Sequence[Any]) -> None:
        for one in sessions:
            self.durable[one["id"]] = max(one["durable_tokens"], self.durable.get(one["id"], 0))


class Talker:
    """Client with conversations of a few turns, one after another; it resumes after a kill."""

    def __init__(self, model: Path, name: str):
        self._new = (Conversation(str(model), Filler(model), f"{name}/{at}") for at in count())
        self._conversation = next(self._new)

    def talk(self, client: Client, seen: Seen, over: threading.Event) -> None:
        while not over.is_set():
            if len(self._conversation.messages) >= 2 * TURNS:
                self._conversation = next(self._new)
            tokens = TURN_TOKENS if self._conversation.messages else FIRST_TOKENS
            try:
                self._conversation.ask(client, tokens, REPLY_TOKENS)
            except Refused as refused:
                if refused.status == 0:
                    return
                raise
            seen.turns += 1


def watch(client: Client, seen: Seen, over: threading.Event) -> None:
    """Read the latest sessions all the time until the server is gone, or `over` is set."""
    while not over.wait(WATCH_S):
        try:
            seen.take(client.get(f"/v1/sessions?limit={WATCHED}")["data"])
        except Refused:
            return


def under_load(server: Server, talkers: Sequence[Talker], seen: Seen, seconds: float) -> None:
    """Put the server under load, and kill it after `seconds`. Raises Refused, NotStarted."""
    client, over = server.client, threading.Event()
    failed: list[BaseException] = []

    def guarded(work: Callable[[Client, Seen, threading.Event], None]) -> None:
        try:
            work(client, seen, over)
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failed.append(error)

    works = [*(one.talk for one in talkers), watch]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    server.kill()
    over.set()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def look(folder: Path, seen: Seen) -> list[str]:
    """Open the store as the next server does; violations, as sentences."""
    try:
        store = Store.open(folder, "", None)
    except StoreError as error:
        return [f"the store does not open: {error}"]
    try:
        wrong = [f"{problem.path.name} {problem.what}" for problem in store.check()]
        stats = store.stats()
        known = stats.runs + stats.checkpoints + stats.quarantined
        files = sum(path.is_file() for path in folder.rglob("*"))
        if files > known + OTHER_FILES:
            wrong.append(f"{files} files, of which the index knows {known}")
        if stats.quarantined:
            wrong.append(f"{stats.quarantined} files were found damaged")
        return wrong + _lost(store, seen)
    finally:
        store.close()


def _lost(store: Store, seen: Seen) -> list[str]:
    sessions, wrong = Sessions(store.database), []
    for id, before in seen.durable.items():
        try:
            listed = sessions.listed([sessions.get(id)])
        except NotFound:
            wrong.append(f"session {id} is gone")
            continue
        found = store.on_disk(listed, sessions.ids_of)[0].disk.tokens[0]
        if found < before:
            wrong.append(f"session {id} had {before} durable tokens and has {found}")
    return wrong


def told(client: Client, seen: Seen) -> list[str]:
    """Compare the next server's sessions with the reports of killed ones; violations."""
    listed: Any = client.get("/v1/sessions?limit=100000")["data"]
    now = {one["id"]: one["durable_tokens"] for one in listed}
    return [
        f"session {id}: the server reports {now.get(id, 'no')} durable tokens, not {before}"
        for id, before in seen.durable.items()
        if now.get(id, -1) < before
    ]


@dataclass(slots=True)
class Proof:
    """Servers of several models that take turns on one folder, and the violations found."""

    folder: Path
    kills: int
    rng: random.Random
    say: Callable[[str], None]
    seen: Seen = field(default_factory=Seen)
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    _said: int = 0

    def run(self, families: Sequence[str], deadline: float) -> None:
        """Kill servers `kills` times, or until `deadline`. Raises Refused, NotStarted."""
        store = self.folder / "cache" / "store"
        with ExitStack() as stack:
            servers = {family: self._server(family, stack) for family in families}
            for kill in range(self.kills):
                if time.monotonic() > deadline:
                    break
                family = families[kill % len(families)]
                server, talkers = servers[family]
                # either the next server or `look` repairs the store first, at random
                if self.rng.random() < STARTING:
                    server.kill_starting(self.rng.uniform(0.0, START_KILL_S))
                    self.done["while starting"] += 1
                self.wrong += told(server.client, self.seen)
                under_load(server, talkers, self.seen, self.rng.uniform(0.0, LATEST_S))
                self.done[family] += 1
                if self.rng.random() < 0.5 or kill == self.kills - 1:
                    self.wrong += look(store, self.seen)
                    self.done["looks"] += 1
                self._tell(kill)

    def _server(self, family: str, stack: ExitStack) -> tuple[Server, list[Talker]]:
        model = models.tiny(self.folder / family, family)
        launch = ours(self.folder / "cache", "--disk", LIMIT, "--ram", "1GB")
        server = stack.enter_context(Server(launch, model, self.folder, START_S))
        return server, [Talker(model, f"{family} {number}") for number in range(TALKERS)]

    def _tell(self, kill: int) -> None:
        durable_tokens = sum(self.seen.durable.values())
        self.say(
            f"{kill + 1}/{self.kills} kills, {self.seen.turns} turns, {len(self.seen.durable)} "
            f"sessions with {durable_tokens} durable tokens seen, {len(self.wrong)} violations"
        )
        for sentence in self.wrong[self._said :]:
            self.say(f"  {sentence}")
        self._said = len(self.wrong)


Kills = Annotated[int, typer.Option(min=1, help="Number of kills.")]
Families = Annotated[
    list[str] | None,
    typer.Option("--family", help="A family of models; repeatable, they take turns."),
]
Minutes = Annotated[float, typer.Option(help="Time in minutes after which no kill begins.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random moments; default: a new one.")]


def conclude(folder: Path, wrong: Sequence[str], summary: str, *, shown: bool) -> None:
    """Print the verdict. Exit with 1 on a violation, or if nothing was `shown`; keep the files."""
    print(summary)
    print("\n".join(wrong) or "no violation")
    if wrong or not shown:
        print(f"files kept for inspection: {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


def crash(
    kills: Kills = 200, family: Families = None, minutes: Minutes = 60.0, seed: Seed = None
) -> None:
    """Kill servers under load at random moments; check that durable tokens survive each."""
    seed = random.randrange(10**6) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="mlxcache-crash-"))
    proof = Proof(folder, kills, random.Random(seed), lambda line: print(line, flush=True))
    try:
        proof.run(family or FAMILIES, time.monotonic() + 60 * minutes)
    except (NotStarted, Refused) as error:
        proof.wrong.append(f"a server failed: {error}")
    summary = f"seed {seed}: {dict(proof.done)}, {proof.seen.turns} turns answered"
    conclude(folder, proof.wrong, summary, shown=bool(proof.seen.durable))


if __name__ == "__main__":
    typer.run(crash)
