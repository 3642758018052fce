"""What a model's folder must hold, told before anything is read into memory. No MLX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxcache.errors import ModelError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tiktoken.model",
    "tokenizer_config.json",
)


def checked_config(path: Path) -> dict[str, Any]:
    """config.json as it is. Raises ModelError where it is missing, or no model's."""
    file = path / "config.json"
    if not file.exists():
        raise ModelError(f"{path} has no config.json, so it is not a model's folder.")
    config = _read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} does not say its model_type.")
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object.")
    return value


def check_files(path: Path) -> None:
    """Raise ModelError unless there are weights, all of them, and a tokenizer."""
    if not any(path.glob("model*.safetensors")):
        raise ModelError(
            f"{path} has no weights (model*.safetensors). Other formats have to be converted "
            "first: `mlx_lm.convert --hf-path MODEL --mlx-path FOLDER`."
        )
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = _read_json(index).get("weight_map", {})
        missing = sorted(name for name in set(shards.values()) if not (path / name).exists())
        if missing:
            raise ModelError(
                f"{path} lacks {len(missing)} of its weight files, {missing[0]} first: "
                "the download or copy is incomplete."
            )
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError(f"{path} has no tokenizer (tokenizer.json or tokenizer.model).")
