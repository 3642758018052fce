"""Requests while the remote is gone, frozen, slow, wrong, full or sealed with another key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcache.engine.engine import Engine
from mlxcache.errors import ConfigError
from mlxcache.remote.objects import Objects, open_remote
from mlxcache.types import Job, Piece, RequestRecord, Text, Thinking, ToolCall
from mlxcache.wire.chat_bodies import request_to_chat
from tests.engine.running import started
from tests.remote.fault_proxy import Fault, FaultProxy

DISK = {"disk": "1GB", "no_anticipate": True}
SHARE = 0.1
NOISE_S = 0.3
"""Seconds by which a busy machine may delay any request."""
FAULTS: list[Fault] = ["gone", "frozen", "slow", "garbage", "damaged", "read-only", "busy"]


async def ask(engine: Engine, number: int, more: str = "") -> tuple[RequestRecord, list[Piece]]:
    messages = [{"role": "user", "content": f"{number} Please read on. " + "A line. " * 700}]
    if more:
        messages += [
            {"role": "assistant", "content": "I do."},
            {"role": "user", "content": more},
        ]
    chat = request_to_chat({"model": "m", "messages": messages})
    prompt = await engine.render(chat)
    id = f"req_{number}_{time.monotonic()}"
    stream = await engine.submit(Job(id, prompt, max_tokens=8))
    pieces = [one async for one in stream if isinstance(one, Text | Thinking | ToolCall)]
    record = await engine.request(id)
    assert record is not None
    return record, pieces


async def uploaded(engine: Engine, seconds: float = 30.0) -> bool:
    await engine.book.settled()
    runtime = await engine.call(lambda runtime: runtime)
    assert runtime.remote is not None
    return await asyncio.to_thread(runtime.remote.uploader.wait, seconds)


async def works_again(objects: Objects) -> None:
    end = time.monotonic() + 60
    while not (objects.available and objects.writable):
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_no_fault_of_the_remote_costs_more_than_a_tenth_of_a_cold_prompt(
    toy_llama: Path,
    tmp_path: Path,
    bucket: str,
    proxy: FaultProxy,
    use_endpoint: Callable[[str], None],
):
    through = open_remote(bucket)
    use_endpoint(f"http://{proxy.upstream[0]}:{proxy.upstream[1]}")
    direct = open_remote(bucket)
    try:
        async with (
            started(toy_llama, tmp_path / "a", remote=direct, **DISK) as one,
            started(toy_llama, tmp_path / "b", remote=through, **DISK) as other,
        ):
            cost = await other.call(lambda runtime: runtime.cost)
            for number, fault in enumerate(FAULTS):
                await ask(one, number)
                assert await uploaded(one)
                proxy.set(fault, 1e6)
                record, said = await ask(other, number, "Go on.")
                spent = record.timing["queue_s"] + record.timing["render_s"]
                cold = cost.seconds(0, record.prompt_tokens)
                print(
                    fault, record.fed_tokens, record.prompt_tokens, round(spent, 3), round(cold, 3)
                )
                assert spent <= SHARE * cold + NOISE_S
                assert said == (await ask(one, number, "Go on."))[1]
                again, _ = await ask(other, number, "Go on.")  # it is kept here
                assert again.fed_tokens <= 64
                proxy.set("none")
                await works_again(through)
            assert await uploaded(other, 90)
            await ask(one, 100)
            assert await uploaded(one)
            end = time.monotonic() + 70  # what was measured during the faults is forgotten
            for number in range(100, 200):
                record, _ = await ask(other, number, "Go on.")
                if record.fed_tokens <= 64 + 10:
                    break
                assert time.monotonic() < end
                await ask(one, number + 1)
                assert await uploaded(one)
                await asyncio.sleep(5)
            assert record.restored_tokens > 1000
    finally:
        direct.close()
        through.close()


@pytest.mark.slow
async def test_a_server_with_another_key_is_refused(bucket: str):
    one = open_remote(bucket, key=b"a" * 32)
    one.put("v1/a", b"x")
    for key in (None, b"b" * 32):
        with pytest.raises(ConfigError):
            open_remote(bucket, key=key)
    assert one.get("v1/a") == b"x"
    one.close()
