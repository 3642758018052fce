"""A snapshot brings the replies of its session, and of no other."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.errors import SnapshotRefused
from mlxcache.safetensors import MOST_FOREIGN
from mlxcache.store import snapshot_format
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.reply_rows import MOST_KEYS, ReplyRow
from mlxcache.store.session_rows import Turn
from mlxcache.store.sessions import Sessions
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.store.snapshots import read_snapshot
from mlxcache.types import Tokens, join_ids, token_ids
from tests.store.session_of import NAMESPACE, ids_of, save, session, snapshot_in, store_in
from tests.store.test_snapshot_fuzz import header_of, with_header

VOCABULARY = 500


def reply(seed: int, ids: Tokens | None = None, **more: Any) -> ReplyRow:
    given = ids_of(20, 1000 + seed) if ids is None else ids
    row = ReplyRow(
        bytes([seed]) * 16, 100 + seed, "assistant\n", b"", given, True, False, False, None
    )
    return replace(row, **more)


def turn(prompt: Tokens, said: ReplyRow, known: tuple[ReplyRow, ...] = (), **more: Any) -> Turn:
    """A finished request with a reply, whose prompt holds those that are `known`."""
    ids = join_ids(prompt, said.ids)
    keys = tuple(one.key for one in known)
    return Turn(NAMESPACE, "m", ids, len(prompt), 10, 0, 1.0, reply=said, known=keys, **more)


def held(info: SessionInfo) -> set[bytes]:
    return {one.key for one in info.replies}


def carried(tmp_path: Path, info: SessionInfo) -> SessionInfo:
    store = store_in(tmp_path / "a")
    save(store, info.leaves[0].ids[:64])
    path = snapshot_in(tmp_path / "s", store, replace(info, namespace=NAMESPACE))
    return read_snapshot(path, vocab_size=VOCABULARY).session


def test_they_are_those_of_the_sessions_own_conversations(sessions: Sessions, tmp_path: Path):
    prompt = ids_of(80)
    first, dropped, second, agents = (reply(n) for n in range(4))
    work = sessions.record_turn(turn(prompt, first, label="work"))
    sessions.record_turn(turn(prompt, dropped, label="work"))
    longer = join_ids(prompt, first.ids, ids_of(30, 5))
    sessions.record_turn(turn(longer, second, (first,), label="work"))
    sessions.record_turn(turn(ids_of(80, 7), agents, label="work"))
    sessions.record_turn(turn(longer, reply(9), (first,), label="other"))
    sessions.record_turn(turn(prompt, reply(10, first.ids), label="work", owner="alice"))
    info = sessions.info(work)
    assert [leaf.replies for leaf in info.leaves] == [(first.key, second.key), (agents.key,)]
    assert held(info) == {first.key, second.key, agents.key}
    found = carried(tmp_path, info)
    assert [leaf.replies for leaf in found.leaves] == [leaf.replies for leaf in info.leaves]
    assert [one.key for one in found.replies] == [one.key for one in info.replies]


def test_a_fork_and_a_conversation_under_another_label_keep_theirs(sessions: Sessions):
    prompt = ids_of(80)
    first, second, third = (reply(n) for n in range(3))
    work = sessions.record_turn(turn(prompt, first, label="work"))
    longer = join_ids(prompt, first.ids, ids_of(30, 5))
    sessions.record_turn(turn(longer, second, (first,), label="work"))
    whole, cut = sessions.fork(work, 2.0), sessions.fork(work, 2.0, tokens=len(longer))
    longest = join_ids(longer, second.ids, ids_of(9, 6))
    more = sessions.record_turn(turn(longest, third, (first, second), label="more"))
    wanted = {whole: {first.key, second.key}, cut: {first.key}}
    wanted[more] = {first.key, second.key, third.key}
    for _ in range(2):
        assert {id: held(sessions.info(id)) for id in wanted} == wanted
        sessions.update(more, pinned=True)
        if work:
            sessions.delete(work)
            work = ""
    sessions.clear()
    assert held(sessions.info(more)) == wanted[more]
    sessions.delete(more)
    assert sessions.replies(NAMESPACE)[0] == {}


def test_they_are_imported_once_for_the_importing_owner(sessions: Sessions, tmp_path: Path):
    other = Sessions(TemporaryDatabase())
    work = sessions.record_turn(turn(ids_of(80), reply(1), label="work"))
    found = carried(tmp_path, sessions.info(work))
    made = [other.adopt(found, 1.0, owner=owner) for owner in ("bob", "bob", "carol")]
    rows, last = other.replies(NAMESPACE)
    assert {owner: [one.key for one in many] for owner, many in rows.items()} == {
        "bob": [reply(1).key],
        "carol": [reply(1).key],
    }
    for id in made:
        assert held(other.info(id)) == {reply(1).key}
    other.delete(made[0])
    assert held(other.info(made[1])) == {reply(1).key}
    assert other.replies(NAMESPACE, last) == ({}, last)


def test_every_field_comes_back(tmp_path: Path):
    whole = reply(3, ids_of(70, 3), history=b"h" * 16, calls=False, thinking_open=True)
    rows = (whole, reply(4, generic_tools=True, stopped="é\n"))
    info = session(ids_of(100))
    keys = tuple(row.key for row in rows)
    info = replace(info, leaves=(replace(info.leaves[0], replies=keys),), replies=rows)
    found = carried(tmp_path, info).replies
    for name in ReplyRow.__slots__:
        given = [getattr(row, name) for row in rows]
        assert list(map(str, (getattr(row, name) for row in found))) == list(map(str, given))


def test_the_newest_are_kept_within_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot_format, "MOST_REPLY_TOKENS", 1000)
    rows = tuple(reply(n % 200, token_ids([n, 1]), length=n) for n in range(400))
    info = session(ids_of(100))
    info = replace(
        info,
        leaves=(replace(info.leaves[0], replies=tuple(row.key for row in rows)),),
        replies=(*rows[:1], reply(1, ids_of(900)), *rows),
    )
    assert carried(tmp_path, info).replies[0].ids[0] == 0
    monkeypatch.setattr(snapshot_format, "MOST_REPLY_TOKENS", 100)
    found = carried(tmp_path, info)
    assert [int(row.ids[0]) for row in found.replies] == list(range(350, 400))
    assert found.leaves[0].replies == tuple(row.key for row in rows[350:])
    long = replace(info, replies=(reply(1, stopped="x" * 100_001), reply(2)))
    assert [row.key for row in carried(tmp_path, long).replies] == [reply(2).key]
    monkeypatch.undo()
    many = replace(info, replies=tuple(reply(1, stopped="é" * 99_999) for _ in range(20)))
    assert carried(tmp_path, many).replies == ()
    assert MOST_KEYS * 100 < MOST_FOREIGN


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    store = store_in(folder / "store")
    ids = ids_of(100)
    save(store, ids)
    info = session(ids)
    rows = (reply(1), reply(2, stopped="x"))
    leaf = replace(info.leaves[0], replies=tuple(row.key for row in rows))
    info = replace(info, leaves=(leaf,), replies=rows)
    return snapshot_in(folder / "s", store, info).read_bytes()


def read(tmp_path: Path, content: bytes) -> SessionInfo:
    path = tmp_path / "file"
    path.write_bytes(content)
    return read_snapshot(path, vocab_size=VOCABULARY).session


def packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


IDS = np.arange(40, dtype="<i4")
OTHERS: dict[str, tuple[str, Any]] = {
    "not JSON": ("replies", "{"),
    "no object": ("replies", "[]"),
    "nothing": ("replies", ""),
    "half a surrogate pair": ("tail", "\ud800"),
    "a long tail": ("tail", "x" * 65),
    "a short digest": ("digest", base64.b64encode(b"x").decode()),
    "a negative length": ("length", -1),
    "a huge length": ("length", 1 << 60),
    "no tokens": ("tokens", 0),
    "more tokens": ("tokens", 21),
    "far more tokens": ("tokens", 1 << 40),
    "a flag of 1": ("calls", 1),
    "a long stop string": ("stopped", "x" * 100_001),
    "an unknown index": ("leaves", [[2]]),
    "a negative index": ("leaves", [[-1]]),
    "leaves without end": ("leaves", [[0]] * 300),
    "another number of leaves": ("leaves", [[0], [1]]),
    "nesting": ("leaves", [[[0]]]),
    "no base64": ("reply_ids", "é"),
    "no deflated bytes": ("reply_ids", base64.b64encode(b"abcd").decode()),
    "too few ids": ("reply_ids", packed(IDS[:-1].tobytes())),
    "too many ids": ("reply_ids", packed(bytes(1 << 28))),
    "bytes behind": ("reply_ids", base64.b64encode(zlib.compress(IDS.tobytes()) + b"x").decode()),
    "a cut": ("reply_ids", base64.b64encode(zlib.compress(IDS.tobytes())[:-5]).decode()),
    "unknown ids": ("reply_ids", packed((IDS + VOCABULARY).tobytes())),
    "negative ids": ("reply_ids", packed((-IDS).tobytes())),
}


def changed(good: bytes, field: str, value: Any) -> bytes:
    header = header_of(good)
    metadata = header["__metadata__"]
    if field in ("replies", "reply_ids"):
        metadata[field] = value
    else:
        replies = json.loads(metadata["replies"])
        (replies if field in replies else replies["replies"][1])[field] = value
        metadata["replies"] = json.dumps(replies)
    return with_header(good, header)


@pytest.mark.parametrize("what", OTHERS)
def test_damaged_ones_are_refused(good: bytes, tmp_path: Path, what: str):
    assert len(read(tmp_path, good).replies) == 2
    assert len(read(tmp_path, changed(good, "reply_ids", packed(IDS.tobytes()))).replies) == 2
    with pytest.raises(SnapshotRefused, match="replies"):
        read(tmp_path, changed(good, *OTHERS[what]))


def test_those_of_a_later_version_are_left_out(good: bytes, tmp_path: Path):
    assert read(tmp_path, changed(good, "version", 2)).replies == ()
    header = header_of(good)
    for key in ("replies", "reply_ids"):
        del header["__metadata__"][key]
    assert read(tmp_path, with_header(good, header)).replies == ()
