"""The namespace of a model as one digest. KV is never reused in another namespace.

All functions may be called on any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxcache.disk_calls import sync
from mlxcache.errors import ModelError
from mlxcache.model.backend import PROCESSOR_FILES, Backend, choose_backend, vlm_version
from mlxcache.model.hub import Progress
from mlxcache.private import make_folder

log = logging.getLogger("mlxcache.model")

FORMAT = 1
"""Version of stored KV. It is raised when KV stored before must not be used any more."""

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
_CONFIGS = ("config.json", "hf_quant_config.json")  # the second is NVIDIA's, read by mlx-lm
_BLOB = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 16 << 20
_MEMO_VERSION = 1
_SETTLED_NS = 2_000_000_000  # a file system's clock may tick as slowly as this


def fingerprint(
    path: Path,
    *,
    adapter: Path | None,
    memo: Path,
    layout_key: str,
    progress: Progress | None = None,
    draft: Path | None = None,
    backend: str | None = None,
) -> str:
    """Return the namespace of the model in folder `path`, as 32 hexadecimal digits.

    The digest covers the content of the weights, of the configuration (parsed JSON), of Python code
    that the model runs, of the adapter in folder `adapter` and of the draft model in folder
    `draft`; `layout_key`, a text that stands for the shapes and dtypes of KV; the versions of
    mlx-lm and of stored KV; and, if mlx-vlm runs the model, the version of mlx-vlm and the settings
    of the image processor. It covers no name, so a model has the same namespace wherever its folder
    is. `backend`: the library that runs the model, "mlx-lm" or "mlx-vlm"; None for the one that
    runs it without images.

    Weights and code are identified by their SHA-256. A large file in the Hub's cache has it as its
    name. Other files are read once, and their digests are stored in the file `memo` and used while
    size, times and inode are unchanged. `progress` is called with the bytes read so far and the
    total. Blocks while it reads.

    Raises ModelError, which names the file, if a file cannot be read.
    """
    path = path.expanduser()
    vlm = (_plain_backend(path) if backend is None else backend) == "mlx-vlm"
    weights = sorted(path.glob("*.safetensors" if vlm else "model*.safetensors"))
    code = sorted(path.rglob("*.py")) if _runs_code(path) else []
    adapters = [] if adapter is None else [adapter.expanduser() / name for name in ADAPTER_FILES]
    content = _Reader(memo, progress).digests([*weights, *code, *adapters[1:]])
    covered = {
        "format": FORMAT,
        "mlx_lm": version("mlx-lm"),
        "layout": layout_key,
        "configs": {n: _read_json(path / n) for n in _CONFIGS if (path / n).exists()},
        "weights": [content[file] for file in weights],
        "code": {str(file.relative_to(path)): content[file] for file in code},
        "adapter": [_read_json(file) for file in adapters[:1]] + [content[f] for f in adapters[1:]],
    }
    if vlm:
        files = [path / name for name in PROCESSOR_FILES]
        covered |= {"backend": "mlx-vlm", "mlx_vlm": vlm_version()}
        covered |= {"processor": [_read_json(file) for file in files if file.exists()]}
    if draft is not None:
        covered["draft"] = fingerprint(draft, adapter=None, memo=memo, layout_key="")
    return _digest(covered)


def _digest(covered: Mapping[str, Any]) -> str:
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _runs_code(path: Path) -> bool:
    """Return whether the model in folder `path` is built by Python code in that folder.

    mlx-lm runs such code only with the user's permission.
    """
    config = _read_json(path / "config.json")
    return isinstance(config, dict) and config.get("model_file") is not None


def _plain_backend(path: Path) -> Backend:
    """Return the library that runs the model in folder `path` without images."""
    config = _read_json(path / "config.json")
    return choose_backend(config, str(path)) if isinstance(config, dict) else "mlx-lm"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Size, times (in ns) and inode of a file, by which a change of its content is noticed."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> _Seen:
        at = file.stat()
        return cls(at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino)

    def with_digest(self, digest: str) -> list[int | str]:
        return [self.size, self.mtime_ns, self.ctime_ns, self.inode, digest]


class _Reader:
    """Reader of the SHA-256 of files, which reads each file at most once while it is unchanged.

    `memo`: the file in which the digests are stored. `progress`: called with the bytes read so far
    and the total; None for no reports.
    """

    def __init__(self, memo: Path, progress: Progress | None):
        self._memo = memo
        self._progress = progress
        self._done = self._total = 0

    def digests(self, files: list[Path]) -> dict[Path, str]:
        """Return the SHA-256 of each of `files` in hexadecimal.

        Raises ModelError if a file cannot be read.
        """
        known = _load_memo(self._memo)
        found: dict[Path, str] = {}
        unread: list[tuple[Path, Path, _Seen]] = []
        for file in files:
            try:
                real = file.resolve(strict=True)
                seen = _Seen.of(real)
            except (OSError, RuntimeError) as error:  # the latter: circular links
                raise ModelError(f"{file} cannot be read: {error}") from error
            digest = _blob_digest(real) or _remembered(known.get(str(real)), seen)
            if digest is None:
                unread.append((file, real, seen))
            else:
                found[file] = digest
        if unread:
            fresh = self._read_all(unread)
            found |= {file: fresh[str(real)] for file, real, _ in unread}
            _save_memo(
                self._memo, known, {str(real): (s, fresh[str(real)]) for _, real, s in unread}
            )
        return found

    def _read_all(self, unread: list[tuple[Path, Path, _Seen]]) -> dict[str, str]:
        sizes = {str(real): seen.size for _, real, seen in unread}
        self._total = sum(sizes.values())
        self._tell(0)
        return {name: self._digest(Path(name)) for name in sizes}

    def _tell(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._total))

    def _digest(self, real: Path) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_READ_BYTES))
        try:
            with real.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    self._tell(count)
        except OSError as error:
            raise ModelError(f"{real} cannot be read: {error}") from error
        return digest.hexdigest()


def _blob_digest(real: Path) -> str | None:
    """Return the SHA-256 of a large file in the Hub's cache, or None for any other file.

    The Hub's cache names large files by their SHA-256. `real`: the file's path without links.
    """
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return real.name
    return None


def _remembered(entry: Any, seen: _Seen) -> str | None:
    if not isinstance(entry, list) or not entry or not isinstance(entry[-1], str):
        return None
    digest = entry[-1]
    return digest if _BLOB.fullmatch(digest) and entry == seen.with_digest(digest) else None


def _load_memo(memo: Path) -> dict[str, Any]:
    """Return the entries of the file `memo`, which holds digests of files read before.

    Maps the path of each such file to the list `_Seen.with_digest`: size in bytes, mtime and ctime
    in ns, inode, SHA-256. Empty if `memo` is missing, damaged or not of version `_MEMO_VERSION`.
    """
    try:
        value = json.loads(memo.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or value.get("version") != _MEMO_VERSION:
        return {}
    files = value.get("files")
    return files if isinstance(files, dict) else {}


def _save_memo(
    memo: Path, known: Mapping[str, Any], fresh: Mapping[str, tuple[_Seen, str]]
) -> None:
    """Write the file `memo`: the entries `known` from before, and the `fresh` digests by path.

    `known`: the result of `_load_memo`. `fresh`: maps the path of a file that was read to its
    `_Seen` from before the reading, and its SHA-256.

    Files that no longer exist are left out, and so is a file that changed within the last two
    seconds, because another change within the same tick of the file system's clock would not show.
    Logs a warning if `memo` cannot be written.
    """
    files = {name: entry for name, entry in known.items() if Path(name).exists()}
    settled = time.time_ns() - _SETTLED_NS
    for name, (seen, digest) in fresh.items():
        try:
            if _Seen.of(Path(name)) == seen and max(seen.mtime_ns, seen.ctime_ns) < settled:
                files[name] = seen.with_digest(digest)
        except OSError:
            continue
    try:
        _replace(memo, json.dumps({"version": _MEMO_VERSION, "files": files}))
    except OSError as error:
        log.warning(
            "digests of weights not saved, weights are read again at the next start: %s", error
        )


def _replace(file: Path, text: str) -> None:
    """Write `text` to `file` atomically, readable by the user only."""
    make_folder(file.parent)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            sync(out.fileno())
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
