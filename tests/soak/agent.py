"""A random agent: a client with several conversations, and the judgement of each reply."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mlxcache.bench.turns import Filler
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
        while not over.wait(pause):
            server = servers.pick((step := next(self._steps)).server)
            if server is None:
                time.sleep(0.1)
                continue
            DOING[step.kind](self, server, step)

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


# -- steps, one function per kind in `plan.STEPS` --------------------------------------------------

MAX_SNAPSHOT_BYTES = 64 << 20
SLOW_S, SLOW_PIECES = 0.15, 20


def _continued(agent: Agent, step: Step) -> Conversation:
    conversation = agent.pick_conversation(step)
    if conversation.messages[-1]["role"] == "assistant":
        conversation.messages.append(agent.make_message(conversation, step, TURN_TOKENS))
    return conversation


def turn(agent: Agent, server: SoakServer, step: Step) -> None:
    agent.take_turn(server, _continued(agent, step), step)


def fresh(agent: Agent, server: SoakServer, step: Step) -> None:
    agent.take_turn(server, agent.pick_conversation(step, fresh=True), step)


def again(agent: Agent, server: SoakServer, step: Step) -> None:
    """Regenerate the last reply."""
    conversation = agent.pick_conversation(step)
    if conversation.messages[-1]["role"] == "assistant":
        conversation.drop_reply()
    agent.take_turn(server, conversation, step)


def edit_last(agent: Agent, server: SoakServer, step: Step) -> None:
    conversation = _continued(agent, step)
    if len(conversation.messages) > 2:
        conversation.replace_last(agent.make_message(conversation, step, TURN_TOKENS))
    agent.take_turn(server, conversation, step)


def edit_middle(agent: Agent, server: SoakServer, step: Step) -> None:
    """Replace a user message in the middle, and drop the messages after it."""
    conversation = agent.pick_conversation(step)
    places = [i for i, one in enumerate(conversation.messages) if one["role"] == "user"]
    place = places[int(step.moment * len(places))]
    conversation.replace_from(place, agent.make_message(conversation, step, TURN_TOKENS))
    agent.take_turn(server, conversation, step)


def leave(agent: Agent, server: SoakServer, step: Step) -> None:
    """Disconnect during prefill or reply; half of the time, send the request again at once."""
    conversation = _continued(agent, step)
    reset = step.odd < 0.5
    gone = Disconnect(seconds=step.moment * 0.6, reset=reset)
    if step.shape < 0.5:
        gone = Disconnect(pieces=1 + int(step.moment * 12), reset=reset)
    out = agent.send(server, agent.next_request(conversation, step), gone)
    conversation.server = None
    if out.disconnected and out.pieces:  # a reply had begun, so all of its prompt was computed
        conversation.server, conversation.computed = server, WHOLE_PROMPT
    if step.server < 0.5:
        agent.take_turn(server, conversation, step)


def slow(agent: Agent, server: SoakServer, step: Step) -> None:
    """Read a reply slowly, then disconnect."""
    conversation = _continued(agent, step)
    pieces = 1 + int(step.moment * SLOW_PIECES)
    agent.send(
        server, agent.next_request(conversation, step), Disconnect(pieces=pieces, pause=SLOW_S)
    )
    conversation.server = None


def twice(agent: Agent, server: SoakServer, step: Step) -> None:
    """Send the same request two or three times at once, as retrying clients do."""
    conversation = _continued(agent, step)
    request = agent.next_request(conversation, step)
    found: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: found.append(agent.send(server, request)))
        for _ in range(1 + int(step.shape > 0.5))
    ]
    for thread in threads:
        thread.start()
    agent.take_turn(server, conversation, step)
    for thread in threads:
        thread.join()


def side(agent: Agent, server: SoakServer, step: Step) -> None:
    """Start another conversation under the same label, as sub-agents do."""
    conversation = agent.pick_conversation(step)
    first = conversation.messages[0]
    shared = [first] if first["role"] == "system" else []
    other = Conversation(conversation.label, shared, sent=1000 + conversation.sent)
    other.messages.append(agent.make_message(other, step, TURN_TOKENS))
    conversation.sent += 1
    agent.take_turn(server, other, step)


def fork(agent: Agent, server: SoakServer, step: Step) -> None:
    """Fork a session at its end or earlier, and continue the conversation in the fork."""
    conversation = agent.pick_conversation(step)
    found = agent.find_session(server, conversation)
    if found is None or not found["tokens"]:
        return
    body: dict[str, Any] = {"name": f"{agent.name}-fork"}
    if step.moment < 0.3:
        body["at_tokens"] = 1 + int(step.size * (found["tokens"] - 1))
    out = agent.call(server, "POST", f"/v1/sessions/{found['id']}/fork", body, refused=(400, 404))
    if out.status == 201 and conversation.messages[-1]["role"] == "assistant":
        made = json.loads(out.body)
        other = Conversation(made["id"], list(conversation.messages), sent=2000 + conversation.sent)
        other.messages.append(agent.make_message(other, step, TURN_TOKENS))
        agent.conversations[int(step.conversation * len(agent.conversations))] = other
        agent.take_turn(server, other, step)


def pin(agent: Agent, server: SoakServer, step: Step) -> None:
    found = agent.find_session(server, agent.pick_conversation(step))
    if found is not None:
        body = {"pinned": step.shape < 0.5, "name": f"{agent.name}-pin"}
        agent.call(server, "PATCH", f"/v1/sessions/{found['id']}", body, refused=(404,))


def remove(agent: Agent, server: SoakServer, step: Step) -> None:
    conversation = agent.pick_conversation(step)
    found = agent.find_session(server, conversation)
    if found is None:
        return
    agent.conversations.remove(conversation)
    agent.sessions.remove(found["id"])
    agent.call(server, "DELETE", f"/v1/sessions/{found['id']}", refused=(404,))


def snapshot(agent: Agent, server: SoakServer, step: Step) -> None:
    """Export a session and import the file; one file in five is damaged in between."""
    conversation = agent.pick_conversation(step)
    found = agent.find_session(server, conversation)
    if found is None or found["disk_bytes"] > MAX_SNAPSHOT_BYTES or not found["durable_tokens"]:
        return
    out = agent.call(
        server, "GET", f"/v1/sessions/{found['id']}/snapshot", refused=(400, 404, 409, 500)
    )
    if out.status != 200:
        return
    data, damaged = bytearray(out.body), step.odd < 0.2
    if damaged:
        data[int(step.moment * len(data))] ^= 1
    path = f"/v1/sessions?name={agent.name}-file"
    taken = agent.call(server, "POST", path, bytes(data), refused=(400,) if damaged else ())
    if damaged and taken.status == 201:
        agent.ledger.add_violation("snapshot", f"{server.name}: a damaged snapshot was imported")
    agent.ledger.count(agent.ledger.requests, "snapshots")


def warm(agent: Agent, server: SoakServer, step: Step) -> None:
    text = agent.filler.text(
        40 + int(step.size * 200), f"warm {agent.name} {int(step.conversation * 9)}"
    )
    agent.call(server, "POST", "/v1/cache/warm", text.encode())


def wrong(agent: Agent, server: SoakServer, step: Step) -> None:
    bodies = (
        b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b"\xff\xfe",
        b'{"messages": [{"role": "someone", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}',
        b"[" * 5000,
    )  # fmt: skip
    body = bodies[int(step.moment * len(bodies))]
    path = "/v1/messages" if step.shape < 0.5 else "/v1/chat/completions"
    out = agent.call(server, "POST", path, body, refused=(400,))
    if out.status == 200:
        agent.ledger.add_violation("error", f"{body[:60]!r} was served")


def look(agent: Agent, server: SoakServer, step: Step) -> None:
    paths = ("/v1/sessions", "/v1/requests?limit=50", "/v1/cache", "/metrics", "/v1/models")
    path = paths[int(step.moment * len(paths))]
    agent.call(server, "GET", path, refused=(404,))


DOING: dict[str, Callable[[Agent, SoakServer, Step], None]] = {
    one.__name__: one
    for one in (
        turn, fresh, again, edit_last, edit_middle, leave, slow, twice, side, fork, pin, remove,
        snapshot, warm, wrong, look,
    )
}  # fmt: skip
