"""Peak memory of a long prefill with KV of 16, 8 and 4 bits, in the shape of Qwen3-4B's attention.

`python -m tests.proofs.kv_bits` feeds the last `CHUNK` of 32,000 tokens to a model of 36 layers, 32
heads and 8 of KV, of size 128, in bfloat16: no earlier step of a prefill holds more. The KV of the
tokens before is zeros. It ends with status 1 if a bound is missed.

A CPU has no fused attention and holds the scores of a chunk, so this one is short; it is read back
as a long one is. The control is the product with quantised KV by which mlx-lm feeds a chunk: the
scores of 2,048 tokens are counted beside the KV.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import typer

from mlxcache.model import kv
from mlxcache.model.lineage import Lineage
from mlxcache.model.load import ModelSpec, load
from tests.toys.toy import make_toy

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


def main(layers: int = 36) -> None:
    """Measure the peaks."""
    scores = 2 * HEADS * MLX_LM_CHUNK * TOKENS
    plain, fine = 0, True
    with tempfile.TemporaryDirectory() as folder:
        for bits, peak, held in peaks(Path(folder), layers):
            plain = plain or peak
            fine &= peak <= BOUNDS.get(bits, 1.0) * plain
            print(
                f"{bits} bits: peak {peak / 1e9:.2f} GB, {peak / plain:.2f} of 16 bits; KV "
                f"{held / 1e9:.2f} GB; mlx-lm's product holds {(held + scores) / 1e9:.2f} GB and "
                f"more, {(held + scores) / plain:.2f}",
                flush=True,
            )
    sys.exit(not fine)


if __name__ == "__main__":
    typer.run(main)
