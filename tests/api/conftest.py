"""Fixtures: the real application over a scripted engine, in process and on a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import anthropic
import httpx
import httpx2
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from mlxcache.api.app import create_app
from mlxcache.api.http import ApiSettings
from tests.api.fake import INFO, FakeEngine, FakeStream, OneModel, reply

__all__ = ["INFO", "FakeEngine", "FakeStream", "eventually", "reply", "soon"]

T = TypeVar("T")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def settings() -> ApiSettings:
    """Settings of the application; override in a module or class."""
    return ApiSettings()


@pytest.fixture
def app(engine: FakeEngine, settings: ApiSettings) -> Starlette:
    return create_app(OneModel(engine), settings)  # type: ignore[arg-type]


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client in process; a streamed answer arrives whole, at its end."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def openai_sdk(app: Starlette) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(app)
    async with openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="any",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    ) as client:
        yield client


@pytest.fixture
async def sdk(app: Starlette) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(app)
    async with anthropic.AsyncAnthropic(
        base_url="http://test",
        api_key="any",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    ) as client:
        yield client


@pytest.fixture
def live(app: Starlette) -> Iterator[str]:
    """Serve the application on a real socket, in a thread; the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until `condition` holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


async def soon(condition: Callable[[], Awaitable[T] | T], seconds: float = 5.0) -> None:
    """`eventually` for asynchronous tests: the event loop runs meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)
