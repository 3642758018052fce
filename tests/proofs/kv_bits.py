"""KV of few bits: peak memory of a long prefill, and recall of a model trained here.

Each command ends with status 1 if a bound is missed.

`python -m tests.proofs.kv_bits peak` feeds the last `CHUNK` of 32,000 tokens to a model of 36
layers, 32 heads and 8 of KV, of size 128, in bfloat16: no earlier step of a prefill holds more. The
KV of the tokens before is zeros. A CPU has no fused attention and holds the scores of a chunk, so
this one is short; it is read back as a long one is. The control is the product with quantised KV by
which mlx-lm feeds a chunk: the scores of 2,048 tokens are counted beside the KV.

`python -m tests.proofs.kv_bits recall` trains a model of two layers on facts, pairs of a name and a
value, and on questions for the values of names. It prints the share of right answers by form of
KV, and how far the model's chances are from those with 16 bits. Source of rotated keys:
https://arxiv.org/abs/2404.00456
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import typer
from mlx import nn
from mlx import optimizers as optim
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from mlxcache.model import kv
from mlxcache.model.lineage import Lineage
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.quantised import Form, QuantisedCache
from tests.toys.toy import make_toy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TOKENS, CHUNK = 32_000, 2
HEADS, MLX_LM_CHUNK = 32, 2048
BOUNDS = {8: 0.65, 4: 0.45}
"""Most of the peak in 16 bits."""


def peaks(folder: Path, layers: int) -> Iterator[tuple[int, int, int]]:
    """Yield bits of KV, the peak and the bytes of all KV."""
    made = make_toy(
        folder, "qwen3", layers=layers, hidden=64, heads=HEADS, kv_heads=8, head_dim=128,
        intermediate=64,
    )  # fmt: skip
    model = load(ModelSpec(str(made))).model
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    for bits in (16, 8, 4):
        layout = kv.survey(model, kv_bits=None if bits == 16 else bits)
        line = Lineage(layout)
        line.grow(TOKENS)
        kv.eval_states(line.caches)
        line.pretend(TOKENS - CHUNK)
        mx.reset_peak_memory()
        mx.eval(model(mx.zeros((1, CHUNK), mx.int32), cache=line.caches)[:, -1])
        kv.eval_states(line.caches)
        yield bits, mx.get_peak_memory(), TOKENS * layout.bytes_per_token
        line.release()


class RotatedCache(QuantisedCache):
    """Cache that quantises keys after a Hadamard rotation, which spreads outlying channels."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        keys, values = super().update_and_fetch(mx.hadamard_transform(keys), values)
        return mx.hadamard_transform(keys), values


def made_form(kind: type[QuantisedCache], keys: int, values: int) -> QuantisedCache:
    return kind([KVCache() for _ in range(3)], Form(keys, values, HEAD))


NAMES, HEAD = 32, 32
FORMS: dict[str, Callable[[], Any]] = {
    "16": KVCache,
    **{
        f"{keys},{values}": partial(made_form, QuantisedCache, keys, values)
        for keys, values in ((8, 8), (6, 6), (8, 4), (4, 4))
    },
    "4,4 rotated": partial(made_form, RotatedCache, 4, 4),
}
"""Caches by the bits of keys and values."""


def talks(rng: np.random.Generator, count: int, facts: int, asked: int) -> mx.array:
    """Facts in another order each, then questions with their answers; shape (count, 2 (facts +
    asked))."""
    names = np.stack([rng.permutation(NAMES)[:facts] for _ in range(count)])
    values = rng.integers(NAMES, 2 * NAMES, (count, facts))
    orders = [[rng.permutation(facts) for _ in range(-(-asked // facts))] for _ in range(count)]
    questions = np.stack([np.concatenate(order)[:asked] for order in orders])
    again = [np.take_along_axis(part, questions, 1) for part in (names, values)]
    pairs = [np.stack([names, values], -1), np.stack(again, -1)]
    return mx.array(np.concatenate(pairs, 1).reshape(count, -1).astype(np.int32))


def trained(seed: int, steps: int) -> llama.Model:
    """Train on more facts whenever the model knows nearly all answers."""
    mx.random.seed(seed)
    rng = np.random.default_rng(seed)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128,
            num_attention_heads=2, num_key_value_heads=2, head_dim=HEAD, rms_norm_eps=1e-5,
            vocab_size=2 * NAMES, rope_theta=500.0, tie_word_embeddings=False,
        )
    )  # fmt: skip
    warm = optim.linear_schedule(1e-4, 3e-3, 100)
    rate = optim.join_schedules([warm, lambda step: mx.array(3e-3)], [100])
    optimiser = optim.Adam(rate, betas=[0.9, 0.98])

    def loss(batch: mx.array, first: int) -> tuple[mx.array, mx.array]:
        logits = model(batch[:, :-1])[:, first::2]
        right = batch[:, first + 1 :: 2]
        return nn.losses.cross_entropy(logits, right).mean(), (logits.argmax(-1) == right).mean()

    gradients, facts, known = nn.value_and_grad(model, loss), 4, 0.0
    for _ in range(steps):
        batch = talks(rng, 64 if facts < 12 else 32, facts, max(min(facts, 16), 3 * min(facts, 5)))
        (_, share), found = gradients(batch, 2 * facts)
        optimiser.update(model, found)
        mx.eval(model.parameters(), optimiser.state)
        known = 0.95 * known + 0.05 * float(share)
        if known > 0.93 and facts < NAMES:
            facts, known = facts + 2, 0.6
    return model


@app.command()
def recall(seed: int = 2, steps: int = 500, facts: int = 24) -> None:
    """Train a model, and ask it with KV in each form."""
    model = trained(seed, steps)
    batch = talks(np.random.default_rng(99), 256, facts, facts)
    right, plain, shares = batch[:, 2 * facts + 1 :: 2], mx.zeros(1), dict[str, float]()
    for name, make in FORMS.items():
        caches = [make() for _ in range(2)]
        model(batch[:, : 2 * facts], cache=caches)
        logits = model(batch[:, 2 * facts : -1], cache=caches)[:, ::2]
        chances = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        plain = chances if name == "16" else plain
        shares[name] = float((chances.argmax(-1) == right).mean())
        apart = float((mx.exp(plain) * (plain - chances)).sum(-1).mean())
        print(f"{name}: {shares[name]:.4f} right, KL divergence {apart:.5f}", flush=True)
    sys.exit(abs(shares["8,8"] - shares["16"]) > 0.01)


@app.command()
def peak(layers: int = 36) -> None:
    """Measure the peaks."""
    scores = 2 * HEADS * MLX_LM_CHUNK * TOKENS
    plain, fine = 0, True
    with tempfile.TemporaryDirectory() as folder:
        for bits, most, held in peaks(Path(folder), layers):
            plain = plain or most
            fine &= most <= BOUNDS.get(bits, 1.0) * plain
            print(
                f"{bits} bits: peak {most / 1e9:.2f} GB, {most / plain:.2f} of 16 bits; KV "
                f"{held / 1e9:.2f} GB; mlx-lm's product holds {(held + scores) / 1e9:.2f} GB and "
                f"more, {(held + scores) / plain:.2f}",
                flush=True,
            )
    sys.exit(not fine)


if __name__ == "__main__":
    app()
