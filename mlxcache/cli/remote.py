"""HTTP client with which the commands use a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from mlxcache.cli.progress import Step
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


def proxied(url: str) -> bool:
    """Return whether requests to `url` use the proxies set in the environment.

    Returns False for addresses of this machine.
    """
    return not is_loopback(httpx.URL(url).host)


class Remote:
    """Client of the server at `url`.

    Sessions and requests are returned as the JSON objects of the HTTP API. Every request blocks.
    NoServer is raised if the server does not answer. An error response raises MlxcacheError with
    the server's message, or NotFound for 404. Progress callbacks run in the calling thread.
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

        If the body of an mlxcache server is no JSON object, {} is returned. The key is not sent,
        because another program may be listening at the address. The answer of another program is
        not read either, because it may be endless.
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

    # -- sessions ----------------------------------------------------------------------------

    def sessions(self) -> list[dict[str, Any]]:
        """Return all sessions, most recently used first."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/sessions?limit=999999999")["data"]
        return found

    def computing(self) -> int:
        """Return the number of running and waiting requests, except those that only warm the cache.

        Each of them may still become a session, which is listed when its reply is done.
        """
        return sum(bool(one["progress"]) and one["api"] != WARMING for one in self.requests())

    def requests(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the running, waiting and recently finished requests, newest first.

        They are those of `GET /v1/requests`. At most `limit` are returned; None leaves the number
        to the server.
        """
        path = "/v1/requests" + ("" if limit is None else f"?limit={limit}")
        found: list[dict[str, Any]] = self._json("GET", path)["data"]
        return found

    def session(self, id: str) -> dict[str, Any]:
        """Return the session `id` with its leaves. Raises NotFound."""
        return self._json("GET", _path(id))

    def patch(self, id: str, **changes: Any) -> dict[str, Any]:
        """Set `name` or `pinned` of the session `id`, and return the session. Raises NotFound."""
        return self._json("PATCH", _path(id), json=changes)

    def delete(self, id: str) -> None:
        """Remove the session `id`. Raises NotFound."""
        self._json("DELETE", _path(id))

    def fork(self, id: str, name: str | None, at_tokens: int | None) -> dict[str, Any]:
        """Create a session that continues the session `id`, and return the new one.

        It begins with the first `at_tokens` tokens of that session, or with all if that is None.
        `name` is the name of the new session, or None. Raises NotFound.
        """
        body = {"name": name, "at_tokens": at_tokens}
        return self._json("POST", f"{_path(id)}/fork", json=body)

    def snapshot(self, id: str, path: Path, format: str, progress: Step) -> int:
        """Download the session `id` to the file at `path` and return the number of bytes written.

        `format` is `mlxcache` or `mlx-lm`, as in `mlxcache snapshot --format`. `progress` receives
        the bytes written and their total. Raises MlxcacheError if the server closes the connection
        early.
        """
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
        """Upload a snapshot, or a prompt cache of mlx-lm, and return the imported session.

        `name` is the new session's name, None for that in the snapshot. `model` names the model of
        a server with several; None: the file decides. A prompt cache also needs `prompt`, the text
        or JSON list of token ids it was computed from, which is None for a snapshot. `progress`
        receives the bytes sent and their total.
        """
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

    # -- responses ---------------------------------------------------------------------------

    def response_items(self, id: str) -> list[dict[str, Any]]:
        """Return the items of a conversation up to and including the stored response `id`.

        They are the input items and outputs of the response and of all that it continues, oldest
        first. Raises NotFound if one of these responses is missing.
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
        """Have the server compute a prefix ahead of its first use, and return the server's answer.

        That is the answer of `POST /v1/cache/warm`, with `prompt_tokens`, `cached_tokens`,
        `restored_tokens`, `fed_tokens` and `seconds`. `body` is a chat request in JSON, or a system
        prompt as plain text. `progress` is called about every half second, with the prompt's tokens
        that are in the cache and their total, from `GET /v1/requests`.
        """
        before = {one["id"] for one in self._warmed()}
        with ThreadPoolExecutor(1) as pool:
            warmed = pool.submit(self._json, "POST", "/v1/cache/warm", content=body)
            while not wait([warmed], _POLL_S).done:
                for one in self._warmed():
                    if one["id"] not in before:
                        progress(one["cached_tokens"] + one["fed_tokens"], one["prompt_tokens"])
            return warmed.result()

    def _warmed(self) -> list[dict[str, Any]]:
        """Return the requests of `requests()` that only warm the cache, running or finished."""
        return [one for one in self.requests() if one["api"] == WARMING]

    def stats(self) -> dict[str, Any]:
        """Return the figures of the cache: the body of `GET /v1/cache`."""
        return self._json("GET", "/v1/cache")

    def check(self, _: Step) -> list[dict[str, str]]:
        """Have the server read all its files, and return the problems found.

        Each problem is an object with the `path` of a file and `what` is wrong with it. The server
        reports no progress, so the callback is not used.
        """
        found: list[dict[str, str]] = self._json("GET", "/v1/cache/check")["data"]
        return found

    def prune(self, limit: int | None, _: Step) -> dict[str, Any]:
        """Have the server remove damaged files, then evict until at most `limit` bytes are on disk.

        With `limit` None, nothing is evicted. Returns an object with `freed_bytes`. The progress
        callback is not used.
        """
        params = {} if limit is None else {"limit_bytes": str(limit)}
        return self._json("POST", "/v1/cache/prune", params=params)

    def clear(self, *, pinned: bool) -> dict[str, Any]:
        """Remove all sessions and their KV; pinned sessions only if `pinned`.

        Returns an object with the number of removed `sessions`, and `freed_bytes`.
        """
        return self._json("DELETE", "/v1/cache", params={"pinned": "true" if pinned else "false"})

    # -- models ------------------------------------------------------------------------------

    def models(self) -> list[dict[str, Any]]:
        """Return all models of the server, as in `GET /v1/models`, the default one first."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/models")["data"]
        return found

    def load_model(self, name: str) -> dict[str, Any]:
        """Have the server load the model `name`, and return its object in `GET /v1/models`.

        If the server has never loaded it, this blocks until it is loaded. Otherwise it returns
        while the server loads it. Raises NotFound.
        """
        return self._json("POST", f"/v1/models/{quote(name, safe='/')}/load")

    def unload_model(self, name: str) -> dict[str, Any]:
        """Have the server drop the weights of the model `name` from memory.

        Returns its object in `GET /v1/models`. Raises NotFound, or MlxcacheError while the model
        answers requests.
        """
        return self._json("POST", f"/v1/models/{quote(name, safe='/')}/unload")

    # -- live updates ------------------------------------------------------------------------

    def live(self, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield the current state, then each change, as the name of a part and its body.

        `parts` are names of parts of `GET /v1/live`, such as `requests`. Blocks between updates and
        ends when the server ends the stream.
        """
        with self._request("GET", "/v1/live", params={"parts": ",".join(parts)}) as response:
            yield from ((name, body) for name, body in _events(response) if name not in ("end", ""))

    def trace(self) -> Iterator[tuple[str, Any]]:
        """Yield the events of `GET /v1/trace` as pairs of a name and a body.

        The names are `trace`, `request` and `end`. While there are no events, a pair of "" and None
        is yielded at least every ten seconds. Blocks between pairs, and ends when the server ends
        the stream.
        """
        with self._request("GET", "/v1/trace") as response:
            yield from _events(response)

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
                    raise _error_of(response)
                yield response
        except httpx.TransportError as error:
            raise NoServer(f"The server at {self.url} does not answer: {error}.") from error


def _events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Yield the name and the parsed body of each server-sent event; "" and None for a comment."""
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
    if response.status_code == 401:
        message += " Set --api-key or MLXCACHE_API_KEY."
    return (NotFound if response.status_code == 404 else MlxcacheError)(message)
