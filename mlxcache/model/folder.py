"""The files in a model's folder, as other programs write them, and the context length they state.

Calls no MLX; any thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxcache.errors import ModelError
from mlxcache.utf8 import NotUtf8, read_utf8

INDEX = "model.safetensors.index.json"  # says which weight file has which tensor
_LENGTH = 8  # bytes of the field before a safetensors header, which holds the header's length
_MAX_HEADER = 100_000_000  # bytes, as the format limits it

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


# -- context length -------------------------------------------------------------------------------

UNSTATED = 131_072  # context length in tokens if a model's files state none

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_NESTED = ("text_config", "language_config", "llm_config")
_SANE = 1 << 27  # tokenizers state 10**30 for no limit


def native_length(config: Mapping[str, Any], tokenizer_length: object = None) -> int | None:
    """Return the context length that a model's files state, in tokens, or None.

    The text model's own section takes precedence over the top level. If it states the length before
    RoPE is scaled and the factor of the scaling, the product of the two counts if it is larger:
    model cards tell users to add YaRN without raising `max_position_embeddings`
    (https://arxiv.org/abs/2309.00071).
    """
    nested = (config.get(key) for key in _NESTED)
    for section in (*(one for one in nested if isinstance(one, Mapping)), config):
        stated = next((n for key in _KEYS if (n := _count(section.get(key)))), None)
        if stated:
            return max([stated, *_scaled(section, stated)])
    return _count(tokenizer_length)


def context_length(native: int | None, asked: int | None) -> int:
    """Return the context length to serve: what is asked for, else the model's own.

    Raises ModelError if `asked` exceeds `native` or is below 1.
    """
    if asked is None:
        return native or UNSTATED
    if asked < 1:
        raise ModelError(f"--context must be at least 1 token, but is {asked}.")
    if native is not None and asked > native:
        raise ModelError(
            f"--context {asked} is more than the {native} tokens this model was made for. "
            f"Ask for at most {native}, or, if the model's card describes one, add its "
            "rope_scaling (with factor and original_max_position_embeddings) to config.json."
        )
    return asked


def _scaled(section: Mapping[str, Any], stated: int) -> Iterator[int]:
    for key in ("rope_scaling", "rope_parameters"):
        rope = section.get(key)
        if not isinstance(rope, Mapping):
            continue
        # Models with several kinds of attention have one entry for each.
        for entry in (rope, *(v for v in rope.values() if isinstance(v, Mapping))):
            factor = entry.get("factor")
            original = _count(entry.get("original_max_position_embeddings"))
            if original is None and entry.get("rope_type", entry.get("type")) == "yarn":
                original = stated
            if original and isinstance(factor, int | float) and factor > 1:
                yield int(original * factor)


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _SANE:
        return None
    return int(value)
