"""A Hugging Face Hub on this machine, with one model: as much of it as downloads need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

MODEL = "owner/name"

LARGE = 100_000
"""Size in bytes above which a file is in Git LFS."""


class FakeHub:
    """A Hub with the model `MODEL` in one revision, whose name follows from its files.

    `files`: their contents by name. `refusal`: status and error code of all answers, if set.
    `break_after`: position in each larger file at which connections end, if set. `fetched`:
    names of the files that were asked for, and `ranges` the first byte of each.
    """

    def __init__(self) -> None:
        self.files: Mapping[str, bytes] = {}
        self.refusal: tuple[int, str] | None = None
        self.break_after: int | None = None
        self.fetched: list[str] = []
        self.ranges: list[int] = []
        hub = self

        class Handler(_Handler):
            of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def sha(self) -> str:
        """The commit."""
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def stop(self) -> None:
        """Let nothing answer any more. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.of.refusal is not None:
            status, code = self.of.refusal
            self._send(b"", status, {"X-Error-Code": code})
        elif path == f"/api/models/{MODEL}/tree/{self.of.sha}":
            self._send(json.dumps([_entry(*file) for file in self.of.files.items()]).encode())
        elif path.startswith(f"/api/models/{MODEL}"):
            files = [_sibling(*file) for file in self.of.files.items()]
            self._send(json.dumps({"id": MODEL, "sha": self.of.sha, "siblings": files}).encode())
        elif path.startswith(f"/{MODEL}/resolve/"):
            name = path.rpartition("/")[2]
            if self.command == "GET":
                self.of.fetched.append(name)
                first = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
                self.of.ranges.append(int(first.partition("-")[0]))
            self._send_file(self.of.files[name])
        else:
            self._send(b"", 404, {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, body: bytes) -> None:
        tag = {"ETag": f'"{_digest(body)}"'}
        wanted = self.headers.get("Range")
        if wanted is None or self.command == "HEAD":
            self._send(body, more=tag, most=self.of.break_after)
            return
        first = int(wanted.removeprefix("bytes=").partition("-")[0])
        place = f"bytes {first}-{len(body) - 1}/{len(body)}"
        most = None if self.of.break_after is None else max(0, self.of.break_after - first)
        self._send(body[first:], 206, {**tag, "Content-Range": place}, most)

    def _send(
        self,
        body: bytes,
        status: int = 200,
        more: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.of.sha)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:most])
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


def _entry(name: str, body: bytes) -> dict[str, object]:
    found = {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}
    return found | ({"lfs": {"oid": _digest(body), **_pointer(body)}} if _is_large(body) else {})


def _sibling(name: str, body: bytes) -> dict[str, object]:
    found = {"rfilename": name, "size": len(body)}
    return found | ({"lfs": {"sha256": _digest(body), **_pointer(body)}} if _is_large(body) else {})


def _is_large(body: bytes) -> bool:
    return len(body) > LARGE


def _pointer(body: bytes) -> dict[str, object]:
    return {"size": len(body), "pointerSize": 130}


def _digest(body: bytes) -> str:
    """A file's name among the blobs: that of a large file is checked by who downloads it."""
    return (hashlib.sha256 if _is_large(body) else hashlib.sha1)(body).hexdigest()


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub that the Hub's client uses, with an empty cache folder."""
    hub = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    form = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield hub
    hub.stop()
