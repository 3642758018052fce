"""A running server, as commands use it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from mlxcache.config.settings import is_loopback
from mlxcache.errors import MlxcacheError, NotFound
from mlxcache.private import create
from mlxcache.types import WARMING

ANSWER_S = 3.0
"""How long a server may take to say that it is there."""

PART_BYTES = 1 << 20
_HEADER = "X-Mlxcache-Request"

Progress = Callable[[int, int], None]
"""Called with the bytes, tokens or files done and those to do in all."""

_POLL_S = 0.5


class NoServer(MlxcacheError):
    """Nothing answers where a server was looked for, or it is no mlxcache."""


def proxied(url: str) -> bool:
    """Whether a proxy of the environment may be in between: none is on the way to this machine."""
    return not is_loopback(httpx.URL(url).host)


class Remote:
    """The server at `url`. What it refuses is raised as MlxcacheError, with its own words."""

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # a model may compute for minutes before it answers
        timeout = httpx.Timeout(None, connect=ANSWER_S)
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=proxied(self.url)
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise NoServer(f"{url!r} is no address of a server: {error}") from error

    def __str__(self) -> str:
        return f"of the server at {self.url}"

    def answers(self) -> bool:
        """Whether an mlxcache server is there, also one that is still loading its model.

        The key is not sent: something else may listen there.
        """
        try:
            request = self._http.build_request("GET", "/health", timeout=ANSWER_S)
            request.headers.pop("Authorization", None)
            return _HEADER in self._http.send(request).headers
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    # -- sessions ----------------------------------------------------------------------------

    def sessions(self) -> list[dict[str, Any]]:
        """All sessions, those used last first."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/sessions?limit=999999999")["data"]
        return found

    def computing(self) -> int:
        """How many requests there are of which sessions may come."""
        found = self._json("GET", "/v1/requests")["data"]
        return sum(bool(one["progress"]) and one["api"] != WARMING for one in found)

    def session(self, id: str) -> dict[str, Any]:
        """One session with its leaves."""
        return self._json("GET", _path(id))

    def patch(self, id: str, **changes: Any) -> dict[str, Any]:
        """Change `name` or `pinned`."""
        return self._json("PATCH", _path(id), json=changes)

    def delete(self, id: str) -> None:
        """Remove a session."""
        self._json("DELETE", _path(id))

    def fork(self, id: str, name: str | None, at_tokens: int | None) -> dict[str, Any]:
        """A new session that goes on from `id`."""
        body = {"name": name, "at_tokens": at_tokens}
        return self._json("POST", f"{_path(id)}/fork", json=body)

    def snapshot(self, id: str, path: Path, format: str, progress: Progress) -> int:
        """Write a session to the file at `path`; its size in bytes."""
        done = 0
        with (
            self._request("GET", f"{_path(id)}/snapshot", params={"format": format}) as response,
            create(path) as file,
        ):
            total = int(response.headers.get("content-length", 0))
            for part in response.iter_bytes(PART_BYTES):
                file.write(part)
                done += len(part)
                progress(done, total)
        if done < total:
            raise MlxcacheError("The server broke off; its log says why.")
        return done

    def restore(
        self, path: Path, name: str | None, prompt: str | None, progress: Progress
    ) -> dict[str, Any]:
        """Take in the snapshot at `path`, or mlx-lm's prompt cache that was made of `prompt`."""
        total, head = path.stat().st_size, (prompt or "").encode()
        params = {"name": name} if name else {}
        if head:
            params["prompt_bytes"] = str(len(head))

        def parts() -> Iterator[bytes]:
            done = 0
            yield head
            with path.open("rb") as file:
                while part := file.read(PART_BYTES):
                    yield part
                    done += len(part)
                    progress(done, total)

        return self._json(
            "POST",
            "/v1/sessions",
            params=params,
            content=parts(),
            headers={"Content-Length": str(total + len(head))},
        )

    # -- the cache ---------------------------------------------------------------------------

    def warm(self, body: bytes, progress: Progress) -> dict[str, Any]:
        """Compute a prefix ahead of use; the tokens so far are asked for meanwhile."""
        before = {one["id"] for one in self._warmed()}
        with ThreadPoolExecutor(1) as pool:
            warmed = pool.submit(self._json, "POST", "/v1/cache/warm", content=body)
            while not wait([warmed], _POLL_S).done:
                for one in self._warmed():
                    if one["id"] not in before:
                        progress(one["cached_tokens"] + one["fed_tokens"], one["prompt_tokens"])
            return warmed.result()

    def _warmed(self) -> list[dict[str, Any]]:
        """Recent requests of this kind."""
        found = self._json("GET", "/v1/requests")["data"]
        return [one for one in found if one["api"] == WARMING]

    def stats(self) -> dict[str, Any]:
        """The cache's figures."""
        return self._json("GET", "/v1/cache")

    def check(self, _: Progress) -> list[dict[str, str]]:
        """What is wrong with the server's files, read whole; nothing is told meanwhile."""
        found: list[dict[str, str]] = self._json("GET", "/v1/cache/check")["data"]
        return found

    def prune(self, limit: int | None, _: Progress) -> dict[str, Any]:
        """Remove damaged files, and what is beyond `limit` bytes on disk."""
        params = {} if limit is None else {"limit_bytes": str(limit)}
        return self._json("POST", "/v1/cache/prune", params=params)

    def clear(self, *, pinned: bool) -> dict[str, Any]:
        """Empty both tiers."""
        return self._json("DELETE", "/v1/cache", params={"pinned": "true" if pinned else "false"})

    # -- what goes on ------------------------------------------------------------------------

    def live(self, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """What the server tells of `parts`, now and whenever it changes, until it ends."""
        name = ""
        with self._request("GET", "/v1/live", params={"parts": ",".join(parts)}) as response:
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data" and name != "end":
                    yield name, json.loads(value)

    # -- HTTP --------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        with self._request(method, path, **more) as response:
            found: dict[str, Any] = httpx.Response(200, content=response.read()).json()
            return found

    @contextmanager
    def _request(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **more) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield response
        except httpx.TransportError as error:
            raise NoServer(f"The server at {self.url} does not answer: {error}.") from error


def _path(id: str) -> str:
    return f"/v1/sessions/{quote(id, safe='')}"


def _refusal(response: httpx.Response) -> MlxcacheError:
    message = f"The server answered with status {response.status_code}."
    with suppress(ValueError, KeyError, TypeError):
        message = str(response.json()["error"]["message"])
    if response.status_code == 401:
        message += " Give it with --api-key or in MLXCACHE_API_KEY."
    return (NotFound if response.status_code == 404 else MlxcacheError)(message)
