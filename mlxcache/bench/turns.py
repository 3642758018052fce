"""What clients say: filler text, conversations, and scenarios of a coding agent.

A scenario is a function that returns an `Outcome`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlxcache.bench.client import Reply
from mlxcache.bench.process import Server

WORDS = [
    "the", "file", "path", "tool", "command", "agent", "session", "cache", "prefix",
    "token", "model", "server", "request", "response", "error", "value", "string",
    "number", "array", "object", "when", "with", "from", "that", "this", "into", "must",
    "should", "may", "return", "read", "write", "edit", "search", "run", "test", "build",
    "check", "result", "output", "input", "user", "system", "message", "history", "state",
    "memory", "budget", "window", "layer", "thread", "queue", "order", "branch", "commit",
    "release", "import", "export",
]  # fmt: skip


class Filler:
    """Generator of text with an exact number of tokens of the model in `folder`.

    Raises OSError or ValueError if its tokenizer.json is missing or cannot be parsed.
    """

    def __init__(self, folder: Path):
        self._tokenizer = Tokenizer.from_str(
            (folder / "tokenizer.json").read_text(encoding="utf-8")
        )

    def text(self, tokens: int, seed: str) -> str:
        """Return text of exactly `tokens` tokens.

        Texts of different seeds differ within their first few tokens.
        """
        rng = random.Random(seed)
        out = [f"{rng.getrandbits(32):08x}:"]
        while True:
            out += [self._sentence(rng) for _ in range(tokens // 16 + 1)]
            text = "\n".join(out)
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            if len(encoding) >= tokens:
                return text[: encoding.offsets[tokens - 1][1]]

    def _sentence(self, rng: random.Random) -> str:
        words = [rng.choice(WORDS) for _ in range(rng.randrange(6, 18))]
        return " ".join([words[0].capitalize(), *words[1:]]) + "."


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

    server: Server
    max_tokens: int
    messages: list[dict[str, Any]]

    def ask(self, text: str) -> Reply:
        """Send `text` as the next user message and append the reply. Blocks. Raises Refused."""
        self.messages.append({"role": "user", "content": text})
        reply = self.server.client.chat(self.messages, self.max_tokens)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply

    def ask_instead(self, at: int, text: str) -> Reply:
        """Send `text` in place of the messages from `at` on, which stay in the conversation."""
        said = {"role": "user", "content": text}
        return self.server.client.chat([*self.messages[:at], said], self.max_tokens)


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

    server: Server
    filler: Filler
    tokens: int
    reply_tokens: int
    seed: str
    talks: dict[str, Conversation] = field(default_factory=dict)
    has_branched: bool = False
    said: int = 0

    def prepare(self, name: str) -> str:
        """Create the conversation `name` and return its first message, without sending it."""
        system, first = self._parts(name)
        messages = [{"role": "system", "content": system}]
        self.talks[name] = Conversation(self.server, self.reply_tokens, messages)
        return first

    def open(self, name: str) -> Reply:
        """Create the conversation `name`, which must not exist yet, and run its first turn."""
        first = self.prepare(name)
        return self.talks[name].ask(first)

    def talk(self, name: str) -> Conversation:
        if name not in self.talks:
            begin = grown if name == "grown" else partial(Visit.open, name=name)
            begin(self)
        return self.talks[name]

    def go_on(self, name: str) -> Reply:
        return self.talk(name).ask(self.words())

    def words(self, tokens: int = TURN_TOKENS) -> str:
        """Return a new message of `tokens` tokens, different from all others of this repetition."""
        self.said += 1
        return self.filler.text(tokens, f"{self.seed}/{self.said}")

    @property
    def grown_turn_tokens(self) -> int:
        return round(self.tokens * GROWN_SHARE)

    def _parts(self, name: str) -> tuple[str, str]:
        system = round(self.tokens * SYSTEM_SHARE)
        first = self.tokens - system
        if name in ("other", "revised"):
            return self._text("main system", system), self._text(f"{name} first", TURN_TOKENS)
        if name == "billed":
            body = self._text("billed system", system)
            return f"{self.attribution()}\n{body}", self._text("billed first", first)
        if name == "grown":
            first = self.grown_turn_tokens
            system = self.tokens - GROWN_TURNS * first
        elif name.startswith("crowd"):
            share = max(64, self.tokens // len(CROWD))
            system, first = share // 2, share - share // 2
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


def _outcome(*replies: Reply) -> Outcome:
    return Outcome(replies, sum(reply.total_s for reply in replies))


def cold(visit: Visit) -> Outcome:
    """Measure the first turn of `main`, which must be new."""
    return _outcome(visit.open("main"))


def warm(visit: Visit) -> Outcome:
    """Measure the next turn of `main`, with about 50 new tokens."""
    return _outcome(visit.go_on("main"))


def edited(visit: Visit) -> Outcome:
    """Measure the last turn of `revised`, sent again with another user message."""
    talk = visit.talk("revised")
    if len(talk.messages) < 5:
        talk.ask(visit.words())
    return _outcome(talk.ask_instead(-2, visit.words()))


def second(visit: Visit) -> Outcome:
    """Measure the first turn of `other`, whose system prompt, that of `main`, is cached."""
    visit.talk("main")
    return _outcome(visit.open("other"))


def in_turn(visit: Visit) -> Outcome:
    """Measure two turns each of `main` and `other`, alternating."""
    talks = [visit.talk("main"), visit.talk("other")] * 2
    return _outcome(*[talk.ask(visit.words()) for talk in talks])


def attribution(visit: Visit) -> Outcome:
    """Measure the next turn of `billed`, whose system prompt has a new first line."""
    talk = visit.talk("billed")
    body = talk.messages[0]["content"].partition("\n")[2]
    talk.messages[0] = {"role": "system", "content": f"{visit.attribution()}\n{body}"}
    return _outcome(talk.ask(visit.words()))


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
    first = visit.open("grown")
    talk, more = visit.talks["grown"], range(GROWN_TURNS - 1)
    return _outcome(first, *[talk.ask(visit.words(visit.grown_turn_tokens)) for _ in more])


def last_edited(visit: Visit) -> Outcome:
    """Measure the last turn of `grown`, sent again with another user message."""
    talk = visit.talk("grown")
    return _outcome(talk.ask_instead(-2, visit.words(visit.grown_turn_tokens)))


def regenerated(visit: Visit) -> Outcome:
    """Measure a second reply to the last prompt of `grown`."""
    talk = visit.talk("grown")
    return _outcome(talk.ask_instead(-2, talk.messages[-2]["content"]))


def branched(visit: Visit) -> Outcome:
    """Measure a turn that leaves `grown` in the middle of its third user message."""
    visit.has_branched = True
    talk = visit.talk("grown")
    at = 2 * BRANCH_TURN - 1  # after the system prompt, and two messages for each turn before
    lines = talk.messages[at]["content"].splitlines()
    kept = "\n".join(lines[: max(1, len(lines) // 2)])
    return _outcome(talk.ask_instead(at, f"{kept}\n{visit.words(visit.grown_turn_tokens // 2)}"))


def branched_again(visit: Visit) -> Outcome:
    """Measure a second turn that leaves `grown` at the same place as `branched`."""
    if not visit.has_branched:
        branched(visit)
    return branched(visit)


def returned(visit: Visit) -> Outcome:
    """Measure the next turn of `grown`, after turns that branched off from it."""
    return _outcome(visit.go_on("grown"))


def restart(visit: Visit) -> Outcome:
    """Measure the first two turns of `main`, and the third after kill -9 and a new start."""
    before = visit.open("main"), visit.go_on("main")
    visit.server.kill()
    return _outcome(*before, visit.go_on("main"))


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
