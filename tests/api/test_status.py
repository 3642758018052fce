"""Endpoints of health, models, figures and recent requests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ModelInfo
from pydantic import TypeAdapter

from mlxcache.api.app import create_app
from mlxcache.api.status import describe_request
from mlxcache.types import RequestRecord
from tests.api.conftest import INFO, FakeEngine


async def ask(client: httpx.AsyncClient, content: str = "Hi") -> str:
    body = {"messages": [{"role": "user", "content": content}]}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    return response.headers["x-mlxcache-request"]


async def test_health_is_200_only_when_the_model_can_serve(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    assert response.json()["model"] == INFO.id
    for state in ("loading", "failed", "stopped"):
        engine.state = state
        response = await client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, state)


async def test_a_thread_that_does_not_move_shows_in_health_and_ends_nothing(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.silent_s = 59.0
    response = await client.get("/health")
    assert (response.status_code, response.json()["stalled_s"]) == (200, 59.0)
    engine.silent_s = 61.0
    response = await client.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "stalled")
    assert response.json()["stalled_s"] == 61.0


async def test_health_says_what_the_engine_died_of(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.state, engine.failure = "failed", "The MLX thread died (ValueError: no)."
    response = await client.get("/health")
    assert (response.status_code, response.json()["reason"]) == (503, engine.failure)


async def test_models_are_not_listed_before_they_serve(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.state, engine.info = "loading", None
    for path in ("/v1/models", "/v1/models/x", "/api/v0/models", "/v1/api/v0/models/x"):
        response = await client.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"


async def test_the_model_tells_its_lengths(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model["id"] == INFO.id
    assert model["object"] == "model"
    assert model["context_length"] == model["loaded_context_length"] == 8192
    assert model["max_context_length"] == 32768
    assert model["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("backend", ["mlx-lm", "mlx-vlm"])
async def test_the_library_of_the_model_and_its_images_are_told(
    client: httpx.AsyncClient, engine: FakeEngine, backend: str, sees: bool
) -> None:
    engine.info = replace(INFO, backend=backend, has_images=sees)
    (model,) = (await client.get("/v1/models")).json()["data"]
    health = (await client.get("/health")).json()
    for one in (model, health):
        assert one["backend"] == backend
        assert one["input_modalities"] == (["text", "image"] if sees else ["text"])
    (model,) = (await client.get("/api/v0/models")).json()["data"]
    assert model["type"] == ("vlm" if sees else "llm")


async def test_one_model_tells_its_state_as_several_do(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.residence = {"state": "loading", "progress": 0.5, "loads": 2}
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["id"] == INFO.id
    assert (model["state"], model["progress"], model["loads"]) == ("loading", 0.5, 2)
    assert (model["aliases"], model["default"]) == (["short"], True)


async def test_of_a_model_that_was_never_loaded_the_name_is_told(engine: FakeEngine) -> None:
    """In each API's form; and the list begins with the first model's label."""
    described = [{"label": "main", "state": "loaded"}, {"label": "idle", "state": "never"}]
    models = SimpleNamespace(
        default=engine,
        engines=[engine, SimpleNamespace(info=None, prefetch=engine.prefetch)],
        find=lambda name: SimpleNamespace(info=None) if name == "idle" else engine,
        describe=lambda: described,
    )
    transport = httpx.ASGITransport(create_app(models))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        listed = (await client.get("/v1/models")).json()
        assert [one["id"] for one in listed["data"]] == ["main", "idle"]
        assert (listed["first_id"], listed["last_id"]) == ("main", "idle")
        assert engine.prefetched == len(models.engines)
        told = (await client.get("/v1/models/idle")).json()
        assert (told["id"], told["state"]) == ("idle", "never")
        assert "context_length" not in told
        told = (await client.get("/api/v0/models/idle")).json()
        assert (told["id"], told["state"]) == ("idle", "not-loaded")
        assert (await client.get("/v1/models/main")).json()["context_length"] == 8192
        client.headers["anthropic-version"] = "2023-06-01"
        told = (await client.get("/v1/models/idle")).json()
        assert (told["id"], told["type"], told["max_input_tokens"]) == ("idle", "model", None)
        assert ModelInfo.model_validate(told).id == "idle"


@pytest.mark.parametrize("name", ["org/model-4bit", "claude-opus-4", "current-model", "a/b/c"])
async def test_any_name_is_the_one_that_is_served(client: httpx.AsyncClient, name: str) -> None:
    body = (await client.get(f"/v1/models/{name}")).json()
    assert (body["id"], body["context_length"]) == (name, 8192)
    body = (await client.get(f"/api/v0/models/{name}")).json()
    assert (body["id"], body["loaded_context_length"]) == (name, 8192)


async def test_both_sdks_read_the_list(
    openai_sdk: openai.AsyncOpenAI, sdk: anthropic.AsyncAnthropic
) -> None:
    assert [m.id async for m in openai_sdk.models.list()] == [INFO.id]
    assert [m.id async for m in sdk.models.list()] == [INFO.id]


@pytest.mark.parametrize("header", ["anthropic-version", "anthropic-beta"])
async def test_anthropics_clients_get_the_list_in_their_form(
    client: httpx.AsyncClient, engine: FakeEngine, header: str
) -> None:
    engine.info = replace(INFO, has_images=True)
    client.headers[header] = "2023-06-01"
    body = (await client.get("/v1/models")).json()
    (model,) = body.pop("data")
    assert body == {"has_more": False, "first_id": INFO.id, "last_id": INFO.id}
    assert model == (await client.get(f"/v1/models/{INFO.id}")).json()
    assert (model["id"], model["type"], model["lifecycle"]) == (INFO.id, "model", "active")
    assert model["created_at"] == "2023-11-14T22:13:20Z"
    assert (model["max_input_tokens"], model["max_tokens"]) == (8192, 8192)
    assert model["context_length"] == model["loaded_context_length"] == 8192
    assert not {"object", "created", "owned_by"} & {*model}
    able = model["capabilities"]
    named = {name for name, what in able.items() if what["supported"]}
    assert named == {"effort", "image_input", "structured_outputs", "thinking"}


async def test_anthropics_sdk_finds_every_field_of_a_model(sdk: anthropic.AsyncAnthropic) -> None:
    found = await sdk.models.retrieve("claude-any")
    assert found.id == "claude-any"
    TypeAdapter(ModelInfo).validate_python(found.model_dump(), strict=True)
    (beta,) = [m async for m in sdk.beta.models.list()]
    assert beta.capabilities is not None
    assert not beta.capabilities.context_management.supported


@pytest.mark.parametrize(
    ("query", "models"),
    [
        ("limit=1", 1),
        ("after_id=x", 0),
        ("before_id=x", 0),
        ("lifecycle=active&lifecycle=retired", 1),
        ("lifecycle[]=retired", 0),
    ],
)
async def test_another_page_of_anthropics_list_is_empty(
    client: httpx.AsyncClient, query: str, models: int
) -> None:
    client.headers["anthropic-version"] = "2023-06-01"
    body = (await client.get(f"/v1/models?{query}")).json()
    assert len(body["data"]) == models
    assert body["first_id"] == body["last_id"] == (INFO.id if models else None)


@pytest.mark.parametrize("limit", ["0", "1001", "x"])
async def test_a_page_of_a_wrong_size_is_a_bad_request(
    client: httpx.AsyncClient, limit: str
) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    response = await client.get(f"/v1/models?limit={limit}", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/api/v0/models", "/v1/api/v0/models"])
async def test_lm_studios_list(client: httpx.AsyncClient, path: str) -> None:
    body = (await client.get(path)).json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert set(model) == {
        "id",
        "object",
        "type",
        "publisher",
        "arch",
        "compatibility_type",
        "quantization",
        "state",
        "max_context_length",
        "loaded_context_length",
    }
    assert (model["id"], model["publisher"], model["arch"]) == (INFO.id, "org", "llama")
    assert (model["type"], model["compatibility_type"], model["state"]) == ("llm", "mlx", "loaded")
    assert (model["max_context_length"], model["loaded_context_length"]) == (32768, 8192)


async def test_the_caches_figures_are_the_engines(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await ask(client)
    assert (await client.get("/v1/cache")).json() == engine.figures()


async def test_a_request_is_found_under_the_id_that_its_response_carried(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.cached_tokens = 1
    id = await ask(client, "one two three")
    body = (await client.get(f"/v1/requests/{id}")).json()
    assert body["id"] == id
    assert (body["prompt_tokens"], body["cached_tokens"], body["fed_tokens"]) == (5, 1, 4)
    assert (body["status"], body["reuse"]) == ("done", "cold")
    assert list(body["timing"]) == [
        "queue_s",
        "render_s",
        "match_s",
        "restore_s",
        "prefill_s",
        "first_token_s",
        "decode_s",
    ]
    assert body["timing"]["render_s"] >= 0
    assert body["timing"]["decode_s"] is None
    assert body["lost"] is None


def test_what_is_reused_is_not_said_before_it_is_known():
    """For a queued request, and for a refused one."""
    for status in ("queued", "rejected"):
        record = RequestRecord("r", None, "chat", None, status, 0.0, 100)
        assert describe_request(record)["reuse"] is None
    record = RequestRecord("r", None, "chat", None, "prefill", 0.0, 100, 60)
    assert describe_request(record)["reuse"] == "warm"


async def test_requests_come_newest_first_and_as_many_as_asked_for(
    client: httpx.AsyncClient,
) -> None:
    ids = [await ask(client) for _ in range(3)]
    body = (await client.get("/v1/requests")).json()
    assert body["object"] == "list"
    assert [r["id"] for r in body["data"]] == ids[::-1]
    body = (await client.get("/v1/requests?limit=1")).json()
    assert [r["id"] for r in body["data"]] == ids[-1:]


@pytest.mark.parametrize("limit", ["-1", "x", "", "1e3", "9" * 50, "٣"])
async def test_a_limit_that_is_no_number_is_refused(client: httpx.AsyncClient, limit: str) -> None:
    response = await client.get("/v1/requests", params={"limit": limit})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


async def test_a_request_that_nobody_made_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/requests/req_0")).status_code == 404
