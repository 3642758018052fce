"""The built-in demo model, served when no model is named, so that everything runs offline."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxcache.config.folder import default_cache_dir
from mlxcache.config.models import DEMO_ID
from mlxcache.disk_calls import sync
from mlxcache.errors import ModelError
from mlxcache.private import make_folder

DEMO_NOTICE = "This is the built-in demo model: about 2 million parameters that only babble."

REAL_MODEL = "mlx-community/Qwen3-4B-Instruct-2507-4bit"  # small, with useful replies

CONTEXT = 131072
DATA = Path(__file__).parent / "data"

SCALE = ".scale"  # suffix of the float16 factors of an int8 matrix, one per row

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 3072,
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "intermediate_size": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def materialise(directory: Path | None = None) -> Path:
    """Write the demo model's folder for `mlx_lm.load` if it is missing, and return its path.

    Its name contains a digest of the shipped files, so a new version never uses the folder of an
    old one. Weights are written as float32, because float16 is slow on a CPU. Several processes may
    call this at once. MLX thread only. Raises ModelError if the folder cannot be written.
    """
    parent = directory or default_cache_dir() / "demo"
    try:
        target = parent / f"{DEMO_ID}-{_fingerprint()}"
        if not target.is_dir():
            make_folder(parent)
            _write(parent, target)
    except OSError as error:
        raise ModelError(f"The demo model cannot be made in {parent}: {error}") from error
    return target


def _fingerprint() -> str:
    digest = hashlib.sha256(json.dumps(CONFIG, sort_keys=True).encode())
    for path in sorted(DATA.glob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_weights(path: Path) -> dict[str, mx.array]:
    """Read the weights of the demo model from the package's file `path`, as float32, by name.

    A matrix is shipped as integers with a factor per row, which makes a wheel small. Their products
    are exact in float32, so the namespace is the same on every machine.
    """
    shipped = cast(dict[str, mx.array], mx.load(str(path)))
    weights = {}
    for name, value in shipped.items():
        if name.endswith(SCALE):
            continue
        weights[name] = value.astype(mx.float32)
        if name + SCALE in shipped:
            weights[name] = weights[name] * shipped[name + SCALE].astype(mx.float32)[:, None]
    return weights


def _write(parent: Path, target: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=".demo-", dir=parent))
    try:
        tokenizer = (DATA / "tokenizer.json").read_text(encoding="utf-8")
        mx.save_safetensors(
            str(draft / "model.safetensors"),
            read_weights(DATA / "demo.safetensors"),
            metadata={"format": "mlx"},
        )
        (draft / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
        write_tokenizer(draft, tokenizer, context=CONTEXT, thinking=False)
        for path in draft.iterdir():
            with path.open("rb") as file:
                sync(file.fileno())  # a crash must not leave the name on an empty file
        os.rename(draft, target)
    except OSError:
        if not target.is_dir():  # else another process wrote it first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


def template(*, thinking: bool) -> str:
    """Return the Jinja source of the ChatML chat template, with tools.

    With `thinking`, a reply begins inside an open think block, which is closed at once if
    `enable_thinking` is false. The reasoning of replies before the last user message is omitted.
    """
    source = (DATA / "chat_template.jinja").read_text(encoding="utf-8")
    return source.replace("THINKS", "true" if thinking else "false")


def write_tokenizer(directory: Path, tokenizer: str, *, context: int, thinking: bool) -> None:
    """Write tokenizer.json, of which `tokenizer` is the text, and tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": template(thinking=thinking),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
