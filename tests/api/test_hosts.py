"""Accepted values of Host and Origin: local names, and no foreign web page."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.datastructures import Headers

from mlxcache.api.access import foreign_origin
from mlxcache.api.http import ApiSettings

LOGGER = "mlxcache.api.access"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


HERE = "127.0.0.1:8081"
OTHER, NAMED = "https://b.example", "https://a.example"
LINK = {"host": "x", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
IMAGE = {"host": HERE, "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}


def at_home(*hosts: str) -> list[tuple[dict[str, str], str | None]]:
    """Names of this machine and its network."""
    return [({"host": host}, None) for host in hosts]


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        *at_home("", "localhost", "LOCALHOST:8081", HERE, "[::1]:8081", "192.168.1.7", "mac"),
        *at_home("mac.local:80", "host.docker.internal:8081", "a.localhost", "localhost."),
        *at_home("mac.lan", socket.gethostname()),
        # By DNS rebinding, a page could read the answers of a name that anyone can point here.
        ({"host": "evil.example"}, "evil.example"),
        ({"host": "127.0.0.1.evil.example:8081"}, "127.0.0.1.evil.example:8081"),
        ({"host": "localhost.evil.example"}, "localhost.evil.example"),
        ({"host": "a.b:8081"}, "a.b:8081"),
        ({"host": "[x"}, "[x"),
        # A browser treats such a page and this server as one origin.
        (
            {
                "host": "evil.example:8081",
                "origin": "http://evil.example:8081",
                "sec-fetch-site": "same-origin",
            },
            "evil.example:8081",
        ),
        # A page of another origin cannot read the answer, but its request would still run.
        ({"host": HERE, "origin": "https://evil.example"}, "https://evil.example"),
        ({"host": HERE, "origin": "http://evil.example:8081"}, "http://evil.example:8081"),
        ({"host": HERE, "origin": "null"}, "null"),
        ({"host": HERE, "origin": "http://[x"}, "http://[x"),
        ({"host": HERE, "origin": "http://localhost:3000"}, "http://localhost:3000"),
        ({"host": HERE, "origin": "http://localhost:8081"}, "http://localhost:8081"),
        ({"host": HERE, "origin": "http://127.0.0.1"}, "http://127.0.0.1"),
        ({"host": HERE, "origin": "vscode-webview://1abc"}, None),
        ({"host": HERE, "origin": "app://obsidian.md"}, None),
        ({"host": HERE, "origin": NAMED}, None),
        # The dashboard, a page of this server's own, sends an Origin too.
        ({"host": HERE, "origin": f"http://{HERE}"}, None),
        ({"host": "localhost", "origin": "http://localhost"}, None),
        ({"host": "localhost:80", "origin": "http://localhost"}, None),
        ({"host": "models.lan", "origin": "https://models.lan"}, None),
        ({"host": "models.lan:443", "origin": "https://models.lan"}, None),
        ({"host": "[::1]:8081", "origin": "http://[::1]:8081"}, None),
        ({"host": "LOCALHOST:8081", "origin": "http://localhost:8081"}, None),
        # Browsers send no Origin for images, scripts and links.
        (IMAGE, "a page of another site"),
        (IMAGE | {"sec-fetch-site": "same-site"}, "a page of another site"),
        (IMAGE | {"origin": OTHER}, OTHER),
        (IMAGE | {"origin": NAMED}, None),
        # A person typed the address, or this server's own page is behind a proxy that changes Host.
        ({"host": HERE, "sec-fetch-site": "none"}, None),
        ({"host": HERE, "sec-fetch-site": "same-origin"}, None),
        ({"host": HERE, "origin": OTHER, "sec-fetch-site": "same-origin"}, None),
        ({"host": HERE, "origin": OTHER, "sec-fetch-site": "none"}, OTHER),
        (LINK | {"sec-fetch-dest": "document"}, "a page of another site"),
    ],
    ids=str,
)
def test_who_is_let_in(headers: dict[str, str], found: str | None) -> None:
    """`NAMED` is an origin that the operator allowed."""
    assert foreign_origin(Headers(headers), frozenset({NAMED})) == found


def test_a_link_may_lead_to_a_page_but_not_into_a_frame() -> None:
    """A page in a frame of another page could be clicked by accident."""
    assert foreign_origin(Headers(LINK | {"sec-fetch-dest": "document"}), linkable=True) is None
    assert foreign_origin(Headers(LINK | {"sec-fetch-dest": "iframe"}), linkable=True) is not None


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
class TestAPage:
    async def test_is_refused_without_a_key(
        self, client: httpx.AsyncClient, headers: dict[str, str]
    ) -> None:
        response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 403
        assert "evil.example" in response.json()["error"]["message"]
        assert (await client.get("/health", headers=headers)).status_code == 403

    async def test_is_refused_in_anthropics_shape(
        self, client: httpx.AsyncClient, headers: dict[str, str]
    ) -> None:
        response = await client.post("/v1/messages", json=CHAT, headers=headers)
        assert response.json()["error"]["type"] == "permission_error"


class TestWithAKey:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(api_key="k")

    async def test_the_key_decides(self, client: httpx.AsyncClient) -> None:
        """A proxy may have its own name; a page cannot know the key."""
        headers = {"host": "models.example.com", "x-api-key": "k"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/health", headers={"host": "a.example"})).status_code == 200


class TestWithAnyHost:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(any_host=True)

    async def test_everyone_is_let_in(self, client: httpx.AsyncClient) -> None:
        headers = {"host": "models.example.com"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


class TestAPathThatIsNone:
    @pytest.mark.parametrize("path", ["/v1/v1/messages", "/chat/completions", "/v1/embeddingz"])
    async def test_says_what_a_base_url_is(self, client: httpx.AsyncClient, path: str) -> None:
        """The most common mistake in a client's settings."""
        response = await client.post(path, json=CHAT)
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert path in message
        assert "base URL ends in /v1" in message

    @pytest.mark.parametrize(
        ("path", "cause"),
        [
            ("/v1/v1/messages", "has one /v1 too many"),
            ("/v1/v1/chat/completions", "has one /v1 too many"),
            ("/messages", "lacks /v1"),
            ("/chat/completions", "lacks /v1"),
            ("/responses", "lacks /v1"),
        ],
    )
    async def test_is_logged_once_with_its_cause(
        self, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, cause: str
    ) -> None:
        """Clients hide the message of the response, and send the request again and again."""
        for _ in range(3):
            assert (await client.post(path, json=CHAT)).status_code == 404
        assert [one.getMessage() for one in caplog.records if one.name == LOGGER] == [
            f"refused with 404: 127.0.0.1, POST {path}: the client's base URL {cause}"
        ]

    async def test_that_nobody_meant_is_not_logged(
        self, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        for path in ("/v1/v1/messages%0Afake", "/favicon.png", "/v1/embeddings"):
            assert (await client.get(path)).status_code == 404
        assert [one for one in caplog.records if one.name == LOGGER] == []

    @pytest.mark.parametrize(
        "path", ["/v1/messages/batches", "/v1/embeddings", "/v1/audio/speech", "/api/chat"]
    )
    async def test_of_a_known_api_is_not_supported(
        self, client: httpx.AsyncClient, path: str
    ) -> None:
        """The base URL was right."""
        response = await client.post(path, json=CHAT)
        assert response.status_code == 404
        assert "not supported" in response.json()["error"]["message"]
