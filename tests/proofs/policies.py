"""What is evicted, beside other policies and one that knows the future, on recorded sessions.

    python -m tests.proofs.policies FILE|FOLDER ...

Prints the share of prompt tokens that are reused, for RAM of several shares of what holds all.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxcache.model.adapters import Recurrent
from mlxcache.model.kv import Layout
from mlxcache.plan.cache import Memory
from mlxcache.plan.simulate import Outcome, Simulation, Speed
from mlxcache.plan.trace import Trace
from mlxcache.plan.trace_files import read_trace
from mlxcache.tree.eviction import EvictionOrder, Key
from mlxcache.tree.node import Node

SHARES = (0.05, 0.1, 0.2, 0.4)
USERS = (4, 8)
SPEED = Speed(prefill=1000, decode=60)

PLAIN = Layout(
    make=list,
    vocab_size=100,
    bytes_per_token=24_576,
    checkpoint_bytes=0,
    running_bytes=0,
    window_bytes=0,
    linear=(0,),
    specs=(((4, 64, mx.float16), (4, 64, mx.float16)),),
    opaque_at=(),
    checkpointed=(),
    batchable=True,
    states=(),
    unknown=(),
)
RECURRENT = replace(
    PLAIN,
    checkpoint_bytes=64 << 20,
    running_bytes=64 << 20,
    opaque_at=(1,),
    checkpointed=(Recurrent("ArraysCache"),),
)


class LeastRecentlyUsed(EvictionOrder):
    def key(self, node: Node) -> Key:
        return (True, 0.0, node.used_at, node.end)


class WithoutReplaced(EvictionOrder):
    """Today's score alone: what another branch has replaced is not evicted first."""

    def key(self, node: Node) -> Key:
        return (True, *super().key(node)[1:])


class Sized(WithoutReplaced):
    """Frequency and age alone, without the cost of computing a segment again."""

    def _score(self, node: Node) -> float:
        return node.usage.clock + 1.0 + float(np.log2(1 + min(node.usage.count, 7)))


class Oracle(EvictionOrder):
    """Evicts what is used again last, or never; `uses` and `done` are set by `played`.

    `uses`: for each part of the trace, how many requests have begun at each prompt that has it.
    """

    uses: dict[int, list[int]]
    done: list[int]

    def first(self) -> Node | None:
        found = [node for node in self._entered if self._eligible(node)]
        return min(found, key=self.key, default=None)

    def key(self, node: Node) -> Key:
        parts = np.flatnonzero(node.tokens)
        times = self.uses.get(int(node.tokens[parts[0]]), []) if len(parts) else []
        at = bisect_right(times, self.done[0])
        following = times[at] if at < len(times) else 1 << 40
        return (True, -float(following), node.used_at, node.end)


POLICIES = {
    "today": EvictionOrder,
    "LRU": LeastRecentlyUsed,
    "GDSF": Sized,
    "not replaced": WithoutReplaced,
    "oracle": Oracle,
}


def played(
    trace: Trace,
    layout: Layout,
    policy: type[EvictionOrder],
    *,
    ram: int,
    users: int,
    first: Outcome,
) -> float:
    """Return the hit rate of a policy; `first`: a run without limits, whose order it shares."""
    done = [0]
    uses: dict[int, list[int]] = {}
    for turn, position in enumerate(first.order, 1):
        one = trace.requests[position]
        for part in one.ids[: one.prompt_parts].tolist():
            uses.setdefault(part, []).append(turn)

    order = type("Order", (policy,), {"uses": uses, "done": done})

    def on_request(count: int) -> None:
        done[0] = count

    simulation = Simulation(
        layout, Memory(ram, reserved={}), SPEED, on_request=on_request, order=order
    )
    return simulation.run(trace, users).hit_rate


def rows(trace: Trace, users: Sequence[int] = USERS) -> Iterator[str]:
    yield f"| model, sessions at once, RAM | ceiling | {' | '.join(POLICIES)} | regret of today |"
    yield "|---|" + "---:|" * (len(POLICIES) + 2)
    for name, layout in (("attention", PLAIN), ("recurrent", RECURRENT)):
        for count in users:
            unlimited = Simulation(layout, Memory(1 << 60), SPEED)
            first = unlimited.run(trace, count)
            for share in SHARES:
                ram = int(share * unlimited.high_water)
                found = {
                    policy: played(trace, layout, order, ram=ram, users=count, first=first)
                    for policy, order in POLICIES.items()
                }
                regret = found["oracle"] - found["today"]
                cells = " | ".join(f"{rate:.1%}" for rate in (first.hit_rate, *found.values()))
                yield f"| {name}, {count}, {share:.0%} | {cells} | {100 * regret:.1f} |"


def disk_rows(trace: Trace, users: int = 8) -> Iterator[str]:
    """Yield what a disk of some shares adds to 5% of RAM, and what it writes for that."""
    yield "| model, disk | reused | of it from disk | ceiling | bytes written by tokens reused |"
    yield "|---|---:|---:|---:|---:|"
    for name, layout in (("attention", PLAIN), ("recurrent", RECURRENT)):
        unlimited = Simulation(layout, Memory(1 << 60), SPEED)
        ceiling = unlimited.run(trace, users).hit_rate
        for share in SHARES:
            ram, disk = (int(part * unlimited.high_water) for part in (SHARES[0], share))
            outcome = Simulation(layout, Memory(ram, disk, reserved={}), SPEED).run(trace, users)
            saved = sum(one.reuse.cached for one in outcome.served)
            yield (
                f"| {name}, {share:.0%} | {outcome.hit_rate:.1%} | "
                f"{outcome.share(lambda reuse: reuse.disk):.1%} | {ceiling:.1%} | "
                f"{outcome.written / saved:,.0f} |"
            )


LARGE = 4096
"""New tokens from which an append is a large one."""


def causes(trace: Trace) -> Iterator[str]:
    """Yield what a cache without limits still feeds, by cause, and what comes back later."""
    fed: dict[str, int] = {}
    changed = back = 0
    last = {part: at for at, one in enumerate(trace.requests) for part in one.ids.tolist()}
    for at, one in enumerate(trace.requests):
        before = trace.requests[one.after[0]] if one.after else None
        shared = 0 if before is None else min(one.shared(before), one.prompt_tokens)
        new = one.prompt_tokens - shared
        if before is None:
            cause = "first prompts"
        elif shared <= max(one.head, trace.block_tokens):
            cause = "changed head" if shared < one.head - trace.block_tokens else "compaction"
        elif shared < before.prompt_tokens - trace.block_tokens:
            cause = "changed message"
        else:
            cause = f"appends of {LARGE} and more" if new >= LARGE else "smaller appends"
        fed[cause] = fed.get(cause, 0) + new
        if before is not None and cause in ("changed head", "changed message", "compaction"):
            changed += 1
            ends = np.cumsum(before.lengths)
            parted = min(int(np.searchsorted(ends, shared, "right")), len(ends) - 1)
            back += last[int(before.ids[parted])] > at
    total = sum(fed.values())
    for cause, tokens in sorted(fed.items(), key=lambda one: -one[1]):
        yield f"| {cause} | {tokens / total:.0%} |"
    yield f"{back} of {changed} times, a later prompt came back to what was left"


if __name__ == "__main__":
    sessions = read_trace(*map(Path, sys.argv[1:]))
    for row in chain(causes(sessions), rows(sessions), disk_rows(sessions)):
        print(row, flush=True)
