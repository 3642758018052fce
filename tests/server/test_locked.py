"""An index locked by another process delays neither reads nor the shutdown."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import Api, until, user

LESS_THAN_A_LOCK_IS_WAITED_FOR = 25.0


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Hold the index as a process does that writes and does not end."""
    connection = sqlite3.connect(cache / "store" / "index.sqlite", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


@pytest.mark.slow
def test_a_locked_index_holds_up_no_list_and_no_stop(toy: ToyMaker, tmp_path: Path) -> None:
    """A change is refused within a bound and is not made later."""
    cache = tmp_path / "cache"
    flags = ("--model", str(toy("llama")), "--cache-dir", str(cache), "--ram", "200MB")
    with served(*flags, "--disk", "1GB", home=tmp_path) as server:
        api = Api(server)
        api.http = httpx.Client(base_url=api.url, timeout=LESS_THAN_A_LOCK_IS_WAITED_FOR)
        api.chat([user("Name three trees.")], 4)
        sessions: list[dict[str, object]] = []

        def listed() -> bool:
            sessions[:] = api.http.get("/v1/sessions").json()["data"]
            return len(sessions) == 1

        until(listed, 20, lambda: str(sessions))
        path = f"/v1/sessions/{sessions[0]['id']}"
        with locked(cache):
            api.chat([user("Name three other trees.")], 4)
            assert listed()
            assert api.http.get(path).json()["turns"] == 1
            refused = api.http.patch(path, json={"name": "late"})
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) > 0
            server.stop(seconds=LESS_THAN_A_LOCK_IS_WAITED_FOR)
        assert "turns were not written to the table of sessions within 1 s" in server.output
        assert "tokens was not written to disk within" in server.output
    with sqlite3.connect(cache / "store" / "index.sqlite") as connection:
        assert connection.execute("SELECT name FROM sessions").fetchall() == [(None,)]
