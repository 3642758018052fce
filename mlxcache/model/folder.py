"""The files in a model's folder, as other programs write them. Calls no MLX; any thread."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mlxcache.errors import ModelError
from mlxcache.utf8 import NotUtf8, read_utf8

INDEX = "model.safetensors.index.json"
"""The file that says which weight file has which tensor."""

_LENGTH = 8
"""Bytes of the field before a safetensors header, which holds the header's length."""

_MAX_HEADER = 100_000_000
"""Largest header in bytes of a safetensors file, as the format limits it."""

_WEIGHTS = ("config.json", "hf_quant_config.json", "adapter_config.json", "*.py", "*.safetensors")
"""Files that decide about the content of the weights."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tiktoken.model",
    "tokenizer_config.json",
)

Stamp = tuple[str, int, int]
"""Path of a file, its size in bytes, and the time of its last change in nanoseconds."""


def checked_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises ModelError if it is not that of a model."""
    file = path / "config.json"
    if not file.exists():
        raise ModelError(f"{path} has no config.json, so it is not a model's folder.")
    try:
        config = json.loads(read_utf8(file))
    except NotUtf8 as error:
        raise ModelError(f"{file} {error}.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object.")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} has no model_type: expected the config.json of a model.")
    return config


def check_files(path: Path) -> None:
    """Raise ModelError unless the folder has all weight files of its index, and a tokenizer."""
    if not any(path.glob("model*.safetensors")):
        raise ModelError(
            f"{path} has no weights (model*.safetensors). Other formats have to be converted "
            "first: `mlx_lm.convert --hf-path MODEL --mlx-path FOLDER`."
        )
    try:
        files = set(tensor_index(path).values())
    except (OSError, ValueError) as error:
        raise ModelError(f"the list of weight files cannot be read: {error}") from error
    missing = sorted(name for name in files if not (path / name).exists())
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of its weight files, {missing[0]} first: "
            "the download or copy is incomplete."
        )
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER):
        raise ModelError(f"{path} has no tokenizer (tokenizer.json or tokenizer.model).")


def tensor_index(path: Path) -> dict[str, str]:
    """Return names of weight files by names of tensors, from the file `INDEX`; {} without it."""
    file = path / INDEX
    if not file.exists():
        return {}
    try:
        index = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    listed = index.get("weight_map", {}) if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{file} has no object `weight_map` with the file of each tensor.")
    return listed


def tensor_names(file: Path) -> set[str] | None:
    """Return the names of a safetensors file's tensors, or None if the file is not whole.

    Reads the header only. Raises OSError if the file cannot be read.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        size = os.fstat(opened.fileno()).st_size
        if not 2 <= length <= min(_MAX_HEADER, size - _LENGTH):
            return None
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            ends = {n: one["data_offsets"][1] for n, one in header.items() if n != "__metadata__"}
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    whole = size == _LENGTH + length + max(ends.values(), default=0)
    return set(ends) if whole else None


def file_stamps(path: Path) -> tuple[Stamp, ...]:
    """Return a stamp of each file that the weights depend on, to notice if one has changed."""
    return tuple(_stamp(file) for name in _WEIGHTS for file in sorted(path.glob(name)))


def _stamp(file: Path) -> Stamp:
    try:
        stat = file.stat()
    except OSError:
        return str(file), -1, 0
    readable = os.access(file, os.R_OK)
    return str(file), stat.st_size if readable else -1, stat.st_mtime_ns
