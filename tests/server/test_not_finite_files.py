"""Files with NaN or infinity are refused when they are imported, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlxcache.api.app import create_app
from mlxcache.safetensors import read_header
from tests.api.fake import OneModel
from tests.engine.running import started
from tests.server.api import CHAT, user, words
from tests.store.session_of import poisoned

BODY: dict[str, Any] = {"model": "m", "messages": [user(words(3, 60))], "max_tokens": 2}


def with_value(content: bytes, folder: Path, value: float) -> bytes:
    """The same file, which has no checksums, with `value` as the last number of its last floats."""
    (folder / "file").write_bytes(content)
    fd = os.open(folder / "file", os.O_RDONLY)
    *_, place = (one for one in read_header(fd, own=False).places if one.dtype == "F32")
    os.close(fd)
    end = place.offset + place.nbytes
    return content[: end - 4] + np.float32(value).tobytes() + content[end:]


async def files_of(client: httpx.AsyncClient, folder: Path) -> tuple[int, Any, list[str]]:
    listed = (await client.get("/v1/sessions")).json()["data"]
    disk = (await client.get("/v1/cache")).json()["disk"]
    received = [name for _, _, names in os.walk(folder) for name in names if "restore-" in name]
    return len(listed), disk["files"], received


@pytest.mark.parametrize(
    "case",
    [
        ("llama", {}, "kv.1.1"),
        ("llama", {"kv_bits": 8}, "kv.11.0"),
        ("qwen3_5", {}, "state"),
    ],
    ids=["plain", "scales", "recurrent"],
)
async def test_what_is_not_finite_is_a_400(toy, tmp_path, monkeypatch, case):
    """Snapshots and prompt caches of mlx-lm. As they were, both are imported."""
    family, settings, tensor = case
    cache = tmp_path / "cache"
    async with started(toy(family), cache, disk="100MB", no_anticipate=True, **settings) as engine:
        transport = httpx.ASGITransport(create_app(OneModel(engine)))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            (made,) = (await client.get("/v1/sessions")).json()["data"]
            url = f"/v1/sessions/{made['id']}/snapshot"
            good = (await client.get(url)).content
            with poisoned(monkeypatch, tensor, np.nan):
                bad = [(await client.get(url)).content]
            assert bad[0] != good
            theirs = (await client.get(url, params={"format": "mlx-lm"})).content
            bad.append(with_value(theirs, tmp_path, np.inf))
            await client.delete("/v1/cache")
            before = await files_of(client, cache)
            for content in bad:
                refused = await client.post("/v1/sessions", content=content)
                assert refused.status_code == 400
                assert "NaN or infinity" in refused.json()["error"]["message"]
                assert await files_of(client, cache) == before
                assert (await client.post(CHAT, json=BODY)).status_code == 200
                await client.delete("/v1/cache")
            for content in (good, theirs):
                assert (await client.post("/v1/sessions", content=content)).status_code == 201
