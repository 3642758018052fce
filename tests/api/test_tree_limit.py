"""`GET /v1/cache/tree` limits its sessions and nodes."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

from tests.api.conftest import FakeEngine


class Book:
    """A session book without sessions; `asked` holds the limits it was called with."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def list(self, limit: int) -> list[object]:
        self.asked.append(limit)
        return []

    async def tree_parts(self, listed: Sequence[object]) -> Sequence[object]:
        return listed


@pytest.fixture
def book(engine: FakeEngine) -> Book:
    engine.sessions = Book()
    return engine.sessions


async def test_the_tree_is_of_a_thousand_sessions_at_most(
    client: httpx.AsyncClient, book: Book
) -> None:
    for path in ("/v1/cache/tree", "/v1/cache/tree?limit=1", "/v1/cache/tree?limit=1000"):
        assert (await client.get(path)).status_code == 200
    assert book.asked == [100, 1, 1000]


@pytest.mark.parametrize(
    "query", ["limit=1001", "limit=99999999999999999", "limit=0", "nodes=0", "limit=" + "9" * 90]
)
async def test_more_than_that_and_none_are_refused_before_anything_is_looked_up(
    client: httpx.AsyncClient, book: Book, query: str
) -> None:
    answer = await client.get(f"/v1/cache/tree?{query}")
    name = query.partition("=")[0]
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"`{name}` must be from 1 to 1000."
    assert answer.json()["error"]["param"] == name
    assert book.asked == []
