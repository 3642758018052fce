"""Models in local folders and on the Hugging Face Hub: find, download, check, list and remove them.

huggingface_hub deletes an incomplete file. Here an incomplete large file (a *part*) is kept beside
its place in the Hub's cache, and moved there when it is complete and its digest is right;
huggingface_hub then finds it as if it had downloaded it.

Calls no MLX. All functions block, and may be called on any thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path
from typing import Any, Self

from huggingface_hub import (
    CachedRepoInfo,
    HfApi,
    constants,
    hf_hub_download,
    hf_hub_url,
    scan_cache_dir,
    snapshot_download,
)
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlxcache.config import format_size
from mlxcache.config.models import NEITHER, find_folder
from mlxcache.errors import ModelError, NotFound
from mlxcache.model.backend import choose_backend
from mlxcache.model.folder import INDEX, check_files, checked_config, tensor_index, tensor_names

Progress = Callable[[int, int], None]
"""Called with the bytes on disk and the bytes needed in all; the latter grows as files are looked
up. Called from any of the download's threads, one at a time."""

ANSWER_S = 5.0  # for the Hub to describe a model, after which it counts as not reachable
LEAST_BYTES = 32 << 20  # of a file that is worth continuing
_MOST_BYTES = 50_000_000_000  # of a file that the Hub sends over plain HTTP
_THREADS = 4

_WEIGHTS = "model*.safetensors"

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base error of the HTTP client that huggingface_hub uses; which client depends on its version."""

_ERRORS = (HfHubHTTPError, HFValidationError, OSError, ValueError)

_AWAY = (
    "{model} is not in the local cache ({cache}), and the Hub cannot be reached. Connect "
    "(and unset HF_HUB_OFFLINE), or give a folder: --model /path/to/model."
)

# A subclass comes before its base.
_SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (
        GatedRepoError,
        "{model} is gated: accept its terms at https://huggingface.co/{model}, then run "
        "`hf auth login` (or set HF_TOKEN) and start again.",
    ),
    (RevisionNotFoundError, "{model} has no revision {revision} on the Hub."),
    (
        RepositoryNotFoundError,
        "There is no model {model} on the Hub, and no folder of that name. Check the spelling; "
        "if it is private, run `hf auth login` first.",
    ),
    (HFValidationError, NEITHER),
    (
        IncompleteSnapshotError,
        "{model} was downloaded only in part, and the Hub cannot be reached to complete it. "
        "Connect and start again, or give a folder: --model /path/to/model.",
    ),
    (LocalEntryNotFoundError, _AWAY),
    (OfflineModeIsEnabled, _AWAY),
)


# -- finding and downloading -----------------------------------------------------------------------


def resolve(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Return the local folder of `model`, a path or a Hub id; download it from the Hub if needed.

    The same files that mlx-lm takes, into the Hub's own cache. An id whose files are all there
    costs one request, or none with HF_HUB_OFFLINE=1. Raises ModelError, which says what to do.
    """
    return find_folder(model) or _download(model, revision, progress)


def here(model: str, revision: str | None = None) -> Path | None:
    """Return the folder of `model` if all of its files are on this machine, else None."""
    if (folder := find_folder(model)) is not None:
        return folder
    try:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=DEFAULT_ALLOW_PATTERNS,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, IncompleteSnapshotError):
        return None
    except (HFValidationError, OSError, ValueError) as error:
        raise ModelError(_why(model, revision, error)) from error
    path = Path(found)
    has_weights = any(path.glob("*.safetensors"))  # not so after `outline`
    return path if has_weights else None


def outline(model: str, revision: str | None = None) -> tuple[Path, int]:
    """Download only the config.json of a model; return its folder and the bytes of its weights."""
    try:
        # before the download, which would be retried
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
        config = hf_hub_download(model, "config.json", revision=revision)
    except _ERRORS as error:
        raise ModelError(_why(model, revision, error)) from error
    except _HTTP_ERROR as error:
        raise ModelError(_sentence(_AWAY, model, revision)) from error
    files = info.siblings or []
    weights = (one.size or 0 for one in files if fnmatch(one.rfilename, _WEIGHTS))
    return Path(config).parent, sum(weights)


def _download(model: str, revision: str | None, progress: Progress | None) -> Path:
    bar = None if progress is None else _bar(progress)
    try:
        if here(model, revision) is None and (large := _find_large(model, revision)):
            _fetch_large(large, progress)
            bar = _bar()  # of the small rest
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=DEFAULT_ALLOW_PATTERNS,
                tqdm_class=bar,
            )
        )
    except _ERRORS as error:
        raise ModelError(_why(model, revision, error)) from error
    except _HTTP_ERROR as error:
        raise ModelError(
            f"The download of {model} was interrupted: {error}. Start again to continue it."
        ) from error


def why(model: str, revision: str | None, error: Exception) -> str | None:
    """Return a sentence on the cause and remedy of an error of the Hub's client."""
    for kind, sentence in _SENTENCES:
        if isinstance(error, kind):
            return _sentence(sentence, model, revision)
    return None


def _sentence(form: str, model: str, revision: str | None) -> str:
    return form.format(model=model, revision=revision, cache=constants.HF_HUB_CACHE)


def _why(model: str, revision: str | None, error: Exception) -> str:
    if known := why(model, revision, error):
        return known
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"The disk is full: {model} does not fit into {constants.HF_HUB_CACHE}."
    return f"{model} could not be downloaded: {error}"


def _ignore(done: int, total: int) -> None:
    pass


def _bar(progress: Progress = _ignore) -> type[Any]:
    """Make a progress bar class for the Hub's client that shows nothing and reports to `progress`.

    Of the three bars of snapshot_download it reports the bytes written, whose total is the sum of
    the files' sizes.
    """
    lock = threading.Lock()

    class Bar:
        format_dict: dict[str, Any] = {"rate": None}  # noqa: RUF012 read only, as tqdm's is

        def __init__(self, *_: object, total: int | None = None, desc: str = "", **__: object):
            self.n: int = 0
            self.total = total or 0
            self._told = desc.startswith("Reconstructing")

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += int(n or 0)
                if self._told:
                    progress(self.n, max(self.total, self.n))

        def refresh(self) -> None:
            self.update(0)

        def close(self, *_: object, **__: object) -> None:
            pass

        set_description = set_description_str = set_postfix_str = close

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    return Bar


# -- large files -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LargeFile:
    """A file to download, with its place in the Hub's cache when it is complete.

    `blob`: named by the file's SHA-256. `lock`: that of the Hub's own client.
    """

    name: str
    url: str
    size: int
    blob: Path

    @property
    def part(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.mlxcache-part")

    @property
    def lock(self) -> Path:
        folder = self.blob.parent.parent
        return folder.parent / ".locks" / folder.name / f"{self.blob.name}.lock"


def _find_large(model: str, revision: str | None) -> Sequence[_LargeFile]:
    """Return the model's large files that the Hub's cache lacks; none if the Hub is away."""
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
    except (*_ERRORS, _HTTP_ERROR):
        return ()
    blobs = _blobs(model)
    found = []
    for one in info.siblings or []:
        name, lfs = one.rfilename, one.lfs
        if (
            lfs is not None
            and LEAST_BYTES <= lfs.size <= _MOST_BYTES
            and any(fnmatch(name, pattern) for pattern in DEFAULT_ALLOW_PATTERNS)
            and not (blobs / lfs.sha256).exists()
        ):
            url = hf_hub_url(model, name, revision=info.sha)
            found.append(_LargeFile(name, url, lfs.size, blobs / lfs.sha256))
    return found


def _fetch_large(files: Sequence[_LargeFile], progress: Progress | None) -> None:
    told = _Told(files, progress or _ignore)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="mlxcache-download") as pool:
        for future in [pool.submit(_fetch, one, told) for one in files]:
            future.result()


def _fetch(file: _LargeFile, told: _Told) -> None:
    """Download the missing rest of a file, check its digest, and move it to `file.blob`."""
    for folder in (file.blob.parent, file.lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(file.lock):
        if file.blob.exists():  # another process has downloaded it meanwhile
            file.part.unlink(missing_ok=True)
            return
        with _Part(file, told) as part:
            size = part.seek(0, os.SEEK_END)
            told.note(file, size)
            http_get(
                file.url,
                part,
                resume_size=min(size, file.size),
                headers=build_hf_headers(),
                expected_size=file.size,
                tqdm_class=_bar(),
            )
        with file.part.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != file.blob.name:
            file.part.unlink(missing_ok=True)
            raise ModelError(
                f"{file.name} was damaged on its way from the Hub: start again to download it."
            )
        file.part.replace(file.blob)


class _Told:
    """Reports the bytes of several files on disk; one thread at a time calls `progress`."""

    def __init__(self, files: Sequence[_LargeFile], progress: Progress):
        self._progress = progress
        self._sizes = dict.fromkeys((one.name for one in files), 0)
        self._total = sum(one.size for one in files)
        self._lock = threading.Lock()

    def note(self, file: _LargeFile, size: int) -> None:
        with self._lock:
            self._sizes[file.name] = size
            self._progress(sum(self._sizes.values()), self._total)


class _Part(FileIO):
    """A part, opened for appending; reports its size as it grows."""

    def __init__(self, file: _LargeFile, told: _Told):
        self._file, self._told = file, told
        super().__init__(file.part, "ab+")

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._told.note(self._file, self.tell())
        return count


# -- models in the Hub's cache ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A model in the Hub's cache: the folder of its newest revision, the bytes of all of them."""

    id: str
    path: Path
    nbytes: int
    last_used_at: float


@dataclass(frozen=True, slots=True)
class Removal:
    id: str
    folder: Path
    nbytes: int


def list_downloaded() -> list[Downloaded]:
    """Return the models in the Hub's cache that can be served, the last used ones first."""
    found = []
    for repo in _repos():
        newest = max(repo.revisions, key=lambda one: one.last_modified, default=None)
        if newest is not None and _is_loadable(newest.snapshot_path):
            at, size = repo.last_accessed, repo.size_on_disk
            found.append(Downloaded(repo.repo_id, newest.snapshot_path, size, at))
    return sorted(found, key=lambda one: (-one.last_used_at, one.id))


def pull(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Download the files of the Hub's `model` that serving needs, check them, return the folder."""
    if here(model, revision) is None:
        path, size = outline(model, revision)
        choose_backend(checked_config(path), model)
        if not size:
            raise ModelError(
                f"{model} has no weights in safetensors ({_WEIGHTS}), so it cannot be loaded. "
                "Look for a conversion in https://huggingface.co/mlx-community."
            )
        _require_space(model, size)
    path = resolve(model, revision, progress)
    check(path, model)
    return path


def check(path: Path, model: str) -> None:
    """Raise ModelError unless the folder of `model` can be loaded, and its files are whole."""
    again = f"Remove the model with `mlxcache models rm {model}`, and download it again."
    if Path(model).expanduser().exists():
        again = "Copy or download the model again."
    choose_backend(checked_config(path), model)
    check_files(path)
    tensors = {}
    for file in sorted(path.glob(_WEIGHTS)):
        names = tensor_names(file)
        if names is None:
            raise ModelError(f"{file} is damaged or incomplete. {again}")
        tensors[file.name] = names
    listed = tensor_index(path)
    missing = [name for name, file in listed.items() if name not in tensors.get(file, ())]
    if missing:
        raise ModelError(
            f"{path / INDEX} lists {missing[0]}, which {listed[missing[0]]} lacks: the files of "
            f"{model} are not of one version. {again}"
        )


def inspect_folder(model: str) -> tuple[Path | None, str | None]:
    """Return the local folder of a path or Hub id, and an error message about its files.

    Either may be None: the model is not on this machine; its files are all there and whole.
    """
    path = None
    try:
        path = here(model)
        if path is not None:
            check(path, model)
    except ModelError as error:
        return path, str(error)
    return path, None


def weights_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob(_WEIGHTS))


def folder_bytes(path: Path) -> int:
    """Return the bytes of all files below the folder `path`, targets of links included."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def find_removal(model: str) -> Removal:
    """Find what removing the Hub id `model` would delete, an interrupted download included."""
    missing = NotFound(f"{model} is not in the Hub's cache, {constants.HF_HUB_CACHE}.")
    try:
        folder = _blobs(model).parent
    except HFValidationError as error:
        raise missing from error
    if "/" not in model or not folder.is_dir():
        raise missing
    return Removal(model, folder, _own_bytes(folder))


def remove(removal: Removal) -> None:
    """Delete the files of `removal`. Raises ModelError if that fails."""
    try:
        for repo in _repos():
            if repo.repo_id == removal.id:
                revisions = (one.commit_hash for one in repo.revisions)
                scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*revisions).execute()
        if removal.folder.is_dir():
            shutil.rmtree(removal.folder)
        locks = Path(constants.HF_HUB_CACHE) / ".locks" / removal.folder.name
        shutil.rmtree(locks, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{removal.folder} cannot be removed: {error.strerror}.") from error


def _repos() -> Iterable[CachedRepoInfo]:
    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:  # nothing was downloaded yet
        return []
    return [one for one in found if one.repo_type == "model"]


def _blobs(model: str) -> Path:
    name = repo_folder_name(repo_id=model, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / name / "blobs"


def _own_bytes(folder: Path) -> int:
    """Return the bytes of the files below `folder`, each once: links are not followed."""
    files = (one for one in folder.rglob("*") if not one.is_symlink() and one.is_file())
    return sum(one.stat().st_size for one in files)


def _is_loadable(path: Path) -> bool:
    try:
        choose_backend(checked_config(path), str(path))
    except ModelError:
        return False
    return any(path.glob(_WEIGHTS))


def _require_space(model: str, size: int) -> None:
    cache, blobs = Path(constants.HF_HUB_CACHE), _blobs(model)
    present = _own_bytes(blobs) if blobs.is_dir() else 0
    existing = next(one for one in (cache, *cache.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if size - present > free:
        raise ModelError(
            f"The disk is too full for {model}: {format_size(size - present)} are missing, and "
            f"{format_size(free)} are free at {cache}."
        )
