"""Files of weights as other programs write them: which tensors are in them. Calls no MLX."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_LENGTH = 8
"""Bytes of the field before a safetensors header, which holds the header's length."""

_MAX_HEADER = 100_000_000
"""Largest header in bytes of a safetensors file, as the format limits it."""


INDEX = "model.safetensors.index.json"
"""Name of the file in a model's folder that lists which weight file has which tensor."""


def tensor_index(folder: Path) -> dict[str, str]:
    """Return names of weight files by names of tensors, as the index of a model's folder has them.

    The index is the file `INDEX`. Returns {} if the folder has no index, or the index has no
    `weight_map`. Raises OSError if the index cannot be read, and ValueError with the path of the
    index if it is not JSON of the expected form.
    """
    file = folder / INDEX
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
