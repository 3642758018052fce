"""Keeping the bodies of chat requests in a folder, for `mlxcache explain`. Off unless asked for.

Bodies alone, as they came: no header, and so no key.
"""

from __future__ import annotations

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mlxcache.errors import ConfigError
from mlxcache.private import make_folder

log = logging.getLogger(__name__)

RECORDED = {"/v1/messages": "messages", "/v1/chat/completions": "chat"}
"""The endpoints whose requests are kept, and what their files are called by."""

MOST_FILES = 1000
MOST_BYTES = 500_000_000

_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[a-z]+-req_[0-9a-f]+\.json")
"""What a file is called: its time in UTC, so that names sort by it, the endpoint, the request."""


class Recorder:
    """Writes request bodies to `folder`, in a thread of its own; the oldest are removed.

    The folder is made for its user alone, and so is every file. Other files in it are left alone.
    Raises ConfigError where it cannot be made.
    """

    def __init__(self, folder: Path, *, files: int = MOST_FILES, nbytes: int = MOST_BYTES):
        self._folder, self._files, self._bytes = folder, files, nbytes
        try:
            make_folder(folder)
            kept = (p for p in folder.iterdir() if _NAME.fullmatch(p.name))
            self._kept = [(path, path.stat().st_size) for path in sorted(kept)]
        except OSError as error:
            raise ConfigError(f"--record: {folder} cannot be used: {error.strerror}") from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-record")
        self._failing = False

    def keep(self, id: str, path: str, body: bytes) -> None:
        """Have a body written that came in just now; returns at once. Of other paths, nothing."""
        kind = RECORDED.get(path)
        if kind is not None:
            self._pool.submit(self._keep, id, kind, body, time.time_ns())

    def _keep(self, id: str, kind: str, body: bytes, now: int) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9))
        path = self._folder / f"{stamp}.{now % 10**9 // 1000:06d}Z-{kind}-{id}.json"
        try:
            if len(body) <= self._bytes:
                self._make_room(len(body))
                self._write(path, body)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("requests are not recorded: %s", error)
            self._failing = True

    def _write(self, path: Path, body: bytes) -> None:
        part = path.with_suffix(".part")
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(body)
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._kept.append((path, len(body)))

    def _make_room(self, nbytes: int) -> None:
        size = sum(size for _, size in self._kept) + nbytes
        while self._kept and (len(self._kept) >= self._files or size > self._bytes):
            path, taken = self._kept.pop(0)
            size -= taken
            with suppress(FileNotFoundError):
                path.unlink()

    def close(self) -> None:
        """Write what was handed over, and end. Blocks."""
        self._pool.shutdown()
