"""Download of large files from the Hub that can continue after an interruption.

huggingface_hub deletes an incomplete file. Here the incomplete file (the *part*) is kept beside its
place in the Hub's cache, and moved there when it is complete and its digest is right.
huggingface_hub then finds it as if it had downloaded it. Calls no MLX. May be called on any thread;
blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # documented

from mlxcache.errors import ModelError

Progress = Callable[[int, int], None]

LEAST_BYTES = 32 << 20
"""Least size of a file that is worth continuing."""

ANSWER_S = 5.0
"""Seconds for the Hub to list the files of a model."""

_MOST_BYTES = 50_000_000_000
"""Largest file that the Hub sends over plain HTTP."""

_THREADS = 4
_TRIES = 100
"""Times that a part is opened which another process moves or deletes before it is locked."""
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file to download.

    `name`: its path in the model's repository. `digest`: the SHA-256 of its content in hexadecimal.
    `size`: in bytes. `blob`: its place in the Hub's cache when it is complete.
    """

    name: str
    url: str
    digest: str
    size: int
    blob: Path

    @property
    def part(self) -> Path:
        """Path of the incomplete file while it is downloaded."""
        return self.blob.with_name(f"{self.blob.name}.mlxcache-part")


def find_large_files(
    model: str, revision: str | None, patterns: Sequence[str]
) -> tuple[LargeFile, ...]:
    """Return the large files of a model on the Hub that the Hub's cache lacks.

    Large are those of `LEAST_BYTES` (32 MiB) to 50 GB. `revision`: branch, tag or commit, None for
    the default branch. `patterns`: names of the files that are wanted, with wildcards. Makes one
    request. Raises the errors of the Hub's client.
    """
    info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
    large = {
        one.rfilename: one.lfs
        for one in info.siblings or []
        if one.lfs is not None and LEAST_BYTES <= one.lfs.size <= _MOST_BYTES
    }
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")
    found = (
        LargeFile(
            name,
            hf_hub_url(model, name, revision=info.sha),
            large[name].sha256,
            large[name].size,
            folder / "blobs" / large[name].sha256,
        )
        for name in large
        if any(fnmatch(name, pattern) for pattern in patterns)
    )
    return tuple(one for one in found if not one.blob.exists())


def fetch_large_files(files: Sequence[LargeFile], progress: Progress | None) -> None:
    """Download files into the Hub's cache, continuing those that are incomplete.

    `progress` is called with the bytes of the files on disk, and their total. Raises the errors of
    the Hub's client, OSError, and ModelError for a file whose digest is wrong.
    """
    told = _Told(files, progress)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="mlxcache-download") as pool:
        for future in [pool.submit(_fetch, one, told) for one in files]:
            future.result()


def _fetch(file: LargeFile, told: _Told) -> None:
    """Download the missing rest of a file, check its digest, and move it to `file.blob`.

    Raises as `fetch_large_files` does.
    """
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_TRIES):
        if _fetch_into_part(file, told):
            return
    raise OSError(f"{file.part} is moved or deleted by another program again and again")


def _fetch_into_part(file: LargeFile, told: _Told) -> bool:
    """Do what `_fetch` does, and return True when the file is in its place.

    Returns False, with nothing downloaded, if another process moved or deleted the opened part.
    """
    with _Part(file, told) as part, _locked(part):
        if not part.is_in_place():
            return False
        if file.blob.exists():  # another process has downloaded it meanwhile
            file.part.unlink(missing_ok=True)
            return True
        size = part.seek(0, os.SEEK_END)
        told.note(file, size)
        http_get(
            file.url,
            part,
            resume_size=min(size, file.size),
            headers=build_hf_headers(),
            expected_size=file.size,
            tqdm_class=_Silent,
        )
        if not _is_whole(file):
            file.part.unlink(missing_ok=True)
            raise ModelError(
                f"{file.name} was damaged on its way from the Hub: start again to download it."
            )
        file.part.replace(file.blob)
        return True


def _is_whole(file: LargeFile) -> bool:
    """Return whether the part of `file` on disk has the size and the digest of the whole file."""
    if file.part.stat().st_size != file.size:
        return False
    digest = hashlib.sha256()
    with file.part.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest() == file.digest


@contextmanager
def _locked(part: FileIO) -> Iterator[None]:
    """Context manager that locks a part for this process; waits while another one has the lock."""
    fcntl.flock(part, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(part, fcntl.LOCK_UN)


class _Told:
    """Reporter of the bytes of several files on disk, which calls `progress` with their sum.

    May be called on any thread; only one thread at a time calls `progress`.
    """

    def __init__(self, files: Sequence[LargeFile], progress: Progress | None):
        self._progress = progress
        self._sizes = dict.fromkeys((one.name for one in files), 0)
        self._total = sum(one.size for one in files)
        self._lock = threading.Lock()

    def note(self, file: LargeFile, size: int) -> None:
        """Record that `size` bytes of a file are on disk, and report the bytes of all files."""
        with self._lock:
            self._sizes[file.name] = size
            if self._progress is not None:
                self._progress(sum(self._sizes.values()), self._total)


class _Part(FileIO):
    """Binary file object of a part, opened for appending; reports its size as it grows."""

    def __init__(self, file: LargeFile, told: _Told):
        self._file, self._told = file, told
        super().__init__(file.part, "ab+")

    def is_in_place(self) -> bool:
        """Return whether the part's path still names the opened file."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), self._file.part.stat())
        except FileNotFoundError:
            return False

    def write(self, data: Any) -> int:
        """Write the bytes `data` at the end of the file; return the number of bytes written."""
        count = super().write(data)
        self._told.note(self._file, self.tell())
        return count


class _Silent:
    """A progress bar that shows nothing, for `http_get`."""

    def __init__(self, *_: object, **__: object):
        self.n, self.total = 0, 0

    def update(self, n: float | None = 1) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""
