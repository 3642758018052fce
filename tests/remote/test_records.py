"""Replies and sessions, as servers tell each other of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_digest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.remote.objects import Objects
from mlxcache.remote.records import TRIES, Damaged, decode_replies, encode
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.session_rows import Origin, Turn
from mlxcache.store.sessions import Sessions
from mlxcache.types import NO_TOKENS, Chat
from tests.remote.servers import server
from tests.store.content import NAMESPACE, tokens

ASKED = b"asked".ljust(16)


def reply(seed: int = 0, stopped: str | None = None) -> ReplyRow:
    digest = bytes([seed]) * 16
    return ReplyRow(digest, 70, "tail", b"", tokens(9, seed), True, False, False, stopped)


def test_replies_come_back_as_they_were():
    rows = [reply(n, "stop" if n % 2 else None) for n in range(20)]
    assert [row.key for row in decode_replies(encode(rows), 50_000)] == [
        row.key for row in rows[-16:]
    ]


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "vocabulary", "no ids", "text"])
def test_a_damaged_reply_is_refused(damage: str):
    row = replace(reply(), ids=NO_TOKENS) if damage == "no ids" else reply()
    data = encode([row])
    if damage == "text":
        body = data[8:].replace(b"tail", b"\x80ail")
        data = xxh3_64_digest(body) + body
    data = {"flipped": data[:-3] + b"\0" + data[-2:], "short": data[:-1], "empty": b""}.get(
        damage, data
    )
    with pytest.raises(Damaged):
        decode_replies(data, 10 if damage == "vocabulary" else 50_000)


def test_servers_learn_replies_of_one_owner_only(tmp_path: Path, remote: Objects):
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        for n, at in enumerate((one, other, one)):
            at.tier.share_reply("me", ASKED, reply(n))
            assert at.tier.uploader.wait(10)
        with server(tmp_path / "c", remote) as third:
            for owner in (None, "you"):
                assert third.tier.replies_to(owner, [ASKED], 2500) == []
            found = third.tier.replies_to("me", [b"x" * 16, ASKED], 2500)
            assert [row.key for row in found] == [reply(n).key for n in range(3)]
            assert third.tier.replies_to("me", [ASKED], 2500) == []  # it has them
    counting: Any = Counting(remote)
    with server(tmp_path / "d", counting) as fourth:
        for _ in range(TRIES + 2):
            fourth.tier.replies_to("me", [b"x" * 16], 2500)
        assert counting.asked == TRIES


def test_an_object_of_replies_stays_small(
    tmp_path: Path, remote: Objects, monkeypatch: pytest.MonkeyPatch
):
    most = 2 * len(encode([reply()])) + 10
    monkeypatch.setattr("mlxcache.remote.records.MOST_REPLY_BYTES", most)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        for n in range(3):
            one.tier.share_reply("me", ASKED, reply(n))
            assert one.tier.uploader.wait(10)
        one.tier.share_reply("me", b"long".ljust(16), replace(reply(), ids=tokens(most)))
        assert one.tier.uploader.wait(10)
        found = other.tier.replies_to("me", [ASKED, b"long".ljust(16)], 2500)
        assert [row.key for row in found] == [reply(2).key]


class Counting:
    def __init__(self, objects: Objects):
        self.objects, self.asked = objects, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objects, name)

    def get_many(self, names: list[str], within: float, *, most: int) -> Any:
        self.asked += len(names)
        return self.objects.get_many(names, within, most=most)


def test_what_was_asked_is_the_same_whatever_becomes_of_replies():
    """A client may rewrite replies, or leave thinking out; then, they are looked up together."""
    first = {"role": "user", "content": "one"}
    said = {"role": "assistant", "content": " yes\n", "reasoning_content": "hm"}
    second = {"role": "user", "content": "two"}

    def found(*messages: Any) -> Any:
        return Canonicaliser(None, lambda *_: None).canonicalise(Chat(messages)).found

    prompts = [found(first).asked, found(first, said, second).asked]
    other = {"role": "assistant", "content": "yes"}
    assert list(found(first, other, second, other, first).unknown) == prompts
    assert found(second, other, second).unknown[0] != prompts[0]
    assert found(first, second).asked != prompts[1]


@pytest.mark.parametrize("field", ["label", "name", "title", "client"])
def test_a_session_record_with_a_name_beyond_the_limit_is_not_used(
    tmp_path: Path, remote: Objects, field: str
):
    ids = tokens(300)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        here = Sessions(one.store.database)
        made = here.get(here.record_turn(Turn(NAMESPACE, "m", ids, 250, 100, 50, 1000.0)))
        long: dict[str, Any] = {field: "x" * 201}
        one.tier.sessions.share(replace(made, **long), ASKED)
        assert one.tier.uploader.wait(10)
        other.tier.sessions.look_up(None, ASKED)
        other.tier._behind.shutdown()
        assert other.tier.sessions.find(None, ASKED) is None


def test_a_session_is_the_same_on_both_servers(tmp_path: Path, remote: Objects):
    ids = tokens(300)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        turn = Turn(NAMESPACE, "m", ids, 250, 100, 50, 1000.0, title="hello", owner="me")
        here, there = Sessions(one.store.database), Sessions(other.store.database)
        id = here.record_turn(turn)
        here.update(id, name="mine")
        one.tier.sessions.share(here.get(id), ASKED)
        assert one.tier.uploader.wait(10)
        for owner in ("me", "you"):
            other.tier.sessions.look_up(owner, ASKED)
        other.tier._behind.shutdown()
        assert other.tier.sessions.find("you", ASKED) is None
        origin = other.tier.sessions.find("me", ASKED)
        assert origin == Origin(id, "mine", 1000.0)
        late = replace(turn, at=2000.0)
        assert there.record_turn(late, None, origin) == id
        made = there.get(id)
        assert (made.name, made.created_at, made.last_used_at) == ("mine", 1000.0, 2000.0)
        foreign = replace(late, ids=tokens(300, seed=3), title="else")
        assert there.record_turn(foreign, None, origin) != id
