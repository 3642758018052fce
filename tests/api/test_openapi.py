"""The OpenAPI document describes what the application has, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from mlxcache.api.app import Endpoint, create_app
from mlxcache.api.http import ApiSettings
from mlxcache.api.openapi import UNSUPPORTED
from tests.api.conftest import FakeEngine
from tests.api.fake import OneModel


@pytest.fixture
async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/openapi.json")).json()
    return found


def test_every_route_is_described_and_nothing_else(
    document: dict[str, Any], app: Starlette
) -> None:
    described = {f"{m.upper()} {path}" for path, ms in document["paths"].items() for m in ms}
    routes = {
        f"{method} {route.path.replace(':path', '')}"
        for route in app.routes
        if isinstance(route, Endpoint)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == routes


def test_every_reference_leads_to_a_component(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= set(document["components"]["schemas"])
    assert "ResponsesRequest" in names


def test_fields_that_are_refused_are_marked(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    chat, text = schemas["ChatRequest"]["properties"], schemas["TextRequest"]["properties"]
    assert chat["suffix"][UNSUPPORTED]
    assert chat["echo"][UNSUPPORTED]
    assert UNSUPPORTED not in text["echo"]
    assert UNSUPPORTED not in chat["messages"]


@pytest.mark.parametrize("path", ["/v1/live", "/v1/trace"])
def test_a_stream_without_an_end_says_so(document: dict[str, Any], path: str) -> None:
    """Clients that read whole responses would wait for ever."""
    assert "until the client closes it" in document["paths"][path]["get"]["description"]


async def test_the_document_and_its_page_need_no_key() -> None:
    app = create_app(OneModel(FakeEngine()), ApiSettings(api_key="secret"))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/openapi.json")).json()["openapi"] == "3.1.0"
        page = await client.get("/docs")
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', page.text):
            assert (await client.get(name)).status_code == 200, name
        assert (await client.get("/v1/requests")).status_code == 401
