"""Steps of agents, one function per kind in `plan.STEPS`."""

from __future__ import annotations

import json
import threading
from typing import Any

from tests.soak.agent import TURN_TOKENS, WHOLE_PROMPT, Agent, Conversation
from tests.soak.plan import Step
from tests.soak.server import SoakServer
from tests.soak.wire import Disconnect, Outcome

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
