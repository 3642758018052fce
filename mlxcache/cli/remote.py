"""HTTP client with which the commands use a running server."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from mlxcache.cli.output import Step
from mlxcache.cli.show import WARMING
from mlxcache.config.settings import is_loopback
from mlxcache.errors import MlxcacheError, NotFound
from mlxcache.private import create

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
    return not is_loopback(urlsplit(url).hostname or "")


class Remote:
    """Client of the server at `url`, whose results are the JSON objects of the HTTP API.

    Every request blocks, and raises NoServer if the server does not answer, else NotFound or
    Refused with the server's message. `Offline` has the same methods for sessions and files.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.has_key = bool(api_key)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port  # a port is checked when it is read
            more = (parts.username, parts.query, parts.fragment)
            if parts.scheme not in ("http", "https") or not host or any(more):
                raise ValueError("it is not like http://127.0.0.1:8081")
            if not url.isascii():
                raise ValueError("it has characters that are not ASCII")
            host.encode("idna")
        except ValueError as error:
            raise NoServer(f"{url!r} is not a server address: {error}") from error
        proxies: dict[str, str] | None = None if proxied(self.url) else {}  # None: the user's
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(proxies), _Patient(), _PatientTls(), _AnyStatus()
        )

    def __str__(self) -> str:
        return f"of the server at {self.url}"

    def health(self) -> dict[str, Any] | None:
        """Return the body of `GET /health`, or None if no mlxcache server answers.

        Another program may listen at the address: the key is not sent, and its answer, which may be
        endless, is not read.
        """
        try:
            request = urllib.request.Request(f"{self.url}/health")
            with self._opener.open(request, timeout=ANSWER_S) as response:
                found = json.loads(response.read()) if _HEADER in response.headers else None
        except _FAILURES:
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
        return self._json("PATCH", _path(id), body=changes)

    def delete(self, id: str) -> None:
        self._json("DELETE", _path(id))

    def fork(self, id: str, name: str | None, at_tokens: int | None) -> dict[str, Any]:
        body = {"name": name, "at_tokens": at_tokens}
        return self._json("POST", f"{_path(id)}/fork", body=body)

    def snapshot(self, id: str, path: Path, format: str, progress: Step) -> int:
        done = 0
        with (
            self._request("GET", f"{_path(id)}/snapshot", params={"format": format}) as response,
            create(path) as file,
        ):
            total = int(response.headers.get("content-length", 0))
            for part in iter(lambda: self._read(response, PART_BYTES), b""):
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
            events = self._events(response)
            yield from ((name, body) for name, body in events if name not in ("end", ""))

    def trace(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and bodies of the events of `GET /v1/trace`. Blocks between.

        Without events, ("", None) is yielded at least every ten seconds.
        """
        with self._request("GET", "/v1/trace") as response:
            yield from self._events(response)

    # -- HTTP --------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        with self._request(method, path, **more) as response:
            found: dict[str, Any] = json.loads(self._read(response))
            return found

    def _list(self, path: str, **more: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._json("GET", path, **more)["data"]
        return found

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] = {},
        body: Any = None,
        content: Any = None,
        headers: Mapping[str, str] = {},
        timeout: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        url = f"{self.url}{path}" + (f"?{urlencode(params)}" if params else "")
        more = {**self._headers, **headers, "Content-Type": "application/json"}
        data = content if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, more, method=method)
        with self._naming():
            response = self._opener.open(request, timeout=timeout)
        with response:
            if response.status >= HTTPStatus.BAD_REQUEST:
                raise _error_of(response.status, self._read(response))
            yield response

    def _read(self, response: http.client.HTTPResponse, size: int | None = None) -> bytes:
        with self._naming():
            return response.read(size)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
        """Yield each event's name and parsed body; ("", None) for a comment."""
        name = ""
        while True:
            with self._naming():
                line = response.readline().decode()
            if not line:
                return
            field, _, value = line.rstrip("\r\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)
            elif line.startswith(":"):
                yield "", None

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise NoServer(f"The server at {self.url} does not answer: {error}.") from error


# -- urllib, which is imported in a fifth of the time of httpx ----------------------------------

_FAILURES = (OSError, http.client.HTTPException)


class _Connection(http.client.HTTPConnection):
    """Connection whose timeout is for what follows; `ANSWER_S` is for connecting."""

    def connect(self) -> None:
        patience, self.timeout = self.timeout, ANSWER_S
        super().connect()
        self.sock.settimeout(patience)


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Patient(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _PatientTls(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        from httpx import create_ssl_context  # noqa: PLC0415 - takes 100 ms

        return self.do_open(_TlsConnection, req, context=create_ssl_context())


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns every answer: a redirection would send the key on."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _path(id: str) -> str:
    return f"/v1/sessions/{quote(id, safe='')}"


def _error_of(status: int, body: bytes) -> MlxcacheError:
    message = f"The server answered with status {status}."
    with suppress(ValueError, KeyError, TypeError):
        message = str(json.loads(body)["error"]["message"])
    if status == HTTPStatus.UNAUTHORIZED:
        message += " Set --api-key or MLXCACHE_API_KEY."
    return NotFound(message) if status == HTTPStatus.NOT_FOUND else Refused(message, status)
