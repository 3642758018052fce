"""A random agent: conversations that go on, branch, are left, asked twice, forked and moved."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mlxcache.bench.text import Filler
from mlxcache.engine.admission import WORTH_BESIDE
from tests.soak.ledger import Ledger, Sessions
from tests.soak.plan import Step
from tests.soak.server import Life
from tests.soak.wire import Asked, Leave, Outcome, ask, call

MOST_TALKS, MOST_MESSAGES = 5, 14
SYSTEM_TOKENS, FIRST_TOKENS, TURN_TOKENS = 120, (60, 1000), (8, 240)
REPLY_TOKENS = (4, 48)
CONTROL = ("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<tool_call>")
SLICED = ("llama", "gemma3")
"""Families whose KV can be cut at any token, so that all of a conversation is reused."""

CHARS = 2
"""A token of the tiny models' has more characters than so, on average."""

FROM_DISK = WORTH_BESIDE + 64
"""Tokens that may be computed again though they are there: so few are not looked up on disk."""

COSTS = {"nan", "malloc", "full", "locked", "slow", "damage", "remove", "index", "clear", "hang"}
"""Faults after which what was computed may have to be computed again."""


class Servers(Protocol):
    """Which servers an agent may ask now."""

    def pick(self, share: float) -> Life | None:
        """One of them, or None while there is none."""
        ...


@dataclass(slots=True)
class Talk:
    """A conversation, and which server computed so many tokens of it last."""

    label: str
    messages: list[dict[str, Any]]
    said: int = 0
    life: Life | None = None
    prompt: int = 0
    computed: int = 0


class Agent:
    """One client. `over` ends its work; it never raises but for errors of its own."""

    def __init__(
        self, name: str, filler: Filler, steps: Iterator[Step], ledger: Ledger, sessions: Sessions
    ):
        self.name = name
        self.filler = filler
        self.ledger = ledger
        self.sessions = sessions
        self.talks: list[Talk] = []
        self._steps = steps
        self._made = 0

    def work(self, servers: Servers, over: threading.Event, pause: float) -> None:
        """Do one thing after another until it is over."""
        from tests.soak import steps

        while not over.wait(pause):
            life = servers.pick((step := next(self._steps)).server)
            if life is None:
                time.sleep(0.1)
                continue
            doing: Callable[[Agent, Life, Step], None] = getattr(steps, step.kind)
            doing(self, life, step)

    # -- conversations -----------------------------------------------------------------------

    def talk(self, step: Step, *, fresh: bool = False) -> Talk:
        """One that goes on, or a new one."""
        if fresh or not self.talks or step.talk < 1 / (1 + MOST_TALKS):
            return self._begin(step)
        found = self.talks[int(step.talk * len(self.talks))]
        if len(found.messages) >= MOST_MESSAGES:
            self.talks.remove(found)
            return self._begin(step)
        return found

    def _begin(self, step: Step) -> Talk:
        if len(self.talks) >= MOST_TALKS:
            self.talks.pop(0)
        self._made += 1
        talk = Talk(f"{self.name}-{self._made}", [])
        if step.shape < 0.6:  # one of three that all agents share
            text = self.filler.text(SYSTEM_TOKENS, f"system {int(step.shape * 5)}")
            talk.messages.append({"role": "system", "content": text})
        talk.messages.append(self.user(talk, step, FIRST_TOKENS))
        self.talks.append(talk)
        return talk

    def user(self, talk: Talk, step: Step, bounds: tuple[int, int]) -> dict[str, Any]:
        """A message of a person; now and then there is something like a control token in it."""
        talk.said += 1
        tokens = bounds[0] + int(step.size**2 * (bounds[1] - bounds[0]))
        text = self.filler.text(tokens, f"{talk.label}/{talk.said}")
        if step.odd < 0.15:
            cut = int(len(text) * step.moment)
            mark = CONTROL[int(step.odd / 0.15 * len(CONTROL))]
            text = text[:cut] + mark + text[cut:]
        return {"role": "user", "content": text}

    def asked(self, talk: Talk, step: Step) -> Asked:
        """What to ask next of a conversation that ends with a person's message."""
        few, many = REPLY_TOKENS
        return Asked(
            messages=tuple(talk.messages),
            tokens=few + int(step.shape * (many - few)),
            label=talk.label,
            api="messages" if step.odd > 0.7 else "chat",
            stream=step.moment < 0.8,
        )

    # -- requests ----------------------------------------------------------------------------

    def request(self, life: Life, asked: Asked, leave: Leave | None = None) -> Outcome:
        """Send one and judge what came."""
        out = ask(life.port, asked, leave)
        self.ledger.count(self.ledger.requests, "all")
        if not out.whole:
            self.ledger.fed(sum(len(one["content"]) for one in asked.messages) // CHARS)
        if out.whole:
            self._whole(life, asked, out)
        elif out.left:
            self.ledger.count(self.ledger.requests, "left")
        else:
            self._failed(life, asked, out)
        return out

    def _whole(self, life: Life, asked: Asked, out: Outcome) -> None:
        self.ledger.count(self.ledger.requests, "answered")
        if not 0 <= out.cached < out.prompt:
            words = f"{out.request}: {out.cached} of {out.prompt} tokens were cached"
            self.ledger.violation("counts", words)
        if len(out.text) < asked.tokens:
            self.ledger.count(self.ledger.requests, "cut by the budget")
        self.ledger.answered(life.family, asked, out)

    def _failed(self, life: Life, asked: Asked, out: Outcome) -> None:
        kind = "refused" if out.status else "broken off"
        self.ledger.count(self.ledger.requests, kind)
        if "no numbers" in out.error:
            self.sessions.forget(f"{self.name}-")
        words = f"{life.name}, {asked.label}: {out.status} {out.error} after {out.seconds:.1f} s"
        if out.hang:
            self.ledger.violation("hang", words)
        elif not life.permits(out):
            self.ledger.violation("error", words)

    def say(self, life: Life, talk: Talk, step: Step, leave: Leave | None = None) -> Outcome:
        """Ask for the next reply of a conversation and keep it."""
        expected = self._expected(life, talk)
        out = self.request(life, self.asked(talk, step), leave)
        if not out.whole:
            talk.life = None
            return out
        expected = min(expected, out.prompt - 1)
        if out.cached < expected - FROM_DISK and not life.upset & COSTS:
            words = (
                f"{life.name}, {talk.label}: {out.cached} of {out.prompt} tokens were cached, "
                f"where {expected} had been computed ({out.request})"
            )
            self.ledger.violation("work lost", words)
        talk.messages.append({"role": "assistant", "content": out.text})
        talk.life, talk.prompt = life, out.prompt
        talk.computed = out.prompt + len(out.text) - 1
        return out

    def _expected(self, life: Life, talk: Talk) -> int:
        """Tokens of this conversation that this very server has computed."""
        return talk.computed if talk.life is life and life.family in SLICED else 0

    def call(
        self, life: Life, method: str, path: str, body: Any = None, refused: tuple[int, ...] = ()
    ) -> Outcome:
        """A request about sessions or the cache; those `refused` may be what is answered."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        out = call(life.port, method, path, data)
        self.ledger.count(self.ledger.requests, "about sessions")
        fine = out.status in (200, 201, *refused) or life.permits(out)
        if not fine:
            kind = "hang" if out.hang else "error"
            words = f"{life.name}: {method} {path}: {out.status} {out.error}"
            self.ledger.violation(kind, words)
        return out

    def session(self, life: Life, talk: Talk) -> dict[str, Any] | None:
        """The session of a conversation, as a server lists it."""
        out = self.call(life, "GET", "/v1/sessions?limit=60")
        if out.status != 200:
            return None
        data: list[dict[str, Any]] = json.loads(out.body)["data"]
        found = (one for one in data if talk.label in (one["label"], one["id"]))
        return next(found, None)
