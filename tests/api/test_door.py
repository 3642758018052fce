"""Access: keys, owners, allowed origins, limits, and the log of refusals."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from mlxcache.api import http
from mlxcache.api.access import LOG_INTERVAL_S, Keyring, RefusalLog
from mlxcache.api.http import ApiSettings
from mlxcache.errors import Unauthorized
from mlxcache.owner import OWNER, owner_of
from tests.api.conftest import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT_PATH = "/v1/chat/completions"
UI, EVIL = "http://localhost:3000", "https://evil.example"


class TestKeyring:
    def test_both_headers_and_all_keys_are_compared_whichever_fits(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Comparing takes the same time for each key: digests of one length, no early end."""
        compared: list[tuple[bytes, bytes]] = []
        same = hmac.compare_digest

        def compare(a: bytes, b: bytes) -> bool:
            compared.append((a, b))
            return same(a, b)

        ring = Keyring("common", ("a", "b" * 500))
        monkeypatch.setattr(hmac, "compare_digest", compare)
        for key in ("common", "a", "b" * 500, "wrong", ""):
            compared.clear()
            try:
                ring.find_owner(Headers({"x-api-key": key}))
            except Unauthorized:
                assert key in ("wrong", "")
            assert len(compared) == 6
            assert {len(each) for pair in compared for each in pair} == {32}

    def test_the_key_says_who_the_owner_is(self) -> None:
        """The common key has no owner; if both headers have a key, the bearer's counts."""
        ring = Keyring("common", ("a", "b"))
        assert ring.find_owner(Headers({"x-api-key": "common"})) is None
        assert ring.find_owner(Headers({"authorization": "Bearer a"})) == owner_of("a")
        both = {"authorization": "Bearer a", "x-api-key": "b"}
        assert ring.find_owner(Headers(both)) == owner_of("a")
        with pytest.raises(Unauthorized):
            ring.find_owner(Headers({}))


class TestOwners:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(owned_keys=("a-key", "b-key"))

    async def test_what_a_request_does_is_done_for_its_key(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine reads the owner from the context, also while it streams."""
        seen: list[str | None] = []
        submit = engine.submit

        async def noting(job: Any) -> Any:
            seen.append(OWNER.get())
            return await submit(job)

        monkeypatch.setattr(engine, "submit", noting)
        for key in ("a-key", "b-key", "a-key"):
            for stream in (False, True):
                body = CHAT | {"stream": stream}
                response = await client.post(CHAT_PATH, json=body, headers={"x-api-key": key})
                assert response.status_code == 200
        a, b = owner_of("a-key"), owner_of("b-key")
        assert seen == [a, a, b, b, a, a]
        assert (await client.post(CHAT_PATH, json=CHAT)).status_code == 401

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/cache/check"),
            ("POST", "/v1/cache/prune?limit_bytes=0"),
            ("POST", "/v1/models/org/model-4bit/unload"),
        ],
    )
    async def test_no_owner_acts_on_what_belongs_to_all_of_them(
        self, client: httpx.AsyncClient, method: str, path: str
    ) -> None:
        response = await client.request(method, path, headers={"x-api-key": "a-key"})
        assert response.status_code == 403


class TestAPageThatWasNamed:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(api_key="k", origins=frozenset({UI}))

    async def test_may_ask_before_it_has_the_key(self, client: httpx.AsyncClient) -> None:
        """A browser sends a preflight without a key."""
        asked = {
            "origin": UI,
            "access-control-request-method": "PATCH",
            "access-control-request-headers": "authorization,content-type",
            "access-control-request-private-network": "true",
        }
        response = await client.options("/v1/sessions/x", headers=asked)
        told = response.headers
        assert response.status_code == 204
        assert told["access-control-allow-origin"] == UI
        assert told["access-control-allow-headers"] == "authorization,content-type"
        assert "PATCH" in told["access-control-allow-methods"]
        assert told["access-control-allow-private-network"] == "true"
        assert "access-control-allow-credentials" not in told
        assert "origin" in told["vary"].lower()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_reads_replies_with_the_key_and_errors_without(
        self, client: httpx.AsyncClient, stream: bool
    ) -> None:
        body, headers = CHAT | {"stream": stream}, {"origin": UI, "sec-fetch-site": "cross-site"}
        response = await client.post(CHAT_PATH, json=body, headers=headers)
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == UI
        response = await client.post(CHAT_PATH, json=body, headers=headers | {"x-api-key": "k"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == UI

    async def test_lets_no_other_in(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        """Not even with the key, and its script cannot read the answer."""
        for origin in (EVIL, "null", "http://localhost:3001", "https://localhost:3000"):
            headers = {"origin": origin, "access-control-request-method": "POST", "x-api-key": "k"}
            for response in (
                await client.options(CHAT_PATH, headers=headers),
                await client.post(CHAT_PATH, json=CHAT, headers=headers),
                await client.post(CHAT_PATH, content=b"{}", headers=headers),
            ):
                assert response.status_code == 403
                assert not [n for n in response.headers if n.startswith("access-control")]
        assert engine.jobs == []


async def test_every_response_is_kept_out_of_other_pages(client: httpx.AsyncClient) -> None:
    """No other page can load one as a script, an image or a frame."""
    for path in ("/health", "/nothing", "/v1/models"):
        headers = (await client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "multipart/form-data", ""])
async def test_a_form_of_another_origin_generates_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, kind: str
) -> None:
    """A browser sends these content types without a preflight."""
    response = await client.post(
        CHAT_PATH, json=CHAT, headers={"origin": "http://127.0.0.1:9", "content-type": kind}
    )
    assert response.status_code == 403
    assert engine.jobs == []


@pytest.mark.parametrize("given", [[("x-a", "y")] * 200, [("x-a", "y" * 50_000)]])
async def test_too_many_headers(client: httpx.AsyncClient, given: Any) -> None:
    response = await client.get("/v1/models", headers=given)
    assert response.status_code == 431
    assert "headers" in response.json()["error"]["message"]


class TestRefusals:
    def request(self, path: str = "/v1/models") -> Request:
        scope = {"type": "http", "method": "GET", "path": path, "client": ("10.0.0.7", 1)}
        return Request(
            scope | {"headers": [(b"x-api-key", b"s3cret")], "query_string": b"k=s3cret"}
        )

    def test_one_line_for_many_and_never_a_key(self, caplog: pytest.LogCaptureFixture) -> None:
        """A client that tries keys cannot fill the disk with log lines."""
        now = 100.0
        refusals = RefusalLog(lambda: now)
        for _ in range(50):
            refusals.log_refusal(self.request(), Unauthorized("The API key is missing or wrong."))
        assert len(caplog.records) == 1
        assert "refused with 401: 10.0.0.7" in caplog.text
        now += LOG_INTERVAL_S
        refusals.log_refusal(self.request("/v1/\nfake line"), Unauthorized("wrong"))
        assert len(caplog.records) == 2
        assert "49 others" in caplog.text
        assert "\nfake line" not in caplog.text
        assert "s3cret" not in caplog.text


class TestABodyThatDoesNotCome:
    async def body(self, *, every: float, pause: float, seconds: float) -> bytes:
        async def parts() -> dict[str, Any]:
            await asyncio.sleep(every)
            return {"type": "http.request", "body": b"x", "more_body": True}

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        request = Request(scope, parts)
        return await http.read_body(request, 1 << 20, pause=pause, seconds=seconds)

    @pytest.mark.parametrize(
        ("every", "pause", "seconds"),
        [(60.0, 0.05, 60.0), (0.01, 60.0, 0.2)],
        ids=["stall", "drip"],
    )
    async def test_is_waited_for_so_long(self, every: float, pause: float, seconds: float) -> None:
        """One that stops, and one that arrives byte by byte."""
        with pytest.raises(HTTPException) as raised:
            await self.body(every=every, pause=pause, seconds=seconds)
        assert raised.value.status_code == 408
