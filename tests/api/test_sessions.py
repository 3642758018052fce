"""Endpoints of sessions and the cache, over a book that records its calls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from mlxcache.errors import BadRequest, DiskFull, NotFound, SnapshotRefused, Unsupported
from mlxcache.store.found import Problem
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, Listed
from mlxcache.store.sessions import Session
from mlxcache.types import WARMING
from tests.api.conftest import FakeEngine

ID = "ses_0123456789ab"
FIELDS = {
    *("id", "object", "name", "title", "model", "namespace", "client", "agents", "tokens"),
    *("durable_tokens", "turns", "ram_bytes", "disk_bytes", "tier", "pinned", "created_at"),
    "last_used_at",
}
"""Fields that clients rely on."""


def listed(*, ram: int = 10, disk: int = 10) -> Listed:
    """Build a session with a main leaf of 10 tokens and an agent's of 4."""
    session = Session(ID, "n", "model", "L", None, "Fix", "cli/1", 3, False, 1.0, 2.0)
    leaves = (
        LeafRow(1, ID, "main", 10, 2, 1, 2.0),
        LeafRow(2, ID, "agent", 4, 2, 1, 2.0),
    )
    return Listed(session, leaves, Held((ram, min(ram, 4)), 140), Held((disk, min(disk, 4)), 1500))


class Snapshot:
    """A file in two parts."""

    nbytes = 6

    def __iter__(self) -> Iterator[bytes]:
        yield from (b"abc", b"def")


class FakeBook:
    """A session book that records calls in `asked`, and raises `error` if it is set."""

    def __init__(self, folder: Path):
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.folder = folder
        self.files = self

    def _note(self, *asked: Any) -> None:
        if self.error:
            raise self.error
        self.asked.append(asked)

    async def list(self, limit: int | None = None) -> list[Listed]:
        self._note("list", limit)
        return [listed()]

    async def get(self, id: str) -> Listed:
        self._note("get", id)
        return listed()

    async def related(self, session: Session) -> Sequence[Session]:
        self._note("related", session.label)
        return [replace(session, id="ses_other", model="small")]

    async def patch(self, id: str, **changes: Any) -> Listed:
        self._note("patch", id, changes)
        return listed()

    async def fork(self, id: str, **how: Any) -> Listed:
        self._note("fork", id, how)
        return listed()

    async def delete(self, id: str) -> None:
        self._note("delete", id)

    async def snapshot(self, id: str) -> Snapshot:
        self._note("snapshot", id)
        return Snapshot()

    async def prompt_cache(self, id: str) -> Snapshot:
        self._note("prompt_cache", id)
        return Snapshot()

    def incoming(self, nbytes: int) -> Path:
        self._note("incoming", nbytes)
        return self.folder

    async def restore(
        self, path: Path, name: str | None = None, prompt: str | None = None
    ) -> Listed:
        self._note("restore", await anyio.Path(path).read_bytes(), name, prompt)
        return listed()

    async def clear(self, *, pinned: bool = False) -> dict[str, int]:
        self._note("clear", pinned)
        return {"sessions": 2, "freed_bytes": 3}

    async def check(self) -> Sequence[Problem]:
        self._note("check")
        return [Problem(Path("/x/y"), "is damaged")]

    async def prune(self, limit: int | None = None) -> int:
        self._note("prune", limit)
        return 7


@pytest.fixture
def book(engine: FakeEngine, tmp_path: Path) -> FakeBook:
    book = FakeBook(tmp_path)
    engine.sessions = book
    return book


async def test_the_list_has_the_fields_that_clients_rely_on(
    client: httpx.AsyncClient, book: FakeBook
) -> None:
    body = (await client.get("/v1/sessions?limit=3")).json()
    assert book.asked == [("list", 3)]
    (one,) = body["data"]
    assert body["object"] == "list"
    assert set(one) >= FIELDS
    assert "leaves" not in one
    assert (one["object"], one["agents"], one["tokens"], one["tier"]) == ("session", 1, 10, "both")
    assert (one["durable_tokens"], one["ram_bytes"], one["disk_bytes"]) == (10, 140, 1500)


@pytest.mark.parametrize(
    ("ram", "disk", "tier"),
    [(10, 10, "both"), (10, 0, "ram"), (0, 10, "disk"), (10, 5, "mixed"), (5, 10, "mixed")],
)
def test_the_tier_says_where_all_of_it_is(ram: int, disk: int, tier: str) -> None:
    assert listed(ram=ram, disk=disk).tier == tier


def test_what_is_nowhere_has_no_tier() -> None:
    assert listed(ram=0, disk=0).tier is None


async def test_one_session_comes_with_its_leaves(client: httpx.AsyncClient, book: FakeBook) -> None:
    body = (await client.get(f"/v1/sessions/{ID}")).json()
    assert [leaf["kind"] for leaf in body["leaves"]] == ["main", "agent"]
    assert body["leaves"][1]["tokens"] == 4
    (other,) = body["related"]
    assert other == {"id": "ses_other", "model": "small", "turns": 3, "last_used_at": 2.0}
    assert book.asked == [("get", ID), ("related", "L")]


async def test_names_are_cleaned_and_only_what_is_given_is_changed(
    client: httpx.AsyncClient, book: FakeBook
) -> None:
    for body in ({"name": " a\x1b b\n"}, {"pinned": True}, {"name": None}):
        assert (await client.patch(f"/v1/sessions/{ID}", json=body)).status_code == 200
    assert [asked[2] for asked in book.asked] == [
        {"name": "a b", "pinned": None},
        {"name": None, "pinned": True},
        {"name": "", "pinned": None},
    ]


@pytest.mark.parametrize("body", [{"titel": "x"}, {"name": 3}, {"name": "x" * 201}, {"pinned": 1}])
async def test_what_cannot_be_changed_is_refused(
    client: httpx.AsyncClient, book: FakeBook, body: dict[str, Any]
) -> None:
    response = await client.patch(f"/v1/sessions/{ID}", json=body)
    assert response.status_code == 400
    assert book.asked == []


async def test_a_fork_is_made_and_answered_with_201(
    client: httpx.AsyncClient, book: FakeBook
) -> None:
    for content in (b"", b'{"name": "n", "at_tokens": 5}'):
        response = await client.post(f"/v1/sessions/{ID}/fork", content=content)
        assert response.status_code == 201
    assert [asked[2] for asked in book.asked] == [
        {"name": None, "tokens": None},
        {"name": "n", "tokens": 5},
    ]


async def test_deleting_answers_as_openai_does(client: httpx.AsyncClient, book: FakeBook) -> None:
    body = (await client.delete(f"/v1/sessions/{ID}")).json()
    assert (body["id"], body["deleted"]) == (ID, True)
    assert book.asked == [("delete", ID)]


async def test_a_snapshot_streams_with_its_length(
    client: httpx.AsyncClient, book: FakeBook
) -> None:
    response = await client.get(f"/v1/sessions/{ID}/snapshot")
    assert response.content == b"abcdef"
    assert response.headers["content-length"] == "6"
    assert f"{ID}.safetensors" in response.headers["content-disposition"]
    assert (await client.get(f"/v1/sessions/{ID}/snapshot?format=zip")).status_code == 400
    assert (await client.get(f"/v1/sessions/{ID}/snapshot?format=mlx-lm")).content == b"abcdef"
    assert book.asked == [("snapshot", ID), ("prompt_cache", ID)]


async def test_a_snapshot_is_received_into_a_file_that_goes_again(
    client: httpx.AsyncClient, book: FakeBook, tmp_path: Path
) -> None:
    """Also if the snapshot is refused. A name that PATCH refuses is refused before."""
    response = await client.post(f"/v1/sessions?name={'x' * 201}", content=b"x" * 100)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "name")
    assert book.asked == []
    response = await client.post("/v1/sessions?name=mine", content=b"x" * 100)
    assert response.status_code == 201
    assert book.asked == [("incoming", 100), ("restore", b"x" * 100, "mine", None)]
    assert os.listdir(tmp_path) == []

    async def refuse(*_: Any) -> Listed:
        raise SnapshotRefused("It is of another model.")

    book.restore = refuse  # type: ignore[assignment, method-assign]
    response = await client.post("/v1/sessions", content=b"x")
    assert response.status_code == 400
    assert os.listdir(tmp_path) == []


async def test_a_prompt_may_stand_before_the_file(
    client: httpx.AsyncClient, book: FakeBook
) -> None:
    """For files of mlx-lm, which hold no tokens."""

    async def parts() -> AsyncIterator[bytes]:
        for part in (b"Na", b"me itxy", b"z"):
            yield part

    response = await client.post("/v1/sessions?prompt_bytes=7", content=parts())
    assert response.status_code == 201
    assert book.asked[1:] == [("restore", b"xyz", None, "Name it")]


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotFound("no"), 404), (Unsupported("no"), 400), (BadRequest("no"), 400)],
)
async def test_errors_have_their_status(
    client: httpx.AsyncClient, book: FakeBook, error: Exception, status: int
) -> None:
    book.error = error
    for method, path in (
        ("GET", f"/v1/sessions/{ID}"),
        ("DELETE", f"/v1/sessions/{ID}"),
        ("POST", f"/v1/sessions/{ID}/fork"),
        ("GET", f"/v1/sessions/{ID}/snapshot"),
        ("POST", "/v1/sessions"),
    ):
        response = await client.request(method, path)
        assert response.status_code == status, path
        assert response.json()["error"]["message"] == "no"


async def test_a_full_disk_is_said(client: httpx.AsyncClient, book: FakeBook) -> None:
    book.error = DiskFull("The disk is full.")
    response = await client.post("/v1/sessions", content=b"x")
    assert response.status_code >= 500
    assert response.json()["error"]["message"] == "The disk is full."


async def test_sessions_wait_for_the_model(
    client: httpx.AsyncClient, engine: FakeEngine, book: FakeBook
) -> None:
    engine.state = "loading"
    requests = (("GET", "/v1/sessions"), ("POST", "/v1/cache/warm"), ("DELETE", "/v1/cache"))
    for method, path in requests:
        assert (await client.request(method, path)).status_code == 503


async def test_clearing_and_pruning_say_what_went(
    client: httpx.AsyncClient, book: FakeBook
) -> None:
    body = (await client.delete("/v1/cache")).json()
    assert (body["sessions"], body["freed_bytes"]) == (2, 3)
    await client.delete("/v1/cache?pinned=true")
    assert (await client.post("/v1/cache/prune")).json()["freed_bytes"] == 7
    await client.post("/v1/cache/prune?limit_bytes=12000000000")
    assert book.asked == [
        ("clear", False),
        ("clear", True),
        ("prune", 2**63 - 1),
        ("prune", 12 * 10**9),
    ]
    assert (await client.delete("/v1/cache?pinned=maybe")).status_code == 400
    assert (await client.post("/v1/cache/prune?limit_bytes=-1")).status_code == 400


async def test_the_files_can_be_checked(client: httpx.AsyncClient, book: FakeBook) -> None:
    body = (await client.get("/v1/cache/check")).json()
    assert body == {"object": "list", "data": [{"path": "/x/y", "what": "is damaged"}]}


async def test_titles_come_with_the_job(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Bodies of both APIs, and plain text."""
    words = "<system-reminder>x</system-reminder>Fix it"
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": words}]}
    await client.post("/v1/chat/completions", json=body)
    await client.post("/v1/messages", json=body)
    await client.post("/v1/completions", json={"model": "m", "prompt": "Once upon"})
    await client.post("/v1/completions", json={"model": "m", "prompt": [1, 2, 3]})
    assert [job.title for job in engine.jobs] == ["Fix it", "Fix it", "Once upon", None]


async def test_warming_computes_the_prompt_and_says_what_that_took(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """It is no turn of a session."""
    engine.cached_tokens = 2
    body = {"messages": [{"role": "user", "content": "one two"}]}
    done = (await client.post("/v1/cache/warm", json=body)).json()
    assert (done["object"], done["prompt_tokens"]) == ("cache.warmed", 4)
    assert (done["cached_tokens"], done["fed_tokens"]) == (2, 2)
    (job,) = engine.jobs
    assert (job.api, job.max_tokens, job.session) == (WARMING, 1, None)
