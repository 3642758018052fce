"""A model's tokenizer and chat template without its weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlxcache.errors import ModelError
from mlxcache.model import chatml, demo, hub


def tokenizer_of(model: str | None) -> TokenizerWrapper:
    """The tokenizer of a folder or Hub id; None is the built-in demo's.

    Of an id, only small files are downloaded where it is not in the Hub's cache yet. Raises
    ModelError.
    """
    if model is None:
        with tempfile.TemporaryDirectory(prefix="mlxcache-") as folder:
            text = (demo.DATA / "tokenizer.json").read_text(encoding="utf-8")
            path = Path(folder)
            chatml.write_tokenizer(path, text, context=demo.CONTEXT, thinking=False)
            return load_tokenizer(path)
    try:
        path = Path(model).expanduser()
        return load_tokenizer(path if path.is_dir() else model)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ModelError(
            hub.why(model, None, error)
            or f"the tokenizer of {model} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
