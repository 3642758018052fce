"""A random agent: a client with several conversations, and the judgement of each reply."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mlxcache.bench.scenarios import Filler
from mlxcache.scheduling.admission import MIN_UNKNOWN_BESIDE
from tests.soak.ledger import Ledger, SessionTracker
from tests.soak.plan import Step
from tests.soak.server import SoakServer
from tests.soak.wire import Disconnect, Outcome, Request, ask, call

MAX_CONVERSATIONS, MAX_MESSAGES = 5, 14
SYSTEM_TOKENS, FIRST_TOKENS, TURN_TOKENS = 120, (60, 1000), (8, 240)
REPLY_TOKENS = (4, 48)
CONTROL = ("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<tool_call>")
SLICED = ("llama", "gemma3")
"""Families whose KV can be cut at any token, so that all of a conversation is reused."""

CHARS = 2
"""Lower bound of the mean characters per token of the tiny models."""

FROM_DISK = MIN_UNKNOWN_BESIDE + 64
"""Tokens that may be computed again though they are on disk: so few are not restored."""

COSTLY_FAULTS = {
    "nan", "malloc", "full", "locked", "slow", "damage", "remove", "index", "clear", "hang",
}  # fmt: skip
"""Faults after which computed tokens may be computed again."""

WHOLE_PROMPT = 1 << 30
"""More tokens than any prompt has: stands for all tokens of a prompt of unknown length."""


class Servers(Protocol):
    """The servers that agents may use at the moment."""

    def pick(self, share: float) -> SoakServer | None:
        """Pick a server by a random number from 0 to 1; None while there is none."""
        ...


@dataclass(slots=True)
class Conversation:
    """One conversation of an agent.

    `sent`: messages made so far. `server`: the one that computed `computed` tokens of it last, of
    which `prompt` were the prompt; None if unknown.
    """

    label: str
    messages: list[dict[str, Any]]
    sent: int = 0
    server: SoakServer | None = None
    prompt: int = 0
    computed: int = 0

    def drop_reply(self) -> None:
        """Drop the last reply; the prompt before it is still computed but for its last token."""
        self.messages.pop()
        self.computed = self.prompt - 1

    def replace_last(self, message: dict[str, Any]) -> None:
        self.messages[-1] = message
        self.computed %= WHOLE_PROMPT

    def replace_from(self, place: int, message: dict[str, Any]) -> None:
        self.messages[place:] = [message]
        self.computed = 0

    def add_reply(self, server: SoakServer, out: Outcome) -> None:
        self.messages.append({"role": "assistant", "content": out.text})
        self.server, self.prompt = server, out.prompt
        self.computed = out.prompt + len(out.text) - 1


class Agent:
    def __init__(
        self,
        name: str,
        filler: Filler,
        steps: Iterator[Step],
        ledger: Ledger,
        sessions: SessionTracker,
    ):
        self.name = name
        self.filler = filler
        self.ledger = ledger
        self.sessions = sessions
        self.conversations: list[Conversation] = []
        self._steps = steps
        self._made = 0

    def work(self, servers: Servers, over: threading.Event, pause: float) -> None:
        """Do one step after another, `pause` seconds apart, until `over` is set."""
        from tests.soak import steps

        while not over.wait(pause):
            server = servers.pick((step := next(self._steps)).server)
            if server is None:
                time.sleep(0.1)
                continue
            doing: Callable[[Agent, SoakServer, Step], None] = getattr(steps, step.kind)
            doing(self, server, step)

    def forget_computed(self) -> None:
        for conversation in self.conversations:
            conversation.server = None

    # -- conversations -----------------------------------------------------------------------

    def pick_conversation(self, step: Step, *, fresh: bool = False) -> Conversation:
        if fresh or not self.conversations or step.conversation < 1 / (1 + MAX_CONVERSATIONS):
            return self._begin(step)
        found = self.conversations[int(step.conversation * len(self.conversations))]
        if len(found.messages) >= MAX_MESSAGES:
            self.conversations.remove(found)
            return self._begin(step)
        return found

    def _begin(self, step: Step) -> Conversation:
        if len(self.conversations) >= MAX_CONVERSATIONS:
            self.conversations.pop(0)
        self._made += 1
        conversation = Conversation(f"{self.name}-{self._made}", [])
        if step.shape < 0.6:  # one of three that all agents share
            text = self.filler.text(SYSTEM_TOKENS, f"system {int(step.shape * 5)}")
            conversation.messages.append({"role": "system", "content": text})
        conversation.messages.append(self.make_message(conversation, step, FIRST_TOKENS))
        self.conversations.append(conversation)
        return conversation

    def make_message(
        self, conversation: Conversation, step: Step, bounds: tuple[int, int]
    ) -> dict[str, Any]:
        """Make a user message of random length; some contain the text of a control token."""
        conversation.sent += 1
        tokens = bounds[0] + int(step.size**2 * (bounds[1] - bounds[0]))
        text = self.filler.text(tokens, f"{conversation.label}/{conversation.sent}")
        if step.odd < 0.15:
            cut = int(len(text) * step.moment)
            mark = CONTROL[int(step.odd / 0.15 * len(CONTROL))]
            text = text[:cut] + mark + text[cut:]
        return {"role": "user", "content": text}

    def next_request(self, conversation: Conversation, step: Step) -> Request:
        few, many = REPLY_TOKENS
        return Request(
            messages=tuple(conversation.messages),
            tokens=few + int(step.shape * (many - few)),
            label=conversation.label,
            api="messages" if step.odd > 0.7 else "chat",
            stream=step.moment < 0.8,
        )

    # -- requests ----------------------------------------------------------------------------

    def send(
        self, server: SoakServer, request: Request, disconnect: Disconnect | None = None
    ) -> Outcome:
        out = ask(server.port, request, disconnect)
        self.ledger.count(self.ledger.requests, "all")
        if out.complete:
            self._check_reply(server, request, out)
            return out
        most = sum(len(one["content"]) for one in request.messages) // CHARS
        self.ledger.count(self.ledger.checks, "computed", most)
        if out.disconnected:
            self.ledger.count(self.ledger.requests, "left")
        else:
            self._check_failure(server, request, out)
        return out

    def _check_reply(self, server: SoakServer, request: Request, out: Outcome) -> None:
        self.ledger.count(self.ledger.requests, "answered")
        if not 0 <= out.cached < out.prompt:
            words = f"{out.request_id}: {out.cached} of {out.prompt} tokens were cached"
            self.ledger.add_violation("counts", words)
        if len(out.text) < request.tokens:
            self.ledger.count(self.ledger.requests, "cut by the budget")
        self.ledger.add_reply(server.family, request, out)

    def _check_failure(self, server: SoakServer, request: Request, out: Outcome) -> None:
        kind = "refused" if out.status else "broken off"
        self.ledger.count(self.ledger.requests, kind)
        if "produced NaN" in out.error:
            self.sessions.forget_durable(f"{self.name}-")
        words = (
            f"{server.name}, {request.label}: {out.status} {out.error} after {out.seconds:.1f} s"
        )
        if out.timed_out:
            self.ledger.add_violation("hang", words)
        elif not server.permits(out):
            self.ledger.add_violation("error", words)

    def take_turn(self, server: SoakServer, conversation: Conversation, step: Step) -> Outcome:
        """Send the next turn of a conversation, check its cached tokens, and add the reply."""
        expected = self._expected(server, conversation)
        out = self.send(server, self.next_request(conversation, step))
        if not out.complete:
            conversation.server = None
            return out
        expected = min(expected, out.prompt - 1)
        if out.cached < expected - FROM_DISK and not server.injected & COSTLY_FAULTS:
            words = (
                f"{server.name}, {conversation.label}: {out.cached} of {out.prompt} tokens were "
                f"cached, though {expected} had been computed ({out.request_id})"
            )
            self.ledger.add_violation("work lost", words)
        conversation.add_reply(server, out)
        return out

    def _expected(self, server: SoakServer, conversation: Conversation) -> int:
        """Tokens of a conversation that `server` must have cached."""
        known = conversation.server is server and server.family in SLICED
        return conversation.computed if known else 0

    def call(
        self,
        server: SoakServer,
        method: str,
        path: str,
        body: Any = None,
        refused: tuple[int, ...] = (),
    ) -> Outcome:
        """Send a request about sessions or the cache; statuses in `refused` are allowed."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        out = call(server.port, method, path, data)
        self.ledger.count(self.ledger.requests, "about sessions")
        fine = out.status in (200, 201, *refused) or server.permits(out)
        if not fine:
            kind = "hang" if out.timed_out else "error"
            words = f"{server.name}: {method} {path}: {out.status} {out.error}"
            self.ledger.add_violation(kind, words)
        return out

    def find_session(self, server: SoakServer, conversation: Conversation) -> dict[str, Any] | None:
        out = self.call(server, "GET", "/v1/sessions?limit=60")
        if out.status != 200:
            return None
        data: list[dict[str, Any]] = json.loads(out.body)["data"]
        found = (one for one in data if conversation.label in (one["label"], one["id"]))
        return next(found, None)
