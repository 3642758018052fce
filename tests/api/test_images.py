"""Image parts reach a model that takes images."""

from __future__ import annotations

from dataclasses import replace

import httpx

from tests.api.conftest import INFO, FakeEngine
from tests.api.messages import post
from tests.wire.anthropic_bodies import text, user
from tests.wire.test_images import BLOCK, PART, SHOWN


class TestServed:
    async def test_a_model_that_takes_images_gets_them(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.info = replace(INFO, has_images=True)
        message = {"role": "user", "content": [text("a"), PART]}
        body = {"messages": [message]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await post(client, messages=[user("a", BLOCK)])).status_code == 200
        count = {"model": "m", "messages": [user("a", BLOCK)]}
        response = await client.post("/v1/messages/count_tokens", json=count)
        assert response.status_code == 200
        assert [c.messages[0]["content"] for c in engine.chats] == [["a", SHOWN]] * 3
