"""Estimate of the RAM and disk that conversations of a model take, and of how many fit.

A conversation is simulated turn by turn. The rules by which a server places, thins and writes
checkpoints give their positions, and the `Layout` of the model's caches gives the sizes of KV and
checkpoints. Weights are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.cache.checkpoints import most_checkpoints, stops
from mlxcache.cache.path_write import RUN_BYTES, RUN_TOKENS
from mlxcache.cache.ram import with_slack
from mlxcache.config import format_size
from mlxcache.config.values import KVBits
from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.device import DeviceKind
from mlxcache.model.examine import ChooseBits
from mlxcache.model.kv import Layout
from mlxcache.store.digests import BLOCK
from mlxcache.tree.thinning import BUDGET_SHARE, checkpoints_to_drop
from mlxcache.types import ModelInfo

MIN_TRANSIENT = 16 << 20

MOST_PENDING = 256 << 20

MOST_POOL = 1 << 30


def pool_bytes(limit: int) -> int:
    return min(limit // 16, MOST_POOL)


def with_pool(size: int) -> int:
    """Return the least budget that has `size` bytes besides those of MLX's pool."""
    return size + min(-(-size // 15), MOST_POOL)


def pending_bytes(limit: int, layout: Layout) -> int:
    """Return the bytes of a budget that copies which wait for the disk may take."""
    if not layout.cacheable:
        return 0
    return max(2 * BLOCK * layout.bytes_per_token, min(limit // 16, MOST_PENDING))


def transient_bytes(limit: int, least: int = 0) -> int:
    """Return the bytes of a budget that are set aside for forward passes."""
    return min(max(limit // 8, least, MIN_TRANSIENT), limit // 3)


MOST_COPIED = 256 << 20
"""Maximum bytes copied in one evaluation: the wait for the device is short compared with it."""


def copy_bytes(transient: int, kind: DeviceKind) -> int:
    """Return how many bytes of KV to copy in one `mx.eval`, or 0 for one array at a time.

    On a GPU each evaluation waits for the device, so several arrays are copied at once. A CPU is
    faster with one array at a time: the next copy reuses the memory that the replaced array has
    freed, while new memory costs page faults.
    """
    return min(MOST_COPIED, transient // 2) if kind == "gpu" else 0


HEADER_BYTES, TOKEN_BYTES = 900, 6
"""Bytes of a file beside its tensors: fixed, and for each token of a run (ids, checksums)."""

FILE_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Talk:
    """Shape of an agent's conversation, in tokens, for the simulation.

    `head`: tools and system prompt. Each turn adds `asked` tokens, which end with a generation
    prompt, and then a reply of `replied` tokens.
    """

    head: int = 8000
    asked: int = 700
    replied: int = 300
    generation: int = 4

    def turns(self, tokens: int) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
        """Yield each turn: marks so far, tokens cached, length of the prompt, length with the
        reply.
        """
        marks: list[int] = []
        begin, end = min(self.head, tokens // 2), 0
        while end < tokens:
            asked = min(self.asked, max(2 * self.generation, tokens - begin - self.replied))
            marks += [begin, begin + asked - self.generation]
            prompt = begin + asked
            yield tuple(marks), end, prompt, min(tokens, prompt + self.replied)
            begin = end = min(tokens, prompt + self.replied)


@dataclass(frozen=True, slots=True)
class Held:
    tokens: int
    ram_bytes: int
    ram_checkpoints: int
    disk_bytes: int
    disk_checkpoints: int
    fit_ram: int
    fit_disk: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Capacity of a model within budgets of `ram` and `disk` bytes, 0 without a disk tier.

    `room`: bytes of `ram` for conversations. `longest`: tokens of the longest prompt that fits,
    unless forward passes need more memory than is set aside.
    """

    ram: int
    disk: int
    room: int
    longest: int
    held: tuple[Held, ...]


def fit(
    layout: Layout, *, ram: int, disk: int, tokens: Sequence[int], talk: Talk | None = None
) -> Fit:
    pending = pending_bytes(ram, layout) if disk else 0
    room = max(0, ram - pool_bytes(ram) - transient_bytes(ram) - pending)
    per_token = layout.bytes_per_token
    left = room - layout.running_bytes - layout.checkpoint_bytes
    longest = max(0, left // per_token - 64) if per_token else (1 << 27) * (left > 0)
    empty = Fit(ram, disk, room, longest, ())
    return replace(empty, held=tuple(_held(layout, talk or Talk(), n, empty) for n in tokens))


def choose_bits(setting: KVBits, ram: Callable[[int], int]) -> ChooseBits:
    """Make the choice of `--kv-bits`. `ram`: the budget beside weights of so many bytes.

    Auto is 8 bits if two full contexts do not fit in 16, and the model can be quantised.
    """

    def by_size(model: Any, info: ModelInfo) -> int | None:
        plain = kv.survey(model, evaluate=False)
        room = fit(plain, ram=ram(info.weights_bytes), disk=1, tokens=()).room
        if 2 * _context_bytes(plain, info.context_length) <= room:
            return None
        try:
            kv.survey(model, kv_bits=8, evaluate=False)
        except ModelError:
            return None
        return 8

    return by_size if setting == "auto" else lambda model, info: setting


def _context_bytes(layout: Layout, tokens: int) -> int:
    return tokens * layout.bytes_per_token + layout.running_bytes + layout.checkpoint_bytes


def warnings(layout: Layout, *, context: int, weights: int, ram: int, machine: int) -> list[str]:
    """Return warnings to log at the start; empty if model and cache fit the machine's memory."""
    found = []
    one = _context_bytes(layout, context)
    if weights + one > machine:
        found.append(
            f"the model ({format_size(weights)}) and one full context of {context} tokens "
            f"({format_size(one)}) do not fit into {format_size(machine)} of memory: "
            "serve fewer tokens (--context), keys and values in fewer bits (--kv-bits), or a "
            "smaller model"
        )
    if weights + ram > machine:
        found.append(
            f"the model ({format_size(weights)}) and --ram ({format_size(ram)}) together are more "
            f"than the {format_size(machine)} of memory for them: the machine may become slow"
        )
    return found


def _held(layout: Layout, talk: Talk, tokens: int, budget: Fit) -> Held:
    if not layout.cacheable:
        return Held(tokens, 0, 0, 0, 0, 0, 0)
    in_ram: set[int] = set()
    on_disk: set[int] = set()
    size, begin = 0, 0
    for marks, cached, prompt, end in talk.turns(tokens):
        if layout.opaque:
            placed = {*stops(marks, cached, prompt, most=_most(layout, prompt, budget.ram)), end}
            in_ram = _kept(layout, in_ram | placed, end, budget.ram)
            written = {at for at in in_ram if at > max(on_disk, default=0)}
            on_disk = _kept(layout, on_disk | written, end, budget.disk)
        size += _run_bytes(layout, end - begin)
        begin = end // BLOCK * BLOCK
    ram_bytes = with_slack(tokens) * layout.bytes_per_token
    ram_bytes += len(in_ram) * layout.checkpoint_bytes
    size += len(on_disk) * file_bytes(layout.checkpoint_bytes)
    return Held(
        tokens, ram_bytes, len(in_ram), size, len(on_disk),
        budget.room // max(1, ram_bytes), budget.disk // max(1, size),
    )  # fmt: skip


def _most(layout: Layout, tokens: int, limit: int) -> int:
    share = BUDGET_SHARE if layout.specs else 1.0
    most = int(limit * share) // max(1, layout.checkpoint_bytes)
    return min(most, most_checkpoints(layout, tokens, limit))


def _kept(layout: Layout, positions: set[int], tokens: int, limit: int) -> set[int]:
    return positions - set(
        checkpoints_to_drop(sorted(positions), tokens, _most(layout, tokens, limit))
    )


def _run_bytes(layout: Layout, tokens: int) -> int:
    per_token = layout.bytes_per_token
    if not per_token:
        return 0
    most = max(BLOCK, min(RUN_TOKENS, RUN_BYTES // per_token) // BLOCK * BLOCK)
    whole, rest = divmod(tokens, most)
    one = per_token + TOKEN_BYTES
    return whole * file_bytes(most * one) + (file_bytes(rest * one) if rest else 0)


def file_bytes(payload: int) -> int:
    return -(-(payload + HEADER_BYTES) // FILE_BLOCK) * FILE_BLOCK
