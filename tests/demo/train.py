"""Train the demo model: `python -m tests.demo.train [DIRECTORY]`.

Minutes on two CPU cores. Writes tokenizer.json and the weights, in integers, to the directory, by
default the one that the package ships.

A model trained on short texts breaks down behind an agent's 20,000 tokens of tools and history:
distances that it never saw, and attention thinned out over them. Such prompts are too slow to
train on, so they are simulated: half of the rows begin with a background that stands up to
100,000 positions away and counts as if it were there many times over (the logarithm of that many
is added to its attention scores).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer

from mlxcache.model import demo
from mlxcache.model.demo import CONFIG, DATA
from tests.demo.text import Chats, prose
from tests.toys.tokenizer import library_sources, train_tokenizer

BACKGROUND = 64  # tokens at the start of a row that may be moved far away
LENGTH = 256
ROWS = 6
SHARPNESS = 1.3  # clients sample at temperature 1, where a model this small loses its thread
LEVELS = 63  # of each sign: as good as float16 (the loss differs by 0.001), and a third of its size
SINK = 3  # the first tokens of a prompt are there only once, however long it is


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, shape (ROWS, LENGTH + 1); per row the distance of the background, the logarithm
    of how often it counts, and where the text to be learned begins; shapes (ROWS,)."""

    tokens: mx.array
    gap: mx.array
    copies: mx.array
    start: mx.array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=DATA)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    paragraphs = prose()
    sources = list(library_sources())
    texts = [text for _, text in paragraphs] + [source[:4000] for source in sources]
    tokenizer = train_tokenizer(texts, CONFIG["vocab_size"], thinking=False)
    chats = Chats(paragraphs, sources, options.seed)
    model = train(tokenizer, chats, options.steps, options.seed)
    save(model, tokenizer, options.directory)


def train(tokenizer: Tokenizer, chats: Chats, steps: int, seed: int) -> Model:
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(CONFIG))
    optimizer = optimizers.AdamW(_schedule(4e-3, steps), betas=[0.9, 0.95], weight_decay=0.1)
    gradient = nn.value_and_grad(model, loss)
    draw = random.Random(seed)
    began, mean = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        value, gradients = gradient(model, batch(tokenizer, chats, draw))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        mean += (value.item() - mean) * max(0.03, 1 / step)
        if step % 20 == 0:
            print(f"step {step}: loss {mean:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model


def _schedule(peak: float, steps: int) -> Callable[[mx.array], mx.array]:
    """Up to `peak` in 20 steps, flat, and down to a twentieth of it over the last two thirds."""
    rise = optimizers.linear_schedule(peak / 20, peak, 20)
    fall = optimizers.cosine_decay(peak, steps - steps // 3, peak / 20)
    flat = optimizers.linear_schedule(peak, peak, steps // 3)
    return optimizers.join_schedules([rise, flat, fall], [20, steps // 3])


def batch(tokenizer: Tokenizer, chats: Chats, draw: random.Random) -> Batch:
    """The next rows: half of them with a far background, the others with a near one or none."""
    rows, gaps, copies, starts = [], [], [], []
    for row in range(ROWS):
        far = row % 2 == 0
        length = BACKGROUND if far else draw.choice([0, 0, BACKGROUND, BACKGROUND // 2])
        ids = tokenizer.encode(chats.background()).ids[: max(0, length - 2)] if length else []
        ids += tokenizer.encode(f"{demo.TURN_END}\n").ids if length else []
        starts.append(len(ids))
        while len(ids) <= LENGTH:
            ids += tokenizer.encode(chats.exchange()).ids
        rows.append(ids[: LENGTH + 1])
        full = far and starts[-1] == BACKGROUND
        gaps.append(int(math.exp(draw.uniform(0, 11.5))) if full else 0)
        copies.append(draw.uniform(0, 6.0) if full else 0.0)
    return Batch(mx.array(rows), mx.array(gaps), mx.array(copies), mx.array(starts))


def loss(model: Model, rows: Batch) -> mx.array:
    """The mean cross entropy per token after each row's background."""
    logits = forward(model, rows.tokens[:, :-1], rows.gap, rows.copies)
    targets = rows.tokens[:, 1:]
    learned = mx.arange(1, LENGTH + 1) > rows.start[:, None]
    losses = nn.losses.cross_entropy(logits, targets)
    return mx.sum(losses * learned) / mx.sum(learned)


def forward(model: Model, tokens: mx.array, gap: mx.array, copies: mx.array) -> mx.array:
    """The model's logits, shape (rows, length, vocabulary), as if the background were far away."""
    inner = model.model
    length = tokens.shape[1]
    place = mx.arange(length)
    mask = mx.where(place[:, None] >= place, 0.0, -1e9)[None, None]
    behind = (place[:, None] >= BACKGROUND) & (place >= SINK) & (place < BACKGROUND)
    mask = mask + behind * copies[:, None, None, None]
    hidden = inner.embed_tokens(tokens)
    for layer in inner.layers:
        hidden = hidden + _attend(layer.self_attn, layer.input_layernorm(hidden), mask, gap)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: mx.array = inner.embed_tokens.as_linear(inner.norm(hidden))
    return logits


def _attend(layer: nn.Module, x: mx.array, mask: mx.array, gap: mx.array) -> mx.array:
    rows, length, _ = x.shape

    def heads(project: Callable[[mx.array], mx.array], count: int) -> mx.array:
        return project(x).reshape(rows, length, count, -1).transpose(0, 2, 1, 3)

    def turn(value: mx.array) -> mx.array:
        near = layer.rope(value[:, :, BACKGROUND:], offset=BACKGROUND + gap)
        return mx.concatenate([layer.rope(value[:, :, :BACKGROUND]), near], axis=2)

    out = mx.fast.scaled_dot_product_attention(
        turn(heads(layer.q_proj, layer.n_heads)),
        turn(heads(layer.k_proj, layer.n_kv_heads)),
        heads(layer.v_proj, layer.n_kv_heads),
        scale=layer.scale,
        mask=mask,
    )
    mixed: mx.array = layer.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, length, -1))
    return mixed


def save(model: Model, tokenizer: Tokenizer, directory: Path) -> None:
    """Write what `demo.materialise` reads of a training; the template is not learned."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    weights["model.norm.weight"] = weights["model.norm.weight"] * SHARPNESS
    weights = shrink(weights)
    mx.save_safetensors(str(directory / "demo.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


def shrink(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """What `demo.read_weights` reads: matrices as int8 with a float16 factor per row."""
    shrunk: dict[str, mx.array] = {}
    for name, value in weights.items():
        if value.ndim != 2:
            shrunk[name] = value.astype(mx.float16)
            continue
        exact = value.astype(mx.float32)
        widest = mx.maximum(mx.max(mx.abs(exact), axis=1), 1e-2)  # no factor near float16's zero
        factor = (widest / LEVELS).astype(mx.float16)
        steps = mx.round(exact / factor.astype(mx.float32)[:, None])
        shrunk[name] = steps.astype(mx.int8)
        shrunk[name + demo.SCALE] = factor
    return shrunk


if __name__ == "__main__":
    main()
