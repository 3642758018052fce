"""Servers of one model: in this process, or as processes of their own; and a client of either."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import uvicorn

from mlxcache.api.app import create_app
from mlxcache.cli.protocol import Protocol as HttpProtocol
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from tests.accounts import check_accounts, check_at_rest
from tests.api.fake import OneModel
from tests.forked import served
from tests.proofs.features.apis import Api, Json, Reply
from tests.served import Served

WAIT_S = 120.0
POLL_S = 0.01
LIVE = ("queued", "prefill", "decode")


class Host(Protocol):
    """A running server. `settle` waits until it has nothing left to do. `check` raises an error
    unless what it holds is what it says. `restart` keeps its folder. `thin` drops KV, as pressure
    would, by a number."""

    @property
    def url(self) -> str: ...
    def settle(self) -> None: ...
    def check(self) -> None: ...
    def restart(self) -> None: ...
    def thin(self, number: int) -> None: ...
    def close(self) -> None: ...


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the tests."""
        yield


class Inside:
    """A server in a thread of this process, whose memory can be looked into."""

    def __init__(self, model: Path, folder: Path, **settings: Any):
        self._settings = Settings(model=str(model), cache_dir=folder, **{"ram": "300MB"} | settings)
        self._start()

    def _start(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_S), "the model was not loaded"

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._engine = engine = Engine(self._settings)
        await engine.start()
        config = uvicorn.Config(
            create_app(OneModel(engine)),  # type: ignore[arg-type]
            http=HttpProtocol, log_config=None, lifespan="off",
            ws="none", timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = _Server(config)
        serving = asyncio.create_task(server.serve([self._socket]))
        self._ready.set()
        await self._over.wait()
        server.should_exit = True
        await serving
        await engine.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _call(self, action: Callable[[ModelRuntime], Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(self._engine.call(action), self._loop)
        return future.result(WAIT_S)

    def settle(self) -> None:
        runtime: ModelRuntime = self._call(lambda runtime: runtime)
        _wait_for(lambda: self._call(lambda _: runtime.scheduler.idle))
        runtime.next_turns.flush()
        _wait_for(lambda: self._call(lambda _: not runtime.scheduler.idle_prefill.ready))
        _wait_for(lambda: self._call(lambda _: not runtime.kv.writing))

    def check(self) -> None:
        def look(runtime: ModelRuntime) -> None:
            check_accounts(runtime.kv, runtime.scheduler.lanes)
            check_at_rest(runtime.kv)

        self._call(look)

    def restart(self) -> None:
        self.close()
        self._start()

    def thin(self, number: int) -> None:
        def drop(runtime: ModelRuntime) -> None:
            rng, ram = random.Random(number), runtime.kv.ram
            idle = [lineage for lineage in ram.idle.values() if rng.random() < 0.5]
            for lineage in idle:
                ram.drop_rows(lineage)
            if rng.random() < 0.5:  # checkpoints, of requests too where nothing else is left
                held = ram.tree.checkpoint_bytes if rng.random() < 0.5 else ram.idle_bytes
                ram.make_room(ram.budget.free + int(rng.random() * held))
            check_accounts(runtime.kv, runtime.scheduler.lanes)

        self._call(drop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server does not end"


class Running:
    """A server that runs by itself at `url`, seen from outside."""

    def __init__(self, url: str):
        self.url = url

    def _get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=WAIT_S).raise_for_status().json()

    def settle(self) -> None:
        """Anticipation cannot be seen from outside: wait until the figures are still."""
        before: Any = None

        def still() -> bool:
            nonlocal before
            figures = self._get("/v1/cache")
            busy = any(one["status"] in LIVE for one in self._get("/v1/requests?limit=20")["data"])
            now = figures["tree_tokens"], figures["anticipated"], figures["pending_bytes"]
            same, before = now == before, now
            time.sleep(0.05)
            return same and not busy and not figures["pending_bytes"]

        _wait_for(still)

    def check(self) -> None:
        figures = self._get("/v1/cache")
        kinds = figures["ram"]["kinds"]
        assert not kinds.get("states"), kinds
        assert not kinds.get("batch"), kinds
        assert figures["ram"]["high_water_bytes"] <= figures["ram"]["limit_bytes"]

    def restart(self) -> None:
        """Do nothing: it is not ours."""

    def thin(self, number: int) -> None:
        """Do nothing: memory cannot be reached from outside."""

    def close(self) -> None:
        """Do nothing."""


class Outside(Running):
    """A server as a process of its own, as a user starts it; every second restart kills it."""

    def __init__(self, model: Path, folder: Path, *flags: str):
        folder.mkdir(parents=True, exist_ok=True)
        where = ("--model", str(model), "--cache-dir", str(folder / "cache"))
        self._start = lambda: served(*where, *flags, home=folder)
        self._stack = contextlib.ExitStack()
        self._served: Served = self._stack.enter_context(self._start())
        self._restarts = 0
        super().__init__(self._served.url)

    def restart(self) -> None:
        self._restarts += 1
        self._served.stop(signal.SIGKILL if self._restarts % 2 == 0 else signal.SIGTERM, 60)
        self._stack.close()
        self._served = self._stack.enter_context(self._start())
        self.url = self._served.url

    def close(self) -> None:
        self._stack.close()


def _wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, "the server does not come to rest"
        time.sleep(POLL_S)


class Client:
    def __init__(self, host: Host):
        self.host = host
        self._http = httpx.Client(timeout=WAIT_S)

    def get(self, path: str) -> Any:
        return self._http.get(self.host.url + path).raise_for_status().json()

    def forget(self) -> None:
        """Let the server drop all KV and all sessions; replies are remembered."""
        self._http.delete(f"{self.host.url}/v1/cache?pinned=true").raise_for_status()

    def ask(
        self, api: Api, body: Json, *, stream: bool = False, leave_after: int | None = None
    ) -> Reply:
        """Send a request; leave after so many events of its stream."""
        url = self.host.url + api.path
        if not stream and leave_after is None:
            response = self._http.post(url, json=body)
            reply = _reply(response)
            if reply.status == 200:
                api.read(response.json(), reply)
                reply.complete = True
            return reply
        options = {} if api.path == "/v1/messages" else {"stream_options": {"include_usage": True}}
        asked = body | {"stream": True} | options
        with self._http.stream("POST", url, json=asked) as response:
            if response.status_code != 200:
                response.read()
            reply = _reply(response)
            if reply.status == 200 and leave_after != 0:
                self._read(api, _events(response.iter_lines()), reply, leave_after)
        return reply

    def _read(
        self, api: Api, events: Iterator[Json], reply: Reply, leave_after: int | None
    ) -> None:
        for count, event in enumerate(events, 1):
            if "error" in event or event.get("type") in ("error", "response.failed"):
                reply.error = json.dumps(event)
                return
            api.add(event, reply)
            if count == leave_after:
                return
        reply.complete = True

    def records(self, id: str, choices: int) -> Sequence[Json]:
        """Return the records of a request's choices when all are over."""
        ids = [id, *(f"{id}-{i}" for i in range(1, choices))]
        found: list[Json] = []

        def over() -> bool:
            found[:] = [self.get(f"/v1/requests/{one}") for one in ids]
            return all(one["status"] not in LIVE for one in found)

        _wait_for(over)
        return found

    def close(self) -> None:
        self._http.close()


def _reply(response: httpx.Response) -> Reply:
    id = response.headers.get("x-mlxcache-request", "")
    error = "" if response.status_code == 200 else response.text
    return Reply(response.status_code, id, error)


def _events(lines: Iterator[str]) -> Iterator[Json]:
    for line in lines:
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)
