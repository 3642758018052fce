"""Toys that draft for another toy, and agree with it always, mostly, or hardly ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import mlx.core as mx

from tests.toys.toy import make_toy

Kind = Literal["same", "alike", "other"]
KINDS: tuple[Kind, ...] = ("same", "alike", "other")


def make_draft(target: Path, path: Path, kind: Kind, family: str = "llama") -> Path:
    """A model at `path` that drafts for the toy of `family` at `target`.

    `same` has its weights, `alike` has them with noise, `other` is half as deep, of other weights.
    """
    if kind == "other":
        return make_toy(path, family, seed=5, layers=2)
    shutil.copytree(target, path)
    if kind == "alike":
        weights = mx.load(str(path / "model.safetensors"))
        assert isinstance(weights, dict)
        for n, (name, value) in enumerate(sorted(weights.items())):
            noise = mx.random.normal(value.shape, key=mx.random.key(n))
            weights[name] = value + 0.03 * mx.std(value) * noise
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def make_resized(target: Path, path: Path, rows: int) -> Path:
    """The toy at `target` with the same tokenizer, and so many rows in its embeddings and head."""
    shutil.copytree(target, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held = weights[name][:rows]
        weights[name] = mx.pad(held, [(0, rows - len(held)), (0, 0)])
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path
