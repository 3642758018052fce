"""The picture of the prefix tree: who shares what, where it parts, and that it stays small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxcache.owner import own_ids
from mlxcache.sessions.tree_view import TreePart, tree_view
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, Listed
from mlxcache.store.session_rows import Session
from mlxcache.types import Tokens, token_ids

HEAD = list(range(100, 130))


IDS: dict[LeafRow, Tokens] = {}
"""Token ids of the leaves that `leaf` made."""


def leaf(number: int, session: str, ids: Sequence[int], owner: str | None = None) -> LeafRow:
    made = LeafRow(number, session, "main", len(ids), len(ids), 1, 0.0)
    IDS[made] = own_ids(token_ids(ids), owner)
    return made


def session(id: str, *leaves: LeafRow, ram: Sequence[int], disk: Sequence[int]) -> Listed:
    row = Session(
        id=id, label=None, name=None, title=None, model="m", namespace="n", client=None, turns=1,
        pinned=False, created_at=0.0, last_used_at=0.0, owner=None,
    )  # fmt: skip
    return Listed(row, leaves, Held(tuple(ram), 0), Held(tuple(disk), 0))


def tree_view_of(
    listed: Sequence[Listed], decode: Callable[[Sequence[int]], str], **more: Any
) -> dict[str, Any]:
    return tree_view([TreePart(listed, IDS, decode)], **more)


def words(ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids)


def by_text(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["text"].split(" ")[0]: node for node in found["nodes"]}


def test_two_sessions_share_a_head_and_part() -> None:
    a, b = leaf(1, "a", [*HEAD, 1, 2, 3]), leaf(2, "b", [*HEAD, 7, 8])
    found = tree_view_of(
        [session("a", a, ram=[33], disk=[16]), session("b", b, ram=[30], disk=[32])], words
    )
    nodes = by_text(found)
    assert set(nodes) == {"", "100", "1", "7"}
    head, one, two = nodes["100"], nodes["1"], nodes["7"]
    assert (head["start"], head["tokens"], head["parent"]) == (0, 30, 0)
    assert set(head["sessions"]) == {"a", "b"}
    assert (head["ram_tokens"], head["disk_tokens"]) == (30, 30)
    assert (one["start"], one["tokens"], one["ram_tokens"], one["disk_tokens"]) == (30, 3, 3, 0)
    assert one["ends"] == [{"session": "a", "kind": "main", "tokens": 33}]
    assert (two["sessions"], two["ram_tokens"], two["disk_tokens"]) == (["b"], 0, 2)
    assert one["parent"] == two["parent"] == head["id"]


def test_a_fork_ends_where_it_was_taken() -> None:
    a, b = leaf(1, "a", [*HEAD, 1, 2]), leaf(2, "b", HEAD)
    found = tree_view_of(
        [session("a", a, ram=[32], disk=[0]), session("b", b, ram=[30], disk=[0])], str
    )
    assert [[end["session"] for end in node["ends"]] for node in found["nodes"]] == [
        [],
        ["b"],
        ["a"],
    ]


def test_no_more_nodes_than_asked_for_and_no_session_is_lost() -> None:
    listed = [
        session(f"s{i}", leaf(i, f"s{i}", [*HEAD, *[500 + i] * (i + 1)]), ram=[0], disk=[0])
        for i in range(40)
    ]
    whole = tree_view_of(listed, words)["nodes"]
    assert len(whole) == 42
    nodes = tree_view_of(listed, words, most=10)["nodes"]
    assert len(nodes) == 10
    ends = {end["session"] for node in nodes for end in node["ends"]}
    assert ends == {f"s{i}" for i in range(40)}
    head = nodes[1]
    assert head["merged"] == {"nodes": 32, "tokens": sum(range(1, 33))}
    shown = sum(node["tokens"] + node["merged"]["tokens"] for node in nodes)
    assert shown == sum(node["tokens"] for node in whole)
    assert len(tree_view_of(listed, words, most=1)["nodes"]) == 1


def test_an_owners_text_is_told_as_it_was_written() -> None:
    one = leaf(1, "a", HEAD, owner="alice")
    assert min(IDS[one]) < 0
    found = tree_view_of([session("a", one, ram=[0], disk=[0])], words, owner="alice")
    assert found["nodes"][1]["text"].startswith("100 101 102 103 104")


def test_the_same_tokens_of_two_models_are_apart() -> None:
    a, b = leaf(1, "a", HEAD), leaf(2, "b", HEAD)
    parts = [
        TreePart([session("a", a, ram=[30], disk=[0])], IDS, words, "large"),
        TreePart([session("b", b, ram=[0], disk=[30])], IDS, str, "small"),
    ]
    root, *nodes = tree_view(parts)["nodes"]
    assert "model" not in root
    assert set(root["sessions"]) == {"a", "b"}
    found = {one["model"]: one for one in nodes}
    assert [found[name]["sessions"] for name in ("large", "small")] == [["a"], ["b"]]
    assert (found["large"]["ram_tokens"], found["large"]["disk_tokens"]) == (30, 0)
    assert (found["small"]["ram_tokens"], found["small"]["disk_tokens"]) == (0, 30)
    assert found["large"]["text"].startswith("100 101")
    assert found["small"]["text"].startswith("[100, 101")
