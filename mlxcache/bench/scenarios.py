"""Scenarios: typical requests of a coding agent, each a function that returns an `Outcome`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxcache.bench.client import Client, Reply
from mlxcache.bench.text import Filler

TURN_TOKENS = 34
"""Tokens of a message. With the end of the reply and the template, a turn has about 50 new ones."""

SYSTEM_SHARE = 0.75
GROWN_TURNS = 6
GROWN_SHARE = 0.1
"""Share of the tokens in each user message of a grown conversation; the system prompt has the
rest."""

BRANCH_TURN = 3
CROWD = tuple(f"crowd{number}" for number in range(8))


@dataclass(slots=True)
class Conversation:
    """Conversation as a client keeps it: each turn sends all messages, with unchanged replies."""

    client: Client
    max_tokens: int
    messages: list[dict[str, Any]]

    def reconnect(self, client: Client) -> None:
        self.client = client

    def ask(self, text: str) -> Reply:
        """Send `text` as the next user message and append the reply. Blocks. Raises Refused."""
        self.messages.append({"role": "user", "content": text})
        reply = self.client.chat(self.messages, self.max_tokens)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply


@dataclass(frozen=True, slots=True)
class Outcome:
    replies: Sequence[Reply]
    wall_s: float


@dataclass(slots=True)
class Visit:
    """One repetition of the scenarios at one server, with its conversations (`talks`, by name).

    All text is generated from `seed`; different seeds share no text. A conversation begins when a
    scenario first needs it, and later scenarios continue it. Unless said otherwise, its first
    prompt has `tokens` tokens, three quarters of them in the system prompt. `said` counts the texts
    generated so far, so that each is new.

    - `main` is the conversation of most scenarios.
    - `other` and `revised` have the same system prompt as `main`, then a short message.
    - `billed` has a system prompt whose first line changes each turn.
    - `grown` reaches the length of the others over six turns.
    - Eight conversations whose names begin with `crowd` run at once, each an eighth as long.
    """

    client: Client
    filler: Filler
    tokens: int
    reply_tokens: int
    seed: str
    talks: dict[str, Conversation] = field(default_factory=dict)
    has_branched: bool = False
    said: int = 0

    def open(self, name: str) -> Reply:
        """Create the conversation `name`, which must not exist yet, and run its first turn."""
        first = self.prepare(name)
        return self.talks[name].ask(first)

    def prepare(self, name: str) -> str:
        """Create the conversation `name` and return its first message, without sending it."""
        system, first = self._parts(name)
        messages = [{"role": "system", "content": system}]
        self.talks[name] = Conversation(self.client, self.reply_tokens, messages)
        return first

    def talk(self, name: str) -> Conversation:
        if name not in self.talks:
            self.open(name)
        return self.talks[name]

    def words(self, tokens: int = TURN_TOKENS) -> str:
        """Return a new message of `tokens` tokens, different from all others of this repetition."""
        self.said += 1
        return self.filler.text(tokens, f"{self.seed}/{self.said}")

    @property
    def grown_turn_tokens(self) -> int:
        return round(self.tokens * GROWN_SHARE)

    def grown(self) -> Conversation:
        if "grown" not in self.talks:
            grown(self)
        return self.talks["grown"]

    def _parts(self, name: str) -> tuple[str, str]:
        system = round(self.tokens * SYSTEM_SHARE)
        first = self.tokens - system
        if name in ("other", "revised"):
            return self._text("main system", system), self._text(f"{name} first", TURN_TOKENS)
        if name == "billed":
            body = self._text("billed system", system)
            return f"{self.attribution()}\n{body}", self._text("billed first", first)
        if name == "grown":
            turn = self.grown_turn_tokens
            rest = self.tokens - GROWN_TURNS * turn
            return self._text("grown system", rest), self._text("grown first", turn)
        if name.startswith("crowd"):
            share = max(64, self.tokens // len(CROWD))
            return self._text(f"{name} system", share // 2), self._text(name, share - share // 2)
        return self._text(f"{name} system", system), self._text(f"{name} first", first)

    def _text(self, what: str, tokens: int) -> str:
        return self.filler.text(tokens, f"{self.seed}/{what}")

    def attribution(self) -> str:
        """Return a first line of a system prompt, as of Claude Code: it differs in each call."""
        self.said += 1
        cch = random.Random(f"{self.seed}/{self.said}").getrandbits(20)
        return (
            f"x-anthropic-billing-header: cc_version=2.1.329.4c1; cc_entrypoint=cli; cch={cch:05x};"
        )

    def together(self, texts: Mapping[str, str]) -> Outcome:
        return at_once([partial(self.talks[name].ask, text) for name, text in texts.items()])


def at_once(asks: Sequence[Callable[[], Reply]]) -> Outcome:
    """Make several requests at the same time, each in a thread, and wait for all replies."""
    replies: list[Reply] = []
    failed: list[Exception] = []

    def go(ask: Callable[[], Reply]) -> None:
        try:
            replies.append(ask())
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            failed.append(error)

    # daemons: an exception in the caller, such as the end of its time, does not wait for replies
    threads = [threading.Thread(target=go, args=(ask,), daemon=True) for ask in asks]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return Outcome(replies, time.perf_counter() - began)


def _one(reply: Reply) -> Outcome:
    return Outcome([reply], reply.total_s)


def cold(visit: Visit) -> Outcome:
    """Measure the first turn of `main`, which must be new."""
    return _one(visit.open("main"))


def warm(visit: Visit) -> Outcome:
    """Measure the next turn of `main`, with about 50 new tokens."""
    return _one(visit.talk("main").ask(visit.words()))


def edited(visit: Visit) -> Outcome:
    """Measure the last turn of `revised`, sent again with another user message."""
    talk = visit.talk("revised")
    if len(talk.messages) < 5:
        talk.ask(visit.words())
    before = [*talk.messages[:-2], {"role": "user", "content": visit.words()}]
    return _one(visit.client.chat(before, visit.reply_tokens))


def second(visit: Visit) -> Outcome:
    """Measure the first turn of `other`, whose system prompt, that of `main`, is cached."""
    visit.talk("main")
    return _one(visit.open("other"))


def in_turn(visit: Visit) -> Outcome:
    """Measure two turns each of `main` and `other`, alternating."""
    talks = [visit.talk("main"), visit.talk("other")] * 2
    replies = [talk.ask(visit.words()) for talk in talks]
    return Outcome(replies, sum(reply.total_s for reply in replies))


def attribution(visit: Visit) -> Outcome:
    """Measure the next turn of `billed`, whose system prompt has a new first line."""
    talk = visit.talk("billed")
    system = talk.messages[0]["content"]
    body = system.partition("\n")[2]
    talk.messages[0] = {"role": "system", "content": f"{visit.attribution()}\n{body}"}
    return _one(talk.ask(visit.words()))


def concurrent(visit: Visit) -> Outcome:
    """Measure the first turns of eight new conversations, sent at the same time."""
    return visit.together({name: visit.prepare(name) for name in CROWD})


def concurrent_warm(visit: Visit) -> Outcome:
    """Measure the next turns of the eight conversations of `concurrent`, sent at once."""
    for name in CROWD:
        visit.talk(name)
    return visit.together({name: visit.words() for name in CROWD})


def grown(visit: Visit) -> Outcome:
    """Measure all six turns of `grown`; the figures are averages over them."""
    replies = [visit.open("grown")]
    talk = visit.talks["grown"]
    replies += [talk.ask(visit.words(visit.grown_turn_tokens)) for _ in range(GROWN_TURNS - 1)]
    return Outcome(replies, sum(reply.total_s for reply in replies))


def last_edited(visit: Visit) -> Outcome:
    """Measure the last turn of `grown`, sent again with another user message."""
    before = visit.grown().messages[:-2]
    said = {"role": "user", "content": visit.words(visit.grown_turn_tokens)}
    return _one(visit.client.chat([*before, said], visit.reply_tokens))


def regenerated(visit: Visit) -> Outcome:
    """Measure a second reply to the last prompt of `grown`."""
    return _one(visit.client.chat(visit.grown().messages[:-1], visit.reply_tokens))


def branched(visit: Visit) -> Outcome:
    """Measure a turn that leaves `grown` in the middle of its third user message."""
    return _branch(visit)


def branched_again(visit: Visit) -> Outcome:
    """Measure a second turn that leaves `grown` at the same place as `branched`."""
    if not visit.has_branched:
        _branch(visit)
    return _branch(visit)


def _branch(visit: Visit) -> Outcome:
    visit.has_branched = True
    messages = visit.grown().messages
    at = 2 * BRANCH_TURN - 1  # after the system prompt, and two messages for each turn before
    lines = messages[at]["content"].splitlines()
    kept = "\n".join(lines[: max(1, len(lines) // 2)])
    text = f"{kept}\n{visit.words(visit.grown_turn_tokens // 2)}"
    said = {"role": "user", "content": text}
    return _one(visit.client.chat([*messages[:at], said], visit.reply_tokens))


def returned(visit: Visit) -> Outcome:
    """Measure the next turn of `grown`, after turns that branched off from it."""
    return _one(visit.grown().ask(visit.words()))


Scenario = Callable[[Visit], Outcome]

SCENARIOS: dict[str, Scenario] = {
    one.__name__: one
    for one in (
        cold, warm, second, edited, in_turn, attribution, concurrent, concurrent_warm,
        grown, last_edited, regenerated, branched, branched_again, returned,
    )
}  # fmt: skip
"""Scenarios in the order of a repetition; later ones continue earlier conversations."""

PARTING = ("grown", "last_edited", "regenerated", "branched", "branched_again", "returned")
"""Scenarios on the visit's `grown`, with prompts that diverge from it at different depths."""

AGAIN = (
    "warm", "edited", "in_turn", "concurrent_warm", "last_edited", "branched_again", "returned",
)  # fmt: skip
"""Scenarios that continue or vary existing conversations, so that a visit can repeat them."""
