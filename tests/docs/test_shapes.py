"""JSON and YAML in the pages: bodies are accepted, answers have these keys, settings lead here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mlxcache.config import Settings, read_keys
from tests.docs.blocks import Block, for_server, of
from tests.docs.clients import CLIENTS, Sent
from tests.served import Served

DATED = [f"You are a helpful assistant. Today's date is 2026-11-{day}. " for day in (21, 22)]
LONG = "Say what is wrong, where, and how to put it right. " * 12


def _noted(kind: str) -> list[Block]:
    return [block for block in of("json", "yaml", "text") if block.note.startswith(kind)]


def send(sent: Sent) -> None:
    """As a client does. Raises where the server refuses."""
    headers = sent.headers | ({"Authorization": f"Bearer {sent.key}"} if sent.key else {})
    method = "GET" if sent.body is None else "POST"
    answer = httpx.request(method, sent.url, json=sent.body, headers=headers, timeout=120)
    answer.raise_for_status()
    assert answer.content


@pytest.mark.parametrize("block", _noted("settings of "), ids=str)
def test_settings_of_clients_lead_to_the_server(block: Block, server: Served) -> None:
    """By what the client of these settings would send."""
    code = for_server(block.code, server.url)
    settings = json.loads(code) if block.language == "json" else yaml.safe_load(code)
    requests = list(CLIENTS[block.note.removeprefix("settings of ")](settings))
    assert requests
    for sent in requests:
        assert sent.url.startswith(f"{server.url}/")
        send(sent)


@pytest.mark.parametrize("block", _noted("body of "), ids=str)
def test_bodies_are_accepted(block: Block, server: Served) -> None:
    """By the endpoint that the page names."""
    _, _, method, path = block.note.split()
    send(Sent(f"{server.url}{path}", body=json.loads(block.code)))
    assert method == "POST"


@pytest.fixture(scope="module")
def asked(server: Served) -> dict[str, Any]:
    """Real answers by their endpoints, once two requests were made of which one lost its prefix."""
    url = server.url
    for system in DATED:
        body = {"messages": [{"role": "system", "content": system + LONG}, *_HELLO]}
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json=body | {"max_tokens": 4},
            headers={"X-Session-Id": "shapes"},
            timeout=120,
        ).raise_for_status()
    request = httpx.get(f"{url}/v1/requests/{answer.headers['X-Mlxcache-Request']}").json()
    sessions = httpx.get(f"{url}/v1/sessions").json()["data"]
    return {
        "GET /v1/requests/{id}": request,
        "lost of GET /v1/requests/{id}": request["lost"],
        "GET /v1/sessions": next(one for one in sessions if one["label"] == "shapes"),
        "GET /v1/cache/tree": httpx.get(f"{url}/v1/cache/tree").json(),
        "GET /v1/cache": httpx.get(f"{url}/v1/cache").json(),
        "GET /health": httpx.get(f"{url}/health").json(),
    }


_HELLO = [{"role": "user", "content": "Hello."}]


def _keys(value: Any) -> Any:
    """The keys of an object, of the objects in it, and so on."""
    return {k: _keys(v) for k, v in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize("block", _noted("answer of "), ids=str)
def test_answers_have_the_documented_keys(block: Block, asked: dict[str, Any]) -> None:
    """Exactly these, at every depth that the page shows."""
    shown, real = json.loads(block.code), asked[block.note.removeprefix("answer of ")]
    assert shown.keys() == real.keys()
    for name, value in shown.items():
        if isinstance(value, dict):
            assert _keys(value) == _keys(real[name]), name


@pytest.mark.parametrize("block", _noted("a file of keys"), ids=str)
def test_a_documented_file_of_keys_is_read(block: Block, tmp_path: Path) -> None:
    """With the names that it gives."""
    path = tmp_path / "keys.txt"
    path.write_text(block.code)
    path.chmod(0o600)
    keys = read_keys(Settings(api_keys_file=path))
    assert keys.names
    assert len(keys.values) == len(keys.names)
