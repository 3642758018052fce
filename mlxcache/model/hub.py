"""Folders of models: local ones, and downloads from the Hugging Face Hub.

Calls no MLX. All functions may be called on any thread.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlxcache.errors import ModelError
from mlxcache.model.hub_parts import LargeFile, fetch_large_files, find_large_files

Progress = Callable[[int, int], None]
"""Called with the bytes on disk and the bytes needed in all; the latter grows as files are looked
up. Called from any of the download's threads, one at a time."""

ANSWER_S = 5.0
"""Seconds for the Hub to describe a model, after which the Hub counts as not reachable."""

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base error of the HTTP client that huggingface_hub uses; which client depends on its version."""

_NEITHER = (
    "{model} is neither an existing folder nor a Hub id like owner/name, for example "
    "mlx-community/Qwen3-4B-Instruct-2507-4bit."
)

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
    (HFValidationError, _NEITHER),
    (
        IncompleteSnapshotError,
        "{model} was downloaded only in part, and the Hub cannot be reached to complete it. "
        "Connect and start again, or give a folder: --model /path/to/model.",
    ),
    (LocalEntryNotFoundError, _AWAY),
    (OfflineModeIsEnabled, _AWAY),
)


def resolve(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Return the local folder of `model`, which is a path or a Hugging Face Hub id.

    `revision`: branch, tag or commit on the Hub, None for the default branch. A model on the Hub is
    downloaded if needed: the same files that mlx-lm takes, into the Hub's own cache. An id whose
    files are all there costs one request, or none with HF_HUB_OFFLINE=1. `progress` is called with
    bytes on disk and bytes needed. Blocks.

    Raises ModelError, which says what to do, if there is no such folder or id, if the model is
    gated, if there is no network, or if the disk is full.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(
            f"{path} is a file. --model takes the folder with config.json and the "
            "*.safetensors files, or a Hub id; GGUF files cannot be served."
        )
    if _looks_local(model):
        raise ModelError(f"There is no folder {path}. --model takes a folder or a Hub id.")
    if "/" not in model:
        raise ModelError(_NEITHER.format(model=model))
    return _download(model, revision, progress)


def here(model: str, revision: str | None = None) -> Path | None:
    """Return the folder of `model` if all of its files are on this machine, else None.

    `model`: a path or a Hub id. `revision`: branch, tag or commit on the Hub, None for the default
    branch. Downloads nothing. Raises ModelError for a path that is no existing folder, and for a
    name that is no Hub id.
    """
    if Path(model).expanduser().exists() or _looks_local(model) or "/" not in model:
        return resolve(model, revision)
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
    """Download only the config.json of a model on the Hub; return its folder and the weights' size.

    The size is that of the model's files `model*.safetensors` in bytes, 0 if there are none.
    `revision`: branch, tag or commit on the Hub, None for the default branch. Raises ModelError if
    that fails, within seconds if the Hub cannot be reached.
    """
    try:
        # before the download, which would be retried
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
        config = hf_hub_download(model, "config.json", revision=revision)
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(_why(model, revision, error)) from error
    except _HTTP_ERROR as error:
        raise ModelError(_sentence(_AWAY, model, revision)) from error
    files = info.siblings or []
    weights = (one.size or 0 for one in files if fnmatch(one.rfilename, "model*.safetensors"))
    return Path(config).parent, sum(weights)


def fetch_config(model: str, revision: str | None = None) -> Path | None:
    """Download the config.json of a model on the Hub, and return its folder.

    `revision`: branch, tag or commit on the Hub, None for the default branch. Returns None if the
    file cannot be downloaded, within seconds if the Hub cannot be reached. A call of `resolve` then
    raises the error, or returns the folder with the files that are on this machine.
    """
    try:
        # before the download, which would be retried
        HfApi().model_info(model, revision=revision, timeout=ANSWER_S)
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent
    except (HfHubHTTPError, HFValidationError, OSError, ValueError, _HTTP_ERROR):
        return None


def _looks_local(model: str) -> bool:
    return model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1


def _download(model: str, revision: str | None, progress: Progress | None) -> Path:
    bar = None if progress is None else _bar(progress)
    try:
        if here(model, revision) is None and (large := _find_large(model, revision)):
            fetch_large_files(large, progress)
            bar = _bar(lambda done, total: None)  # of the small rest
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=DEFAULT_ALLOW_PATTERNS,
                tqdm_class=bar,
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(_why(model, revision, error)) from error
    except _HTTP_ERROR as error:
        raise ModelError(
            f"The download of {model} was interrupted: {error}. Start again to continue it."
        ) from error


def _find_large(model: str, revision: str | None) -> Sequence[LargeFile]:
    """Return the model's large files to download; empty if the Hub does not list the files.

    If it does not, snapshot_download uses the files on this machine, or raises the error.
    """
    try:
        return find_large_files(model, revision, DEFAULT_ALLOW_PATTERNS)
    except (HfHubHTTPError, HFValidationError, OSError, ValueError, _HTTP_ERROR):
        return ()


def why(model: str, revision: str | None, error: Exception) -> str | None:
    """Return a sentence on the cause and remedy of an error of the Hub's client.

    Returns None for an error of another kind than those in `_SENTENCES`. `model` and `revision`:
    the Hub id and the revision that were requested when the error was raised.
    """
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


def _bar(progress: Progress) -> type[Any]:
    """Make a progress bar class for snapshot_download that reports to `progress`.

    snapshot_download makes three bars: bytes received, bytes written, files fetched. The second one
    is reported, because its total is the sum of the files' sizes.
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
            """Do nothing: the bar holds no resource and shows no text."""

        set_description = set_description_str = set_postfix_str = close

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    return Bar
