"""What agents do, a function for each kind of step."""

from __future__ import annotations

import json
import threading
from typing import Any

from tests.soak.agent import TURN_TOKENS, Agent, Talk
from tests.soak.plan import Step
from tests.soak.server import Life
from tests.soak.wire import Leave, Outcome

MOST_SNAPSHOT = 64 << 20
SLOW_S, SLOW_PIECES = 0.15, 20
EVERYTHING = 1 << 30


def _goes_on(agent: Agent, step: Step) -> Talk:
    """A conversation whose last message is a person's, new where there is none."""
    talk = agent.talk(step)
    if talk.messages[-1]["role"] == "assistant":
        talk.messages.append(agent.user(talk, step, TURN_TOKENS))
    return talk


def turn(agent: Agent, life: Life, step: Step) -> None:
    """The next turn of a conversation."""
    agent.say(life, _goes_on(agent, step), step)


def fresh(agent: Agent, life: Life, step: Step) -> None:
    """The first turn of a new one."""
    agent.say(life, agent.talk(step, fresh=True), step)


def again(agent: Agent, life: Life, step: Step) -> None:
    """The last reply once more."""
    talk = agent.talk(step)
    if talk.messages[-1]["role"] == "assistant":
        talk.messages.pop()
        talk.computed = talk.prompt - 1
    agent.say(life, talk, step)


def edit_last(agent: Agent, life: Life, step: Step) -> None:
    """Another last message of the person."""
    talk = _goes_on(agent, step)
    if len(talk.messages) > 2:
        talk.messages[-1] = agent.user(talk, step, TURN_TOKENS)
        talk.computed = talk.computed % EVERYTHING
    agent.say(life, talk, step)


def edit_middle(agent: Agent, life: Life, step: Step) -> None:
    """A message in the middle is another, and what followed it goes."""
    talk = agent.talk(step)
    places = [i for i, one in enumerate(talk.messages) if one["role"] == "user"]
    place = places[int(step.moment * len(places))]
    talk.messages[place:] = [agent.user(talk, step, TURN_TOKENS)]
    talk.computed = 0
    agent.say(life, talk, step)


def leave(agent: Agent, life: Life, step: Step) -> None:
    """The client goes, in a prefill or a reply; half of the time it comes back at once."""
    talk = _goes_on(agent, step)
    reset = step.odd < 0.5
    gone = Leave(seconds=step.moment * 0.6, reset=reset)
    if step.shape < 0.5:
        gone = Leave(pieces=1 + int(step.moment * 12), reset=reset)
    out = agent.request(life, agent.asked(talk, step), gone)
    if out.left and out.pieces:  # a reply had begun, so all of its prompt was computed
        talk.life, talk.computed = life, EVERYTHING
    else:
        talk.life = None
    if step.server < 0.5:
        agent.say(life, talk, step)


def slow(agent: Agent, life: Life, step: Step) -> None:
    """A reader that takes its time, and then has enough."""
    talk = _goes_on(agent, step)
    pieces = 1 + int(step.moment * SLOW_PIECES)
    agent.request(life, agent.asked(talk, step), Leave(pieces=pieces, pause=SLOW_S))
    talk.life = None


def twice(agent: Agent, life: Life, step: Step) -> None:
    """The same request two or three times at once, as clients do that retry."""
    talk = _goes_on(agent, step)
    asked = agent.asked(talk, step)
    found: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: found.append(agent.request(life, asked)))
        for _ in range(1 + int(step.shape > 0.5))
    ]
    for thread in threads:
        thread.start()
    agent.say(life, talk, step)
    for thread in threads:
        thread.join()


def side(agent: Agent, life: Life, step: Step) -> None:
    """A sub-agent: another conversation under the same label."""
    talk = agent.talk(step)
    other = Talk(talk.label, [], said=1000 + talk.said)
    other.messages = talk.messages[:1] if talk.messages[0]["role"] == "system" else []
    other.messages.append(agent.user(other, step, TURN_TOKENS))
    talk.said += 1
    agent.say(life, other, step)


def fork(agent: Agent, life: Life, step: Step) -> None:
    """A session forked, at its end or before; the conversation goes on in both."""
    talk = agent.talk(step)
    found = agent.session(life, talk)
    if found is None or not found["tokens"]:
        return
    body: dict[str, Any] = {"name": f"{agent.name}-fork"}
    if step.moment < 0.3:
        body["at_tokens"] = 1 + int(step.size * (found["tokens"] - 1))
    out = agent.call(life, "POST", f"/v1/sessions/{found['id']}/fork", body, refused=(400, 404))
    if out.status == 201 and talk.messages[-1]["role"] == "assistant":
        made = json.loads(out.body)
        other = Talk(made["id"], list(talk.messages), said=2000 + talk.said)
        other.messages.append(agent.user(other, step, TURN_TOKENS))
        agent.talks[int(step.talk * len(agent.talks))] = other
        agent.say(life, other, step)


def pin(agent: Agent, life: Life, step: Step) -> None:
    """A session pinned and named, or let go."""
    found = agent.session(life, agent.talk(step))
    if found is not None:
        body = {"pinned": step.shape < 0.5, "name": f"{agent.name}-pin"}
        agent.call(life, "PATCH", f"/v1/sessions/{found['id']}", body, refused=(404,))


def remove(agent: Agent, life: Life, step: Step) -> None:
    """A session removed, with its conversation."""
    talk = agent.talk(step)
    found = agent.session(life, talk)
    if found is None:
        return
    agent.talks.remove(talk)
    agent.sessions.remove(found["id"])
    agent.call(life, "DELETE", f"/v1/sessions/{found['id']}", refused=(404,))


def snapshot(agent: Agent, life: Life, step: Step) -> None:
    """A session as a file, and the file taken in again; one in five is damaged on its way."""
    talk = agent.talk(step)
    found = agent.session(life, talk)
    if found is None or found["disk_bytes"] > MOST_SNAPSHOT or not found["durable_tokens"]:
        return
    out = agent.call(
        life, "GET", f"/v1/sessions/{found['id']}/snapshot", refused=(400, 404, 409, 500)
    )
    if out.status != 200:
        return
    data, damaged = bytearray(out.body), step.odd < 0.2
    if damaged:
        data[int(step.moment * len(data))] ^= 1
    path = f"/v1/sessions?name={agent.name}-file"
    taken = agent.call(life, "POST", path, bytes(data), refused=(400,) if damaged else ())
    if damaged and taken.status == 201:
        agent.ledger.violation("snapshot", f"{life.name}: a damaged snapshot was taken in")
    agent.ledger.count(agent.ledger.requests, "snapshots")


def warm(agent: Agent, life: Life, step: Step) -> None:
    """A system prompt computed ahead."""
    text = agent.filler.text(40 + int(step.size * 200), f"warm {agent.name} {int(step.talk * 9)}")
    agent.call(life, "POST", "/v1/cache/warm", text.encode())


def wrong(agent: Agent, life: Life, step: Step) -> None:
    """Bodies that cannot be served."""
    bodies = (
        b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b"\xff\xfe",
        b'{"messages": [{"role": "someone", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 3}',
        b"[" * 5000,
    )  # fmt: skip
    body = bodies[int(step.moment * len(bodies))]
    path = "/v1/messages" if step.shape < 0.5 else "/v1/chat/completions"
    out = agent.call(life, "POST", path, body, refused=(400,))
    if out.status == 200:
        agent.ledger.violation("error", f"{body[:60]!r} was served")


def look(agent: Agent, life: Life, step: Step) -> None:
    """What a person looks at."""
    paths = ("/v1/sessions", "/v1/requests?limit=50", "/v1/cache", "/metrics", "/v1/models")
    path = paths[int(step.moment * len(paths))]
    agent.call(life, "GET", path, refused=(404,))
