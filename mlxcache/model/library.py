"""Models in the cache of the Hugging Face Hub: list, download, check and remove them.

Calls no MLX. All functions block, and may be called on any thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound, HFValidationError
from huggingface_hub.file_download import repo_folder_name

from mlxcache.config import format_size
from mlxcache.errors import ModelError, NotFound
from mlxcache.model.backend import choose_backend
from mlxcache.model.hub import Progress, here, outline, resolve
from mlxcache.model.load import check_files, checked_config
from mlxcache.model.weight_files import INDEX, tensor_index, tensor_names

_WEIGHTS = "model*.safetensors"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A model in the Hub's cache.

    `path`: folder of the newest revision. `nbytes`: bytes on disk of all revisions. `last_used_at`:
    seconds since 1970, as exact as the file system records reads.
    """

    id: str
    path: Path
    nbytes: int
    last_used_at: float


@dataclass(frozen=True, slots=True)
class Removal:
    """Result of `find_removal`: the files of a model in the Hub's cache.

    `folder` has all revisions, which take `nbytes` bytes on disk.
    """

    id: str
    folder: Path
    nbytes: int


def list_downloaded() -> list[Downloaded]:
    """Return the models in the Hub's cache that can be served, the last used ones first.

    Those are folders with weights in safetensors and a config.json whose model_type mlx-lm, or the
    installed mlx-vlm, can run.
    """
    found = []
    for repo in _repos():
        newest = max(repo.revisions, key=lambda one: one.last_modified, default=None)
        if newest is not None and _is_loadable(newest.snapshot_path):
            at, size = repo.last_accessed, repo.size_on_disk
            found.append(Downloaded(repo.repo_id, newest.snapshot_path, size, at))
    return sorted(found, key=lambda one: (-one.last_used_at, one.id))


def pull(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Download the files of the Hub's `model` that serving needs, check them, return their folder.

    `revision`: branch, tag or commit, None for the default branch. Files that are complete are
    not downloaded again, and the download of a partial file is continued. `progress` is called
    with bytes on disk and bytes needed. Raises ModelError if `model` is not on the Hub or
    cannot be reached, if neither mlx-lm nor the installed mlx-vlm can load it, if the disk has too
    little space, or if the files are incomplete.
    """
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
    """Raise ModelError unless the folder `path` of `model` has all files, and all are whole.

    Also raises it if neither mlx-lm nor the installed mlx-vlm can load the model. `model`: its Hub
    id or path, for the error's message. Reads the headers of the weight files, not the weights.
    """
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

    The folder is None if the model is not on this machine. The message is None if the files are all
    there and whole, and for a Hub id that is not downloaded yet. For a path that is no existing
    folder, or a name that is no Hub id, the folder is None and the message says so.
    """
    try:
        path = here(model)
    except ModelError as error:
        return None, str(error)
    if path is None:
        return None, None
    try:
        check(path, model)
    except ModelError as error:
        return path, str(error)
    return path, None


def weights_bytes(path: Path) -> int:
    """Return the size in bytes of the files `model*.safetensors` in the folder `path`."""
    return sum(file.stat().st_size for file in path.glob(_WEIGHTS))


def folder_bytes(path: Path) -> int:
    """Return the size in bytes of all files below the folder `path`, targets of links included."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def find_removal(model: str) -> Removal:
    """Find the files that removing `model`, a Hub id, would delete.

    Those of an interrupted download are included. Raises NotFound if the Hub's cache has no folder
    for `model`.
    """
    missing = NotFound(f"{model} is not in the Hub's cache, {constants.HF_HUB_CACHE}.")
    try:
        name = repo_folder_name(repo_id=model, repo_type="model")
    except HFValidationError as error:
        raise missing from error
    folder = Path(constants.HF_HUB_CACHE) / name
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
    """Raise ModelError if the disk of the Hub's cache has too little free space for a model.

    `size`: bytes of the model's files. What is downloaded already is subtracted.
    """
    cache = Path(constants.HF_HUB_CACHE)
    folder = cache / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    present = _own_bytes(folder) if folder.is_dir() else 0
    existing = next(one for one in (cache, *cache.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if size - present > free:
        raise ModelError(
            f"The disk is too full for {model}: {format_size(size - present)} are missing, and "
            f"{format_size(free)} are free at {cache}."
        )
