"""Recording of chat request bodies in a folder, for `mlxcache explain`. Off by default.

Headers are not recorded, so keys are not written.
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

RECORDED = {
    "/v1/messages": "messages",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
}
"""URL paths of recorded endpoints, each with its name in file names."""

MAX_FILES = 1000
MAX_BYTES = 500_000_000

_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[a-z]+-req_[0-9a-f]+\.json")
"""Names of recorded files: time in UTC (so that they sort by time), endpoint, request id."""


class Recorder:
    """Writer of request bodies to files in `folder`, of which the oldest are removed.

    At most `files` files and `nbytes` bytes are kept. Folder and files are private to the user, and
    other files in the folder are not touched. Raises ConfigError if the folder cannot be used.
    """

    def __init__(self, folder: Path, *, files: int = MAX_FILES, nbytes: int = MAX_BYTES):
        self._folder, self._files, self._bytes = folder, files, nbytes
        try:
            make_folder(folder)
            recorded = (p for p in folder.iterdir() if _NAME.fullmatch(p.name))
            self._written = [(path, path.stat().st_size) for path in sorted(recorded)]
        except OSError as error:
            raise ConfigError(f"--record: {folder} cannot be used: {error.strerror}") from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-record")
        self._failing = False

    def record(self, id: str, path: str, body: bytes) -> None:
        """Queue the body of a request to `path` to be written, if it is one of `RECORDED`.

        Errors of writing are only logged.
        """
        kind = RECORDED.get(path)
        if kind is not None:
            self._pool.submit(self._save, id, kind, body, time.time_ns())

    def _save(self, id: str, kind: str, body: bytes, now: int) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9))
        path = self._folder / f"{stamp}.{now % 10**9 // 1000:06d}Z-{kind}-{id}.json"
        try:
            if len(body) <= self._bytes:
                self._remove_oldest(len(body))
                self._write(path, body)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("%s: request body not written to the folder of --record: %s", id, error)
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
        self._written.append((path, len(body)))

    def _remove_oldest(self, nbytes: int) -> None:
        size = sum(size for _, size in self._written) + nbytes
        while self._written and (len(self._written) >= self._files or size > self._bytes):
            path, taken = self._written.pop(0)
            size -= taken
            with suppress(FileNotFoundError):
                path.unlink()

    def close(self) -> None:
        """Write all queued bodies and stop the writer. Blocks."""
        self._pool.shutdown()
