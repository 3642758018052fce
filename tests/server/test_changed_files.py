"""Files that change while their model is unloaded: requests and /health say it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxcache.api.app import create_app
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from tests.api.fake import OneModel
from tests.server.api import CHAT, MESSAGES, user

BODY: dict[str, Any] = {"model": "m", "messages": [user("Hi")], "max_tokens": 2}


def change(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("damage", "said"),
    [(change, "has changed"), (Path.unlink, "cannot be read")],
    ids=["changed", "removed"],
)
async def test_health_names_the_file_until_it_is_as_it_was(toy, tmp_path, damage, said):
    """Requests get a 503 with the same words; the next one after that is answered."""
    folder = Path(shutil.copytree(toy("llama"), tmp_path / "model"))
    file = folder / "model.safetensors"
    kept = shutil.copy2(file, tmp_path / "kept")
    engine = Engine(Settings(model=str(folder), cache_dir=tmp_path, ram="200MB", disk="off"))
    await engine.start()
    transport = httpx.ASGITransport(create_app(OneModel(engine)))  # type: ignore[arg-type]
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            damage(file)
            assert (await client.get("/health")).status_code == 200, "its weights are in memory"
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            await engine.unload_weights()
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            reason = health.json()["reason"]
            assert f"model.safetensors of the model {folder.name} {said}" in reason
            assert "put back the file" in reason
            assert str(tmp_path) not in reason, "it needs no key"
            for path in (CHAT, MESSAGES):
                refused = await client.post(path, json=BODY)
                assert refused.status_code == 503
                assert refused.json()["error"]["message"] == reason
                assert refused.headers["retry-after"]
            shutil.copy2(kept, file)
            assert (await client.get("/health")).json()["status"] == "ok"
            assert (await client.post(CHAT, json=BODY)).status_code == 200
    finally:
        await engine.stop()
