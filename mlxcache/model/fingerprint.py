"""The namespace of a model as one digest. KV is never reused in another namespace.

All functions may be called on any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxcache.errors import ModelError
from mlxcache.model.backend import PROCESSOR_FILES, choose_backend, vlm_version
from mlxcache.model.folder import checked_config
from mlxcache.model.heads import is_of_heads
from mlxcache.private import replace

log = logging.getLogger("mlxcache.model")

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
_CONFIGS = ("config.json", "hf_quant_config.json")  # the second is NVIDIA's, read by mlx-lm
_BLOB = re.compile(r"[0-9a-f]{64}")
_MEMO_VERSION = 1
_SETTLED_NS = 2_000_000_000  # a file system's clock may tick as slowly as this


Seen = tuple[int, int, int, int]  # size, mtime and ctime in ns, and inode of a file


def fingerprint(
    path: Path,
    *,
    adapter: Path | None,
    memo: Path,
    layout_key: str,
    kv_format: int,
    draft: Path | None = None,
    backend: str | None = None,
) -> str:
    """Return the namespace of the model in folder `path`, as 32 hexadecimal digits.

    It covers the content of all files that decide about KV, `layout_key` (a text that stands for
    the shapes and dtypes of KV), `kv_format` and other versions, but no name, so a model has the
    same namespace wherever its folder is.

    Weights and code are identified by their SHA-256. A large file in the Hub's cache has it as its
    name. Other files are read once, which blocks; their digests are kept in the file `memo` while
    size, times and inode are unchanged. Raises ModelError if a file cannot be read.
    """
    path = path.expanduser()
    config = checked_config(path)
    vlm = (choose_backend(config, str(path)) if backend is None else backend) == "mlx-vlm"
    weights = sorted(path.glob("*.safetensors" if vlm else "model*.safetensors"))
    code = sorted(path.rglob("*.py")) if config.get("model_file") is not None else []
    adapters = [] if adapter is None else [adapter.expanduser() / name for name in ADAPTER_FILES]
    content = _digests([*weights, *code, *adapters[1:]], memo)
    covered = {
        "format": kv_format,
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
    if draft is not None and not is_of_heads(checked_config(draft)):  # those change no KV
        covered["draft"] = fingerprint(
            draft, adapter=None, memo=memo, layout_key="", kv_format=kv_format
        )
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _digests(files: Iterable[Path], memo: Path) -> dict[Path, str]:
    """Return the SHA-256 of each file, from the Hub's name for it, `memo`, or its content."""
    known = _load_memo(memo)
    found: dict[Path, str] = {}
    fresh: dict[str, tuple[Seen, str]] = {}
    for file in files:
        try:
            real = file.resolve(strict=True)
            seen = _seen(real)
            digest = _blob_digest(real) or _remembered(known.get(str(real)), seen)
            if digest is None:
                if str(real) not in fresh:
                    with real.open("rb", buffering=0) as opened:
                        fresh[str(real)] = seen, hashlib.file_digest(opened, "sha256").hexdigest()
                digest = fresh[str(real)][1]
        except (OSError, RuntimeError) as error:  # the latter: circular links
            raise ModelError(f"{file} cannot be read: {error}") from error
        found[file] = digest
    if fresh:
        _save_memo(memo, known, fresh)
    return found


def _seen(real: Path) -> Seen:
    at = real.stat()
    return at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino


def _blob_digest(real: Path) -> str | None:
    """Return the SHA-256 by which a large file in the Hub's cache is named, else None."""
    return real.name if real.parent.name == "blobs" and _BLOB.fullmatch(real.name) else None


def _remembered(entry: Any, seen: Seen) -> str | None:
    if not isinstance(entry, list) or entry[:-1] != list(seen) or not isinstance(entry[-1], str):
        return None
    return entry[-1] if _BLOB.fullmatch(entry[-1]) else None


def _load_memo(memo: Path) -> dict[str, Any]:
    try:
        value = json.loads(memo.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or value.get("version") != _MEMO_VERSION:
        return {}
    files = value.get("files")
    return files if isinstance(files, dict) else {}


def _save_memo(memo: Path, known: Mapping[str, Any], fresh: Mapping[str, tuple[Seen, str]]) -> None:
    """Write the file `memo`, without files that changed within the last two seconds.

    Another change within the same tick of the file system's clock would not show.
    """
    files = {name: entry for name, entry in known.items() if Path(name).exists()}
    settled = time.time_ns() - _SETTLED_NS
    for name, (seen, digest) in fresh.items():
        try:
            if _seen(Path(name)) == seen and max(seen[1:3]) < settled:
                files[name] = [*seen, digest]
        except OSError:
            continue
    try:
        replace(memo, json.dumps({"version": _MEMO_VERSION, "files": files}).encode())
    except OSError as error:
        log.warning(
            "digests of weights not saved, weights are read again at the next start: %s", error
        )
