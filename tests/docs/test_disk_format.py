"""docs/disk-format.md is exact: a reader made by it alone reads what the store writes."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlxcache.store.sessions import Sessions
from tests.docs import reader
from tests.docs.blocks import ROOT
from tests.served import Served
from tests.store import content

PAGE = (ROOT / "docs" / "disk-format.md").read_text(encoding="utf-8")
LABEL = "disk-format"


def test_runs_and_checkpoints_are_found_and_read(tmp_path: Path):
    """Of two paths that part within a block: every token, all bytes, and each path's own state."""
    folder = tmp_path / "store"
    one = content.tokens(500)
    other = content.branch(one, 300, 420)
    with content.opened(folder) as store:
        for ids in (one, other):
            store.write_run(ids, 0, content.kv(ids))
            store.write_checkpoint(ids, content.snapshot(ids))
    for ids in (one, other):
        found = reader.find(folder, content.NAMESPACE, ids)
        assert found.length == len(ids)
        held = {tensor.name: tensor.bytes for tensor in content.kv(ids)}
        for path, start, at, end in found.runs:
            file = reader.read_run(path, content.NAMESPACE, ids, start, end)
            for name, (_, shape, data) in file.tensors.items():
                row = len(data) // shape[0]
                assert (
                    data[(at - start) * row : (end - start) * row]
                    == (held[name][at * row : end * row])
                )
        ((path, position),) = found.checkpoints
        state = reader.read_checkpoint(path, content.NAMESPACE, ids, position).tensors
        for tensor in content.snapshot(ids):
            assert state[tensor.name][2] == tensor.bytes


def test_what_is_damaged_or_of_others_is_doubted(tmp_path: Path):
    """A flipped byte anywhere, another prompt, another model."""
    folder = tmp_path / "store"
    ids = content.tokens(200)
    with content.opened(folder) as store:
        store.write_run(ids, 0, content.kv(ids))
    ((path, start, _, end),) = reader.find(folder, content.NAMESPACE, ids).runs
    reader.read_run(path, content.NAMESPACE, ids, start, end)
    with pytest.raises(reader.Doubt):
        reader.read_run(path, "model-b", ids, start, end)
    with pytest.raises(reader.Doubt):
        reader.read_run(path, content.NAMESPACE, ids + 1, start, end)
    assert reader.find(folder, content.NAMESPACE, ids + 1).length == 0
    raw = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(raw), 40):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises((reader.Doubt, ValueError)):
            reader.read_run(path, content.NAMESPACE, ids, start, end)


def test_what_a_server_wrote_is_read(server: Served):
    """A session's tokens from the index, and their KV of all layers, as far as it says durable."""
    question = [{"role": "user", "content": "What lies on the disk? " * 30}]
    httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": question, "max_tokens": 4},
        headers={"X-Session-Id": LABEL},
        timeout=120,
    ).raise_for_status()
    session = _durable(server.url)
    (store,) = Path(server.home).rglob("store")
    ids = _tokens(store, session["id"])
    assert len(ids) == session["tokens"]
    found = reader.find(store, session["namespace"], ids)
    assert found.length >= session["durable_tokens"] > 100
    names = set()
    for path, start, _, end in found.runs:
        names |= set(reader.read_run(path, session["namespace"], ids, start, end).tensors)
    assert {"kv.0.0", "kv.0.1"} <= names


def _durable(url: str) -> dict[str, Any]:
    for _ in range(600):
        sessions = httpx.get(f"{url}/v1/sessions").json()["data"]
        one = next((one for one in sessions if one["label"] == LABEL), None)
        if one is not None and one["durable_tokens"] == one["tokens"]:
            return one
        time.sleep(0.1)
    raise AssertionError("its turn never became durable")


def _tokens(store: Path, session: str) -> np.ndarray:
    db = sqlite3.connect(f"{(store / 'index.sqlite').as_uri()}?mode=ro", uri=True)
    query = (
        "SELECT ids FROM leaf_tokens JOIN leaves ON leaf = leaves.id"
        " WHERE session = ? AND kind = 'main' ORDER BY start"
    )
    raw = b"".join(ids for (ids,) in db.execute(query, (session,)))
    db.close()
    return np.frombuffer(raw, "<i4")


def test_the_documented_tables_are_the_real_ones(tmp_path: Path):
    """Each column of each that readers use, the names of the others, and none besides."""
    rows = re.findall(r"^\| ?(`\w+`|) ?\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    shown: dict[str, set[str]] = {}
    last = ""
    for name, columns in rows:
        last = name.strip("`") or last
        shown.setdefault(last, set()).update(re.findall(r"`(\w+)`", columns))
    with content.opened(tmp_path / "store") as store:
        Sessions(store.database)
        with store.database.read() as connection:
            query = (
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
            real = {
                table: {column[1] for column in connection.execute(f"PRAGMA table_info({table})")}
                for (table,) in connection.execute(query).fetchall()
            }
    (own,) = re.findall(r"The server's own tables: ([^.]+)\.", PAGE)
    names = re.findall(r"`(\w+)`", own)
    assert sorted([*shown, *names]) == sorted(real)
    used = {table: real[table] for table in shown}
    assert shown == used | {"replies": used["replies"] - {"id"}}
