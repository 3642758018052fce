"""Cost of a forward pass in temporary memory and time, measured on the loaded model.

The memory depends on the model and device: attention scores may be materialised (on the CPU, but
not by Metal's fused kernel), keys may be expanded from a latent, and layers may attend to a window
only. The bytes of a chunk of c tokens after k cached ones are therefore modelled as `per_token * c
+ per_pair * c * (k + c) + per_key * (k + c) + per_square * c * c`. Each coefficient is measured
where its term is the largest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlxcache.model import kv
from mlxcache.model.device import DeviceKind
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage, NewLineage
from mlxcache.model.weights import longest_pass, shared_bytes
from mlxcache.types import token_ids

PROBE = 128  # tokens in each chunk that is fed to measure costs
FEWEST = 16  # tokens of the shortest chunk that a prompt is fed in

SHORT = 192
"""Tokens per pass on a CPU where longer passes take more time per token.

That is the case if attention materialises its scores: those above the diagonal are computed
needlessly, and all of them exceed the processor's caches.
"""

PASSES = (512, 1024, 2048, 4096)  # lengths of passes, in tokens, that are compared on a GPU

COMPARE_S = 4.0
"""Most seconds for comparing passes while a model is loaded, as far as the time can be estimated.
"""

SAME = 1.02  # ratio of seconds per token up to which two lengths of passes count as equally fast

SCORES = 4.0
"""Bytes per pair of positions above which attention scores, and not only a mask, are materialised.
"""

FAR = 4096  # cached positions, all zeros, before a chunk that is fed to measure costs
STOPS_SHARE = 0.05  # share of a prefill's time that its stops for checkpoints may add
STOPS = 16  # number of stops for checkpoints that every prefill may make, regardless of their cost

NEAR = 1024
"""Positions in the first range of similar cost per token; each further range is twice as long."""

NEWEST = 0.3  # weight of the newest measurement in a moving average
SAFETY = 1.3  # factor by which estimated bytes exceed the measured ones


@dataclass(slots=True)
class Cost:
    """Measured costs of one model on this machine; for the memory of a pass, see the module.

    `fixed`: bytes for the logits of one row. `rate`: prefill in tokens per second, a moving average
    over all positions. `paces` maps ranges of positions (`range_of`) to moving averages of seconds
    per token. `growth`: a token after k cached ones takes 1 + `growth` * k times as long as the
    first. `per_pass`: seconds of the shortest pass plus a copy of the recurrent state.

    A chunk of more than `longest` tokens is fed in several passes, because a longer pass takes more
    time per token, or may be computed wrongly; 0 means no limit. If `even`, these are equally long;
    otherwise all but the last have `longest` tokens. `shared_bytes`: bytes of weights that a step
    reads once for all rows of a batch; 0 if memory bandwidth does not limit the speed.
    """

    per_token: float
    per_pair: float
    fixed: float
    rate: float
    per_key: float = 0.0
    per_square: float = 0.0
    longest: int = 0
    per_pass: float = 0.0
    growth: float = 0.0
    paces: dict[int, float] = field(default_factory=dict)
    even: bool = True
    shared_bytes: int = 0

    def for_drafts(self, drafts: int) -> Cost:
        return replace(self, fixed=self.fixed * (1 + drafts))

    def transient(self, chunk: int, cached: int, rows: int = 1) -> int:
        """Return the temporary bytes, without new KV, of one pass over `chunk` tokens per row."""
        seen = cached + chunk
        size = self.per_token * chunk + self.per_pair * chunk * seen
        size += self.per_key * seen + self.per_square * chunk * chunk
        return int(rows * (SAFETY * size + self.fixed))

    def chunk(self, cached: int, *, bytes_: int, seconds: float, most: int) -> int:
        """Return the most tokens for `bytes_` of temporary memory and about `seconds`."""
        size = min(most, max(32, int(seconds / self.pace(cached))))
        while size > FEWEST and self.peak(size, cached) > bytes_:
            size //= 2
        if self.longest < size and not self.even:
            size -= size % self.longest if self.longest else 0
        return max(FEWEST, size)

    def peak(self, chunk: int, cached: int) -> int:
        """Return the temporary bytes, without the new KV, of a chunk's last pass, the largest."""
        step = self.step(chunk)
        return self.transient(step, cached + chunk - step)

    def step(self, size: int) -> int:
        if not (self.longest and self.even):
            return min(size, self.longest or size)
        return -(-size // -(-size // self.longest))

    def stops(self, tokens: int) -> int:
        """Return how many times a prefill may stop for a checkpoint, which splits a pass in two."""
        seconds = STOPS_SHARE * tokens / self.rate
        return max(STOPS, int(seconds / self.per_pass)) if self.per_pass else tokens

    def pace(self, cached: int) -> float:
        """Return the expected seconds per prompt token after `cached` tokens.

        Without measurements in that range of positions, the time is estimated from the nearest
        measured range before it, doubled for each range between, as if all layers were attention.
        """
        wanted = range_of(cached)
        known = max((one for one in self.paces if one <= wanted), default=None)
        if known is None:
            return float(2**wanted / self.rate)
        return float(self.paces[known] * 2 ** (wanted - known))

    def seconds(self, start: int, stop: int) -> float:
        """Estimate the seconds for feeding the prompt tokens from `start` to `stop`. Any thread."""
        paces, total = dict(self.paces), 0.0
        while start < stop:
            where = range_of(start)
            end = min(stop, NEAR << where)
            nearest = min(paces, key=lambda one: abs(one - where), default=None)
            pace, at = 1 / self.rate, 0.0
            if nearest is not None:
                pace, at = paces[nearest], _middle(nearest)
            if nearest != where:
                pace *= (1 + self.growth * _middle(where)) / (1 + self.growth * at)
            total += (end - start) * pace
            start = end
        return total

    def observe(self, tokens: int, seconds: float, cached: int) -> None:
        """Seconds are averaged, not rates, so that one slow chunk has an effect at once."""
        if tokens < FEWEST or seconds <= 0:
            return
        pace, where = seconds / tokens, range_of(cached)
        before = self.paces.get(where, pace)
        self.paces[where] = before + NEWEST * (pace - before)
        self.rate = 1 / (1 / self.rate + NEWEST * (pace - 1 / self.rate))


def range_of(cached: int) -> int:
    """Return the index of the range of positions that contains position `cached`."""
    return (cached // NEAR).bit_length()


def _middle(where: int) -> float:
    return 0.75 * (NEAR << where) if where else NEAR / 2


def peak(run: Callable[[], object]) -> int:
    """Return how far MLX's memory use rises above its present level while `run` runs, in bytes."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return max(0, mx.get_peak_memory() - before)


class _Probe:
    """Feeds chunks of zeros to a model to measure time and memory, in a KV buffer of its own."""

    def __init__(self, model: Any, line: Lineage, positions: int):
        self.model = model
        self.line = line
        self.line.grow(positions)

    def feed(self, tokens: int, at: int) -> tuple[float, int]:
        self.line.pretend(at)
        self.line.settle()
        chunk = mx.zeros((1, tokens), mx.int32)

        def run() -> None:
            self.line.note_feed(token_ids([0] * tokens))
            self.model(chunk, cache=self.line.caches)
            kv.eval_states(self.line.caches)

        began = time.perf_counter()
        size = peak(run)
        return time.perf_counter() - began, size

    def peak(self, tokens: int, at: int) -> int:
        return self.feed(tokens, at)[1]

    def growth(self, far: int) -> float:
        seconds = [min(self.feed(PROBE, at)[0] for _ in range(2)) for at in (0, far)]
        return max(0.0, seconds[1] / seconds[0] - 1.0) / max(1, far)

    def long_is_slow(self) -> bool:
        """Return whether one long pass gains nothing over two passes of half its length."""
        whole, halves = [], []
        for _ in range(2):
            whole.append(self.feed(2 * SHORT, 0)[0])
            halves.append(self.feed(SHORT, 0)[0] + self.feed(SHORT, SHORT)[0])
        return min(halves) < 1.05 * min(whole)

    def per_pass(self) -> float:
        """Return the seconds of a stop: the shortest pass plus a copy of the recurrent state."""
        self.feed(FEWEST, 0)  # for the kernels
        short = min(self.feed(FEWEST, 0)[0] for _ in range(2))
        began = time.perf_counter()
        self.line.capture()
        return short + time.perf_counter() - began

    def fastest_pass(self, cost: Cost, most: int, room: int) -> tuple[float, int]:
        """Return the best speed in tokens per second, and the length above which passes are slower.

        Compares `PASSES` of at most `most` tokens and `room` bytes, for at most `COMPARE_S`
        seconds. The length is 0 if no measured pass was too long.
        """
        began, paces, pace = time.perf_counter(), dict[int, float](), 1 / cost.rate
        for tokens in PASSES:
            expected = tokens * pace
            left = COMPARE_S - (time.perf_counter() - began)
            if tokens > most or cost.transient(tokens, 0) > room or 2 * expected > left:
                break
            self.feed(tokens, 0)  # compiles the kernels
            pace = paces[tokens] = max(self.feed(tokens, 0)[0], 1e-6) / tokens
        if not paces:
            return cost.rate, 0
        best = min(paces.values())
        longest = max(tokens for tokens, one in paces.items() if one <= SAME * best)
        return 1 / best, longest if longest < max(paces) else 0


def measure(
    model: Any,
    layout: Layout,
    room: int,
    *,
    kind: DeviceKind = "cpu",
    most: int = 0,
    lineage: NewLineage = Lineage,
) -> Cost:
    """Measure a model's costs with a few short chunks, which also warms up its kernels.

    `room`: bytes that cached positions may take, and as many again for a pass. `most`: tokens of
    the longest chunk. Blocks, on a GPU for about `COMPARE_S` seconds at most; MLX thread only.
    """
    far = min(FAR, room // max(1, layout.bytes_per_token))
    probe = _Probe(model, lineage(layout, 0), far + 4 * PROBE)
    probe.feed(2, 0)
    probe.feed(1, 2)  # compiles the kernels of decoding
    probe.feed(PROBE, 0)  # compiles the kernels
    seconds, near = probe.feed(PROBE, 0)
    long = probe.peak(3 * PROBE, 0)
    # by how much a peak rises with each cached position, once attention makes the peak
    wide, narrow = (
        max(0, probe.peak(size, far) - probe.peak(size, far // 2)) / max(1, far - far // 2)
        for size in (PROBE, FEWEST)
    )
    cost: Cost = _fitted(near, long, wide, narrow)
    cost.fixed = 6.0 * 4 * layout.vocab_size + (1 << 20)
    cost.rate = PROBE / max(seconds, 1e-6)
    limit = longest_pass(model)
    if kind == "gpu":
        cost.even = False
        most = min(most, far + 4 * PROBE, limit or most)
        cost.rate, cost.longest = probe.fastest_pass(cost, most, room)
        cost.shared_bytes = shared_bytes(model)
    elif cost.per_pair > SCORES and probe.long_is_slow():
        cost.longest = SHORT
    cost.longest = min(cost.longest or limit, limit or cost.longest)
    cost.growth = probe.growth(far)
    if layout.opaque:
        cost.per_pass = probe.per_pass()
    probe.line.release()
    mx.clear_cache()
    return cost


def _fitted(near: int, long: int, wide: float, narrow: float) -> Cost:
    """Fit the coefficients of the memory model to measured peaks; see `Cost`.

    `near`, `long`: peak bytes of PROBE and of 3 * PROBE tokens with nothing cached. `wide`,
    `narrow`: additional peak bytes per cached token, for chunks of PROBE and of FEWEST tokens.
    """
    per_pair = max(0.0, (wide - narrow) / (PROBE - FEWEST))
    per_key = max(0.0, narrow - FEWEST * per_pair)
    one = near - PROBE * (per_pair * PROBE + per_key)
    three = long - 3 * PROBE * (per_pair * 3 * PROBE + per_key)
    per_square = max(0.0, (three - 3 * one) / (6 * PROBE * PROBE))
    per_token = max(one / PROBE - per_square * PROBE, 64.0)
    return Cost(per_token, per_pair, 0.0, 0.0, per_key, per_square)
