"""Heads for multi-token prediction (MTP): a layer that drafts tokens for the model it belongs to.

Its KV is one more slot of the model's caches. Position i belongs to token i and to the model's
hidden state after token i - 1, so the slot is as long as the model's KV and is cut with it. The
newest hidden state is the state of a slot of its own. Files may lack both: a hidden state of zeros
stands for none, keys of zeros for a position without KV, which drafts do not attend to.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.utils import infer_quant_config

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.folder import tensor_names
from mlxcache.model.kv import Caches

log = logging.getLogger("mlxcache.model")

_BELOW = 0.02
"""Least share of values up to 0 in norms that are stored less 1; others have next to none."""

_ABOVE = 0.002
"""Largest such share in norms that are stored as they are applied."""

_OUTER_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.((?:gate|up|down)_proj\.\w+)")


class Heads(nn.Module):  # type: ignore[misc]
    """The layer. `tag` identifies its weights: KV of other heads is not its own."""

    def __init__(self, args: qwen3_5.TextModelArgs):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [qwen3_5.DecoderLayer(replace(args, full_attention_interval=1), 0)]
        self.norm = nn.RMSNorm(size, eps=eps)
        self.tag = ""

    def __call__(
        self, embedded: mx.array, hidden: mx.array, cache: Any, mask: Any = None
    ) -> mx.array:
        """Return hidden states from which the tokens after next are drawn, (1, n, hidden)."""
        (layer,) = self.layers
        found: mx.array = self.norm(layer(self._mixed(embedded, hidden), mask, cache))
        return found

    def remember(self, embedded: mx.array, hidden: mx.array, cache: Any) -> None:
        """Append the KV of tokens behind `hidden`; attention and MLP are not computed for that."""
        (layer,) = self.layers
        attention = layer.self_attn
        x = layer.input_layernorm(self._mixed(embedded, hidden))
        shape = (*x.shape[:2], attention.num_key_value_heads, -1)
        keys = attention.k_norm(attention.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = attention.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        known = mx.any(hidden != 0, axis=-1)[:, None, :, None]
        keys = mx.where(known, attention.rope(keys, offset=cache.offset), 0)
        cache.update_and_fetch(keys, values)

    def _mixed(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        mixed: mx.array = self.fc(mx.concatenate(parts, axis=-1))
        return mixed


class WithHeads(nn.Module):  # type: ignore[misc]
    """A model and its heads, as one model with one list of caches; the heads' slots are the last.

    Every pass also fills the heads' slots, in batches too.
    """

    unquantised = "the KV of its heads for multi-token prediction cannot be quantised."

    def __init__(self, model: nn.Module, heads: Heads):
        super().__init__()
        self.model = model
        self.heads = heads
        self.model_type = model.model_type
        self.heads_tag = heads.tag

    def make_cache(self) -> Caches:
        return [*make_prompt_cache(self.model), KVCache(), ArraysCache(1)]

    def __call__(self, tokens: mx.array, cache: Caches, **inputs: mx.array) -> mx.array:
        """Feed `tokens`, shape (rows, n); return the model's logits."""
        *own, slot, newest = cache
        hidden = self._text.model(tokens, own, **inputs)
        before = newest[0] if newest[0] is not None else mx.zeros_like(hidden[:, :1])
        states = mx.concatenate([before, hidden], axis=1)
        embedded = inputs.get("input_embeddings")
        self.heads.remember(
            self.embed(tokens) if embedded is None else embedded, states[:, :-1], slot
        )
        if newest.lengths is None:
            newest[0] = hidden[:, -1:]
        else:
            ends = mx.clip(newest.lengths, 0, tokens.shape[1])
            newest[0] = mx.take_along_axis(states, ends[:, None, None], axis=1)
        # else nothing would evaluate the slot while single tokens are decoded
        return self.logits(mx.depends(hidden, [slot.keys, slot.values]))

    def logits(self, hidden: mx.array) -> mx.array:
        text = self._text
        tied = text.args.tie_word_embeddings
        made: mx.array = (text.model.embed_tokens.as_linear if tied else text.lm_head)(hidden)
        return made

    def propose(self, tokens: mx.array, cache: Caches) -> mx.array:
        """Make a pass of the heads over `tokens`, shape (1, n), to measure it."""
        slot, embedded = cache[-2], self.embed(tokens)
        mask = create_attention_mask(embedded, slot)
        return self.logits(self.heads(embedded, mx.ones_like(embedded), slot, mask))

    def embed(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self._text.model.embed_tokens(tokens)
        return embedded

    @property
    def _text(self) -> Any:
        return self.model.language_model


class HeadsDraft:
    """A draft after the newest tokens of one sequence, made token by token.

    `end` takes back what it appended: the pass that checks the draft writes there again, from the
    model's own hidden states.
    """

    def __init__(self, model: WithHeads, cache: Caches, known: KnownRows):
        self._model = model
        self._slot, newest = cache[-2:]
        self._rows = _Rows(self._slot, known)
        self._hidden: mx.array = newest[0]
        self._end = self._slot.offset

    def feed(self, token: mx.array) -> mx.array:
        """Feed `token`, shape (1,); return the logits of the next one, (1, vocabulary)."""
        model, rows = self._model, self._rows
        self._hidden = model.heads(model.embed(token[None]), self._hidden, rows, rows.mask())
        return model.logits(self._hidden)[:, -1, :]

    def end(self) -> None:
        kv.set_offset(self._slot, self._end)


class KnownRows:
    """Which of the first positions of the heads' slot have KV.

    `first`: those before it have none. `rows`: which have from there on, shape (n,), or None if all
    of them. Later positions have KV.
    """

    def __init__(self, cache: Caches):
        slot = cache[-2]
        keys = slot.keys[0, :, : slot.offset]
        found = np.asarray(mx.any(keys != 0, axis=(0, 2)))
        self.first = int(np.argmax(found)) if found.any() else len(found)
        rest = found[self.first :]
        self.rows = None if rest.all() else mx.array(rest)


class _Rows:
    """The heads' slot as the layer sees it, without the positions that have no KV."""

    def __init__(self, slot: KVCache, known: KnownRows):
        self._slot, self._known = slot, known

    @property
    def offset(self) -> int:
        return int(self._slot.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        found = self._slot.update_and_fetch(keys, values)
        return [array[..., self._known.first :, :] for array in found]

    def mask(self) -> mx.array | None:
        """Return the mask for the next token."""
        rows = self._known.rows
        if rows is None:
            return None
        later = self.offset + 1 - self._known.first - rows.size
        return mx.concatenate([rows, mx.ones(later, mx.bool_)])


# -- loading ---------------------------------------------------------------------------------------


def is_of_heads(config: Mapping[str, Any]) -> bool:
    """Return whether a folder with this config.json has heads, to be put on a model."""
    return config.get("model_type") == "qwen3_5_mtp"


def in_files(folder: Path) -> bool:
    """Return whether the weight files in `folder` have heads. Raises OSError."""
    files = folder.glob("model*.safetensors")
    return any("mtp." in name for file in files for name in tensor_names(file) or ())


def own_heads(model: nn.Module, folder: Path) -> Heads | None:
    """Return the heads in the files of the model in `folder`, lazily; None if there are none."""
    if not isinstance(model, qwen3_5.Model) or not in_files(folder):
        return None
    try:
        return _made(model, folder, own=True)
    except ModelError as error:
        log.warning("%s: its heads for multi-token prediction are not used: %s", folder, error)
        return None


def heads_for(model: nn.Module, folder: Path) -> Heads:
    """Load heads for `model` from their own folder, lazily. Raises ModelError if they don't fit."""
    if not isinstance(model, qwen3_5.Model):
        raise ModelError(f"{folder} has heads of Qwen 3.5, which is not what mlx-lm runs here.")
    return _made(model, folder, own=False)


def _read(folder: Path, *, own: bool) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict)
        for name, array in arrays.items():
            _, mark, rest = name.rpartition("mtp.")
            if mark or not own:
                found[rest] = array
    return found


def _made(model: Any, folder: Path, *, own: bool) -> Heads:
    text = model.language_model
    heads = Heads(text.args)
    try:
        weights = _with_norms(_with_experts(_read(folder, own=own)))
        nn.quantize(
            heads,
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized")
                and f"{path}.scales" in weights
                and infer_quant_config(path, module, weights)
            ),
        )
        heads.load_weights(list(weights.items()))
    except (ValueError, LookupError, RuntimeError) as error:
        raise ModelError(f"the weights do not fit this model: {error}") from error
    heads.set_dtype(text.model.norm.weight.dtype)
    heads.tag = _tag(heads)
    heads.eval()
    return heads


def _with_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Stack the experts of a layer as mlx-lm's modules have them."""
    found = dict[str, mx.array]()
    alone = dict[str, dict[int, mx.array]]()
    for name, array in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("experts.gate_up_proj") + "switch_mlp"
            gate, up = mx.split(array, 2, axis=-2)
            found |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("experts.down_proj") + "switch_mlp"
            found[f"{base}.down_proj.weight"] = array
        elif expert := _EXPERT.fullmatch(name):
            stacked = f"{expert[1]}.switch_mlp.{expert[3]}"
            alone.setdefault(stacked, {})[int(expert[2])] = array
        else:
            found[name] = array
    return found | {name: mx.stack([one[i] for i in sorted(one)]) for name, one in alone.items()}


def _with_norms(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Add 1 to norms that are stored less 1, as their values tell.

    A conversion may have added it to the norms within the layer only, as mlx-lm does by their name.
    """
    norms = {name for name, array in weights.items() if array.ndim == 1 and "norm" in name}
    outer = {f"{name}.weight" for name in _OUTER_NORMS} & norms
    inner = _lack_one([weights[name] for name in sorted(norms - outer)])
    less = norms if inner else outer if _lack_one([weights[n] for n in sorted(outer)]) else set()
    return weights | {name: weights[name] + 1 for name in less}


def _lack_one(norms: Sequence[mx.array]) -> bool:
    """Return whether norms are stored less 1. Raises ModelError if their values do not tell."""
    values = np.concatenate([np.asarray(norm.astype(mx.float32)) for norm in norms])
    share = float(np.mean(values <= 0))
    if _ABOVE < share < _BELOW:
        raise ModelError(
            f"{share:.1%} of the weights of its norms are not positive, which does not tell "
            "whether 1 has to be added to them"
        )
    return share >= _BELOW


def _tag(heads: Heads) -> str:
    norms = [array for _, array in tree_flatten(heads.parameters()) if array.ndim == 1]
    values = [np.asarray(array.astype(mx.float32)).tobytes() for array in norms]
    return hashlib.blake2b(b"".join(values), digest_size=4).hexdigest()
