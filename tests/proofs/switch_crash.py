"""Crash proof of several models: kill -9 while weights are read or dropped, and KV is written.

`python -m tests.proofs.switch_crash --kills 60` takes about 15 minutes; exit status 1 on a
violation. Each kill comes at a moment of `MOMENTS`, in turn; its log then tells what the server
was doing.
"""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import typer

from mlxcache.bench.client import Client, Refused, Reply
from mlxcache.bench.process import NotStarted, Server
from mlxcache.bench.turns import Filler
from tests.proofs.crash import Kills, Minutes, Seed, Seen, conclude, look, told, watch
from tests.proofs.pair import (
    NEW,
    WAIT_S,
    Conversation,
    Log,
    NotReached,
    excess,
    launch_of,
    make_pair,
    wrong_texts,
)

FAMILIES = ("qwen3_moe", "qwen3_next")
WEIGHTS_BYTES, KV_HEADS = 250_000_000, 4
RAM = "400MB"
"""Budget that holds one of the models with its KV."""

TALKS, TURNS = 2, 8
"""Conversations with each model, and turns after which a new one takes the place of each."""

FIRST_TOKENS, TURN_TOKENS, LONG_TOKENS, REPLY_TOKENS = 300, 40, 1200, 16
READ_S, FIRST_LOAD_S, DROP_S, RANDOM_S = 0.25, 2.0, 0.01, 3.0
"""Longest time to a kill: from the line about reading, about a first load, about dropping, and
from the start of random load, in seconds."""

WRITE_S = 2.0
"""Longest wait for a file that is being written, in seconds."""

IDLE = ("--idle-unload", "0.3s")
START_S, JOIN_S = 60.0, 60.0

READING, FIRST, DROPPED, WRITING = "weights read", "first load", "weights dropped", "KV written"
"""What a killed server was doing."""


def struck(printed: str, store: Path) -> set[str]:
    """Return what a killed server was doing, by its log and by unfinished files in `store`."""
    doing: dict[str, str] = {}
    last = ""
    for line in printed.splitlines():
        if (found := re.search(r"(\w+): loading the model for the first time", line)) is not None:
            doing[found[1]] = FIRST
        elif (found := re.search(r"(\w+): loading the weights", line)) is not None:
            doing[found[1]] = READING
        elif (found := re.search(r"(\w+): loaded in", line)) is not None:
            doing.pop(found[1], None)
        last = line
    found_now = set(doing.values())
    if re.search(r"weights of .* unloaded: ", last):
        found_now.add(DROPPED)
    if unfinished(store):
        found_now.add(WRITING)
    return found_now


def unfinished(store: Path) -> bool:
    """Return whether a file of KV is being written, or was when its server was killed."""
    return any(True for kind in ("runs", "checkpoints") for _ in (store / kind).glob("*/.*.tmp"))


@dataclass(slots=True)
class Stage:
    """A running server before it is killed.

    `talks`: the conversations, those with the model that is loaded first. `ask` sends a turn and
    checks what it fed; `aside` does so in a thread that may lose its server.
    """

    client: Client
    log: Log
    store: Path
    rng: random.Random
    talks: list[Conversation]
    ask: Callable[[Conversation, int], None]
    aside: Callable[[Conversation, int], None]

    @property
    def here(self) -> Conversation:
        return self.talks[0]

    @property
    def there(self) -> Conversation:
        return next(one for one in self.talks if one.model != self.here.model)

    def pause(self, seconds: float) -> None:
        time.sleep(self.rng.uniform(0.0, seconds))

    def ask_there(self) -> None:
        self.aside(self.there, TURN_TOKENS)

    def when(self, words: str, begin: Callable[[], None], seconds: float) -> None:
        """Call `begin`, wait until the server logs `words` once more, and a random time longer."""
        before = self.log.count(words)
        begin()
        self.log.wait(words, before + 1)
        self.pause(seconds)


def while_first_loading(stage: Stage) -> None:
    words = f"{stage.there.model}: loading the model for the first time"
    stage.when(words, stage.ask_there, FIRST_LOAD_S)


def while_reading(stage: Stage) -> None:
    stage.when(f"{stage.there.model}: loading the weights", stage.ask_there, READ_S)


def while_dropping(stage: Stage) -> None:
    stage.when(f"{stage.here.model}: weights of", stage.ask_there, DROP_S)


def while_writing(stage: Stage) -> None:
    """Return while KV of this model is written, and the other one waits for its memory."""
    stage.ask(stage.here, LONG_TOKENS)
    stage.ask_there()
    end = time.monotonic() + WRITE_S
    while not unfinished(stage.store) and time.monotonic() < end:
        time.sleep(0.0005)


def when_asked(stage: Stage) -> None:
    """Return while a client unloads this model, or after it was loaded again."""
    path = f"/v1/models/{stage.here.model}"
    words = f"{stage.here.model}: weights of"
    stage.when(words, lambda: _post(stage.client, f"{path}/unload"), 0.0)
    if stage.rng.random() < 0.5:
        _post(stage.client, f"{path}/load")
    stage.pause(DROP_S)


def _post(client: Client, path: str) -> None:
    for _ in range(20):
        url = f"http://127.0.0.1:{client.port}{path}"
        status = httpx.post(url, timeout=client.timeout).status_code
        if status == 200:
            return
        if status != 503:
            raise Refused(status, f"POST {path}")
        time.sleep(0.05)
    raise Refused(503, f"POST {path} was refused for a second")


def when_idle(stage: Stage) -> None:
    stage.when("unloaded: idle for", lambda: stage.ask(stage.here, LONG_TOKENS), DROP_S)


def while_reading_idle(stage: Stage) -> None:
    """Return while weights are read again that were dropped for being idle."""
    end = time.monotonic() + WAIT_S
    while _state(stage.client, stage.here.model) != "unloaded":
        if time.monotonic() > end:
            raise NotReached(f"{stage.here.model} is idle and not unloaded")
        time.sleep(0.02)
    while_reading(replace(stage, talks=[stage.there, stage.here]))


def _state(client: Client, model: str) -> str:
    listed = client.get("/v1/models")["data"]
    return next(str(one["state"]) for one in listed if one["id"] == model)


def at_random(stage: Stage) -> None:
    stage.aside(stage.here, TURN_TOKENS)
    stage.ask_there()
    stage.pause(RANDOM_S)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment at which to kill. `reach` returns when it has come.

    `shows`: what the server should be doing. `flags`: those of the server, besides its budget.
    `both`: turns of both models precede it, else of one.
    """

    reach: Callable[[Stage], None]
    shows: str | None = None
    flags: tuple[str, ...] = ()
    both: bool = True


MOMENTS: dict[str, Moment] = {
    "first load": Moment(while_first_loading, FIRST, both=False),
    "reload": Moment(while_reading, READING),
    "drop": Moment(while_dropping, DROPPED),
    "write": Moment(while_writing, WRITING),
    "asked": Moment(when_asked, DROPPED),
    "idle": Moment(when_idle, DROPPED, IDLE),
    "reload after idle": Moment(while_reading_idle, READING, IDLE),
    "random": Moment(at_random),
}


@dataclass(slots=True)
class Checked:
    """Turns that followed a kill: their number, and those whose whole conversation was durable.

    `most`: the largest number of tokens fed besides new ones, of all turns.
    """

    turns: int = 0
    after_kill: int = 0
    durable: int = 0
    most: int = 0


@dataclass(slots=True)
class Proof:
    """Servers of two models, killed one after another, and the violations found."""

    folder: Path
    rng: random.Random
    say: Callable[[str], None]
    families: tuple[str, str] = FAMILIES
    weights_bytes: int = WEIGHTS_BYTES
    seen: Seen = field(default_factory=Seen)
    wrong: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)
    checked: Checked = field(default_factory=Checked)
    talks: list[Conversation] = field(default_factory=list)
    over: list[Conversation] = field(default_factory=list)
    _asides: list[threading.Thread] = field(default_factory=list)
    _fresh: set[str] = field(default_factory=set)
    _named: int = 0
    _told: int = 0

    @property
    def store(self) -> Path:
        return self.folder / "cache" / "store"

    def run(self, kills: int, deadline: float) -> None:
        """Kill servers `kills` times, or until `deadline`, then check all texts.

        Raises Refused, NotStarted and NotReached.
        """
        paths = make_pair(self.folder, self.families, self.weights_bytes, KV_HEADS)
        fillers = {name: Filler(path) for name, path in paths.items()}
        names = list(MOMENTS)
        self.say(f"kills at these moments, in turn: {', '.join(names)}")
        for kill in range(kills):
            if time.monotonic() > deadline:
                break
            self._renew(fillers)
            moment = names[kill % len(names)]
            flags = ("--ram", RAM, "--disk", "4GB", *MOMENTS[moment].flags)
            server = Server(
                launch_of(paths, self.folder, *flags), paths["one"], self.folder, START_S
            )
            with self._watched(server) as log:
                self._reach(moment, server, log)
                server.kill()
            self._note_kill(moment, log)
            if self.rng.random() < 0.5 or kill == kills - 1:  # else the next server repairs first
                self.wrong += look(self.store, self.seen)
            self._tell(f"{kill + 1}/{kills} kills, {moment}")
        self._end(paths)

    def _end(self, paths: dict[str, Path]) -> None:
        """Go on with each conversation once more, stop cleanly, and compare all texts."""
        launch = launch_of(paths, self.folder, "--ram", RAM, "--disk", "4GB")
        server = Server(launch, paths["one"], self.folder, START_S)
        with self._watched(server):
            for talk in self.talks:
                self.ask(server.client, talk, TURN_TOKENS)
            found = server.client.get("/v1/cache/check")["data"]
            self.wrong += [f"the server's check found {problem}" for problem in found]
            server.stop(30.0)
        self.wrong += look(self.store, self.seen)
        self.wrong += wrong_texts(paths, self.over + self.talks)
        self._tell("texts compared with mlx-lm")

    def _renew(self, fillers: dict[str, Filler]) -> None:
        ended = [one for one in self.talks if len(one.messages) >= 2 * TURNS]
        self.over += ended
        self.talks = [one for one in self.talks if one not in ended]
        for name, filler in fillers.items():
            while sum(one.model == name for one in self.talks) < TALKS:
                self._named += 1
                self.talks.append(Conversation(name, filler, f"{name} {self._named}"))

    @contextlib.contextmanager
    def _watched(self, server: Server) -> Iterator[Log]:
        """Start a server, and read its sessions all the time until the block ends."""
        self._fresh.clear()
        client, over = server.client, threading.Event()
        self.wrong += told(client, self.seen)
        watching = threading.Thread(target=watch, args=(client, self.seen, over))
        watching.start()
        try:
            yield Log(self.folder, client.port)
        finally:
            server.kill()
            over.set()
            for thread in (watching, *self._asides):
                thread.join(JOIN_S)
            self._asides.clear()
            server.end()

    def _reach(self, name: str, server: Server, log: Log) -> None:
        """Check the conversations after the last kill, and come to the moment `name`."""
        client, moment = server.client, MOMENTS[name]
        first = "one" if not moment.both else self.rng.choice(("one", "two"))
        talks = sorted(self.talks, key=lambda one: one.model != first)
        for talk in talks if moment.both else [one for one in talks if one.model == first]:
            self.ask(client, talk, TURN_TOKENS)
        if moment.both:
            talks.reverse()
        moment.reach(
            Stage(
                *(client, log, self.store, self.rng, talks),
                ask=lambda talk, tokens: self.ask(client, talk, tokens),
                aside=lambda talk, tokens: self._ask_aside(client, talk, tokens),
            )
        )

    def ask(self, client: Client, talk: Conversation, tokens: int) -> None:
        """Send a turn, and check that it feeds only what is new or was not durable."""
        known, killed = talk.tokens, talk.name not in self._fresh
        if killed:
            known = min(known, self.seen.durable.get(talk.session or "", 0))
        begun = bool(talk.tokens)
        durable = known == talk.tokens
        reply = talk.ask(client, tokens if talk.messages else FIRST_TOKENS, REPLY_TOKENS)
        talk.note_session(client, reply)
        self._fresh.add(talk.name)
        self.seen.turns += 1
        if begun:
            self._check(talk, reply, known, after_kill=killed, durable=durable)

    def _check(
        self, talk: Conversation, reply: Reply, known: int, *, after_kill: bool, durable: bool
    ) -> None:
        more, checked = excess(reply, known), self.checked
        checked.turns += 1
        checked.after_kill += after_kill
        checked.durable += after_kill and durable
        checked.most = max(checked.most, more)
        if more > NEW:
            self.wrong.append(
                f"{talk.name}: {reply.fed_tokens} of {reply.prompt_tokens} tokens were fed, "
                f"of which {known} were {'durable' if after_kill else 'computed'}"
            )

    def _ask_aside(self, client: Client, talk: Conversation, tokens: int) -> None:
        """Send a turn in a thread. That its server is killed meanwhile is no violation."""

        def ask() -> None:
            try:
                self.ask(client, talk, tokens)
            except Refused as refused:
                if refused.status:
                    self.wrong.append(f"{talk.name}: {refused}")

        thread = threading.Thread(target=ask)
        self._asides.append(thread)
        thread.start()

    def _note_kill(self, moment: str, log: Log) -> None:
        doing = struck(log.text, self.store)
        self.struck.update(doing or {"nothing of these"})
        shows = MOMENTS[moment].shows
        self.hit[moment] += shows is None or shows in doing

    def _tell(self, what: str) -> None:
        checked = self.checked
        self.say(
            f"{what}: {self.seen.turns} turns, {checked.after_kill} after a kill "
            f"({checked.durable} of them wholly durable), at most {checked.most} tokens fed "
            f"besides new ones, {len(self.wrong)} violations"
        )
        for sentence in self.wrong[self._told :]:
            self.say(f"  {sentence}")
        self._told = len(self.wrong)


def switch_crash(kills: Kills = 60, minutes: Minutes = 60.0, seed: Seed = None) -> None:
    """Kill servers of two models while they load, unload and switch; check what survives."""
    seed = random.randrange(10**6) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="mlxcache-switch-crash-"))
    proof = Proof(folder, random.Random(seed), lambda line: print(line, flush=True))
    try:
        proof.run(kills, time.monotonic() + 60 * minutes)
    except (NotStarted, NotReached, Refused) as error:
        proof.wrong.append(f"a server failed: {error}")
    summary = f"seed {seed}: killed while {dict(proof.struck)}; moments hit: {dict(proof.hit)}"
    conclude(folder, proof.wrong, summary, shown=bool(proof.checked.durable))


if __name__ == "__main__":
    typer.run(switch_crash)
