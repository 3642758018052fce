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


@pytest.mark.parametrize(
    "host",
    [
        *("", "localhost", "LOCALHOST:8081", "127.0.0.1:8081", "[::1]:8081", "192.168.1.7", "mac"),
        *("mac.local:80", "host.docker.internal:8081", "a.localhost", "localhost.", "mac.lan"),
        socket.gethostname(),
    ],
)
def test_names_of_this_machine_and_its_network(host: str) -> None:
    """Also names inside a container and on the local network."""
    assert foreign_origin(Headers({"host": host})) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:8081", "localhost.evil.example", "a.b:8081", "[x"],
)
def test_a_name_that_anyone_can_point_here(host: str) -> None:
    """By DNS rebinding a page could read the answers."""
    assert foreign_origin(Headers({"host": host})) == host


@pytest.mark.parametrize(
    ("origin", "let_in"),
    [
        ("https://evil.example", False),
        ("http://evil.example:8081", False),
        ("null", False),
        ("http://[x", False),
        ("http://localhost:3000", False),
        ("http://localhost:8081", False),
        ("http://127.0.0.1", False),
        ("http://127.0.0.1:8081", True),
        ("vscode-webview://1abc", True),
        ("app://obsidian.md", True),
    ],
)
def test_origins(origin: str, let_in: bool) -> None:
    """A page of another origin cannot read the answer, but its request would still run."""
    found = foreign_origin(Headers({"host": "127.0.0.1:8081", "origin": origin}))
    assert found == (None if let_in else origin)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("models.lan", "https://models.lan"),
        ("models.lan:443", "https://models.lan"),
        ("[::1]:8081", "http://[::1]:8081"),
        ("LOCALHOST:8081", "http://localhost:8081"),
    ],
)
def test_a_page_of_this_servers_own(host: str, origin: str) -> None:
    """The dashboard sends an Origin too."""
    assert foreign_origin(Headers({"host": host, "origin": origin})) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_browser_says_of_a_request_without_an_origin(site: str) -> None:
    """Browsers send no Origin for images, scripts and links."""
    headers = {"host": "127.0.0.1:8081", "sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    assert foreign_origin(Headers(headers)) == "a page of another site"
    assert foreign_origin(Headers(headers | {"origin": "https://a.example"})) == "https://a.example"
    allowed = frozenset({"https://a.example"})
    assert foreign_origin(Headers(headers | {"origin": "https://a.example"}), allowed) is None
    assert foreign_origin(Headers(headers | {"origin": "https://b.example"}), allowed) is not None


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_person_and_this_servers_own_page(site: str) -> None:
    """A typed address, and a page behind a proxy that changes Host."""
    assert foreign_origin(Headers({"host": "127.0.0.1:8081", "sec-fetch-site": site})) is None
    proxied = {"host": "127.0.0.1:8081", "origin": "https://m.example", "sec-fetch-site": site}
    assert (foreign_origin(Headers(proxied)) is None) == (site == "same-origin")


def test_a_name_that_was_rebound_is_refused_though_it_is_its_own_origin() -> None:
    """A browser treats such a page and this server as one origin."""
    headers = {
        "host": "evil.example:8081",
        "origin": "http://evil.example:8081",
        "sec-fetch-site": "same-origin",
    }
    assert foreign_origin(Headers(headers)) == "evil.example:8081"


def test_a_link_may_lead_to_a_page_but_not_into_a_frame() -> None:
    """A page in a frame of another page could be clicked by accident."""
    link = {"host": "x", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert foreign_origin(Headers(link | {"sec-fetch-dest": "document"}), linkable=True) is None
    assert foreign_origin(Headers(link | {"sec-fetch-dest": "document"})) is not None
    assert foreign_origin(Headers(link | {"sec-fetch-dest": "iframe"}), linkable=True) is not None


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
