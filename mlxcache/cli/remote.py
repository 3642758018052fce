"""HTTP client with which the commands use a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from mlxcache.cli.output import Step
from mlxcache.config.settings import is_loopback
from mlxcache.errors import MlxcacheError, NotFound
from mlxcache.private import create
from mlxcache.types import WARMING

ANSWER_S = 3.0
"""Timeout in seconds to connect, and to answer `GET /health`."""

PART_BYTES = 1 << 20
_HEADER = "X-Mlxcache-Request"

_POLL_S = 0.5


class NoServer(MlxcacheError):
    """Error raised if no mlxcache server answers at an address."""


class Refused(MlxcacheError):
    """Error raised if the server answers with another error `status` than 404."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def proxied(url: str) -> bool:
    """Return whether requests to `url` use proxies: not if it is an address of this machine."""
    return not is_loopback(httpx.URL(url).host)


class Remote:
    """Client of the server at `url`, whose results are the JSON objects of the HTTP API.

    Every request blocks, and raises NoServer if the server does not answer, else NotFound or
    Refused with the server's message. `Offline` has the same methods for sessions and files.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # no read timeout: a model may compute for minutes before it answers
        timeout = httpx.Timeout(None, connect=ANSWER_S)
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=proxied(self.url)
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise NoServer(f"{url!r} is not a server address: {error}") from error

    def __str__(self) -> str:
        return f"of the server at {self.url}"

    def health(self) -> dict[str, Any] | None:
        """Return the body of `GET /health`, or None if no mlxcache server answers.

        Another program may listen at the address: the key is not sent, and its answer, which may be
        endless, is not read.
        """
        try:
            request = self._http.build_request("GET", "/health", timeout=ANSWER_S)
            request.headers.pop("Authorization", None)
            with closing(self._http.send(request, stream=True)) as response:
                found = json.loads(response.read()) if _HEADER in response.headers else None
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        except ValueError:  # answered, with something else than JSON
            return {}
        return found if found is None or isinstance(found, dict) else {}

    def answers(self) -> bool:
        """Return whether an mlxcache server answers, even if its model is still loading."""
        return self.health() is not None

    # -- sessions ----------------------------------------------------------------------------

    def sessions(self) -> list[dict[str, Any]]:
        return self._list("/v1/sessions?limit=999999999")

    def computing(self) -> int:
        """Return the number of requests, running or waiting, that may still become a session."""
        return sum(bool(one["progress"]) and one["api"] != WARMING for one in self.requests())

    def requests(self, limit: int | None = None) -> list[dict[str, Any]]:
        return self._list("/v1/requests" + ("" if limit is None else f"?limit={limit}"))

    def session(self, id: str) -> dict[str, Any]:
        return self._json("GET", _path(id))

    def patch(self, id: str, **changes: Any) -> dict[str, Any]:
        return self._json("PATCH", _path(id), json=changes)

    def delete(self, id: str) -> None:
        self._json("DELETE", _path(id))

    def fork(self, id: str, name: str | None, at_tokens: int | None) -> dict[str, Any]:
        body = {"name": name, "at_tokens": at_tokens}
        return self._json("POST", f"{_path(id)}/fork", json=body)

    def snapshot(self, id: str, path: Path, format: str, progress: Step) -> int:
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
            raise MlxcacheError(
                f"The server sent {done:,} of {total:,} bytes and closed the connection: see its "
                "log."
            )
        return done

    def restore(
        self, path: Path, name: str | None, prompt: str | None, model: str | None, progress: Step
    ) -> dict[str, Any]:
        total, head = path.stat().st_size, (prompt or "").encode()
        params = {key: value for key, value in (("name", name), ("model", model)) if value}
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

    def response_items(self, id: str) -> list[dict[str, Any]]:
        """Return the items of a conversation up to and including the stored response `id`.

        Raises NotFound if one of the responses that it continues is missing.
        """
        path = f"/v1/responses/{quote(id, safe='')}"
        output: list[dict[str, Any]] = self._json("GET", path)["output"]
        found: list[dict[str, Any]] = []
        page: dict[str, Any] = {"has_more": True, "last_id": None}
        while page["has_more"]:
            after = {"after": page["last_id"]} if page["last_id"] else {}
            params = {"order": "asc", "limit": "100", **after}
            page = self._json("GET", f"{path}/input_items", params=params)
            found += page["data"]
        return found + output

    # -- the cache ---------------------------------------------------------------------------

    def warm(self, body: bytes, progress: Step) -> dict[str, Any]:
        before = {one["id"] for one in self._warmed()}
        with ThreadPoolExecutor(1) as pool:
            warmed = pool.submit(self._json, "POST", "/v1/cache/warm", content=body)
            while not wait([warmed], _POLL_S).done:
                for one in self._warmed():
                    if one["id"] not in before:
                        progress(one["cached_tokens"] + one["fed_tokens"], one["prompt_tokens"])
            return warmed.result()

    def _warmed(self) -> list[dict[str, Any]]:
        return [one for one in self.requests() if one["api"] == WARMING]

    def stats(self) -> dict[str, Any]:
        return self._json("GET", "/v1/cache")

    def check(self, _: Step) -> list[dict[str, str]]:
        return self._list("/v1/cache/check")

    def prune(self, limit: int | None, _: Step) -> dict[str, Any]:
        params = {} if limit is None else {"limit_bytes": str(limit)}
        return self._json("POST", "/v1/cache/prune", params=params)

    def clear(self, *, pinned: bool) -> dict[str, Any]:
        return self._json("DELETE", "/v1/cache", params={"pinned": "true" if pinned else "false"})

    # -- models ------------------------------------------------------------------------------

    def models(self, **more: Any) -> list[dict[str, Any]]:
        """Return all models of the server, the default one first."""
        return self._list("/v1/models", **more)

    def load_model(self, name: str) -> dict[str, Any]:
        """Load a model. Blocks until it is loaded, but only if it never was."""
        return self._json("POST", f"/v1/models/{quote(name, safe='/')}/load")

    def unload_model(self, name: str) -> dict[str, Any]:
        return self._json("POST", f"/v1/models/{quote(name, safe='/')}/unload")

    # -- live updates ------------------------------------------------------------------------

    def live(self, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield the state of `parts` of `GET /v1/live`, then each change. Blocks between."""
        with self._request("GET", "/v1/live", params={"parts": ",".join(parts)}) as response:
            yield from ((name, body) for name, body in _events(response) if name not in ("end", ""))

    def trace(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and bodies of the events of `GET /v1/trace`. Blocks between.

        Without events, ("", None) is yielded at least every ten seconds.
        """
        with self._request("GET", "/v1/trace") as response:
            yield from _events(response)

    # -- HTTP --------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        with self._request(method, path, **more) as response:
            found: dict[str, Any] = httpx.Response(200, content=response.read()).json()
            return found

    def _list(self, path: str, **more: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._json("GET", path, **more)["data"]
        return found

    @contextmanager
    def _request(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **more) as response:
                if response.is_error:
                    response.read()
                    raise _error_of(response)
                yield response
        except httpx.TransportError as error:
            raise NoServer(f"The server at {self.url} does not answer: {error}.") from error


def _events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Yield the name and the parsed body of each server-sent event; ("", None) for a comment."""
    name = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)
        elif line.startswith(":"):
            yield "", None


def _path(id: str) -> str:
    return f"/v1/sessions/{quote(id, safe='')}"


def _error_of(response: httpx.Response) -> MlxcacheError:
    message = f"The server answered with status {response.status_code}."
    with suppress(ValueError, KeyError, TypeError):
        message = str(response.json()["error"]["message"])
    status = response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        message += " Set --api-key or MLXCACHE_API_KEY."
    return NotFound(message) if status == HTTPStatus.NOT_FOUND else Refused(message, status)
