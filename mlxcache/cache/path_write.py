"""What of one path of the prefix tree is written to disk, and how far that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from mlxcache.cache.checkpoints import most_checkpoints
from mlxcache.cache.kv_io import KVFiles
from mlxcache.model.kv import Layout, State
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found
from mlxcache.store.writer import Job
from mlxcache.tree.node import Node
from mlxcache.tree.thinning import FEWEST, checkpoints_to_drop
from mlxcache.types import Tokens

RUN_TOKENS, RUN_BYTES = 2048, 32 << 20
"""Most tokens and bytes of one file: bounds what a restore reads at once and how long a copy takes.
"""

UNWRITTEN = 4096
"""Tokens behind the newest checkpoint on disk from which new ones are written at once."""

TRIES = 2
"""Number of restarts of a path whose first blocks were evicted from disk while it was written."""

Stage = Literal["new", "copying", "resting", "handed over"]
"""Of a path on its way to disk: the store was not searched for it yet; the writer is to get its
files; its newest checkpoints wait for a further turn; the writer has got every file.
"""

States = list[tuple[int, State]]
"""Checkpoints as (position in tokens, state), ascending."""


def run_tokens(layout: Layout, pending_limit: int) -> int:
    """Return the maximum number of tokens of a run file, a multiple of the block size."""
    most = min(RUN_BYTES, pending_limit // 2) // max(1, layout.bytes_per_token)
    return max(BLOCK, min(RUN_TOKENS, most) // BLOCK * BLOCK)


@dataclass(slots=True, eq=False)
class PathWrite:
    """The write of one path of the tree, from its queueing to its last durable file.

    `node`: the node at the path's end or one that continues it, which is locked. `wanted`: the
    checkpoints that are to be on disk. `reused`: number of leading tokens that the request reused,
    to be counted as a use of their files. `whole`: the path ends where a request ended. `parting`:
    positions, ascending, at which an edited last message and another reply part from the path.

    `at`: position of the next token to hand to the writer. `states`: the checkpoints to write after
    the runs; the last `may_rest` may wait for a further turn, after which most need not be written.
    `in_flight`: number of files that the writer has got and has not written. `stopped`: it gets no
    further ones. `lost`: files on disk that the path continues were evicted, so its write is to be
    restarted.
    """

    node: Node
    ids: Tokens
    wanted: States
    reused: int = 0
    whole: bool = False
    parting: Sequence[int] = ()
    stage: Stage = "new"
    at: int = 0
    states: States = field(default_factory=list)
    may_rest: int = 0
    rests_until: float = 0.0
    in_flight: int = 0
    stopped: bool = False
    lost: bool = False
    tries: int = 0

    @property
    def queued(self) -> bool:
        return self.stage in ("new", "copying")

    @property
    def over(self) -> bool:
        return self.stage == "handed over" and not self.in_flight

    @property
    def waits(self) -> bool:
        """True if only checkpoints are left to hand over, and a further turn may come."""
        return self.at >= len(self.ids) and 0 < len(self.states) <= self.may_rest

    @property
    def restarts(self) -> bool:
        return self.lost and self.tries < TRIES and not self.node.detached

    def plan(self, found: Found, layout: Layout, limit: int) -> None:
        """Choose the runs and checkpoints to write, given the part of the path on disk."""
        whole = found.length // BLOCK * BLOCK if found.length < len(self.ids) else len(self.ids)
        self.at = whole if layout.specs else len(self.ids)
        present = [one.position for one in found.checkpoints]
        lacking = lacking_checkpoints([at for at, _ in self.wanted if at <= len(self.ids)], present)
        size = layout.checkpoint_bytes
        most = most_checkpoints(layout, len(self.ids), limit)
        new = len(self.ids) - max(present, default=0)
        paid = new * layout.bytes_per_token // max(1, size)
        if layout.specs:  # of those of several turns, as many as the new KV has bytes for
            most = min(most, max(FEWEST, len(present) + paid))
        dropped = checkpoints_to_drop(
            sorted({*present, *lacking}), len(self.ids), most, kept=present
        )
        self.states = [one for one in self.wanted if one[0] in lacking and one[0] not in dropped]
        also: States = []
        if layout.keeps_rows:  # the first and the newest, as many as the new KV has bytes for
            every, newest = self.states, len(self.states) - max(1, paid - 1)
            now = {at for i, (at, _) in enumerate(every) if i >= newest or (not i and paid > 1)}
            parting = sorted({found.length, *self.parting})
            later = self._before(parting, present, size // layout.window_bytes) - now
            self.states = [one for one in every if one[0] in now]
            also = [one for one in every if one[0] in later]
        self.may_rest = len(also)
        if new < UNWRITTEN and new * layout.bytes_per_token < len(self.states) * size:
            self.may_rest += len(self.states)
            self.states = sorted([*self.states, *also], key=itemgetter(0))
        else:
            self.states += also
        self.stage = "copying"
        self._check_end()

    def _before(self, parting: Sequence[int], present: Sequence[int], least: int) -> set[int]:
        """Return the positions of the checkpoints from which prompts `parting` there continue.

        One that is less than `least` tokens after another is left out.
        """
        held = sorted({*present, *(at for at, _ in self.wanted)})
        found: list[int] = []
        for parted in parting:
            at = max((at for at in held if at <= parted), default=0)
            if not found or at - found[-1] >= least:
                found.append(at)
        return set(found)

    def _check_end(self) -> None:
        if self.stage != "new" and self.at >= len(self.ids) and not self.states:
            self.stage = "handed over"

    def rest(self, until: float) -> None:
        self.stage, self.rests_until = "resting", until

    def rested(self, now: float) -> bool:
        return self.stage == "resting" and self.rests_until <= now

    def end_rest(self) -> None:
        self.stage, self.may_rest = "copying", 0

    def forget_reuse(self) -> None:
        self.reused = 0

    def advance(self, end: int) -> None:
        self.at = end
        self._check_end()

    def count_file(self, change: int) -> None:
        self.in_flight += change

    def next_checkpoint(self, files: KVFiles) -> Job | None:
        """Take the next checkpoint; return a job that writes it, None if the path ends before."""
        at, state = self.states.pop(0)
        self._check_end()
        ids = self.ids[:at]
        if len(ids) < at:
            return None
        return Job(ids, None, files.copy_state(ids, state), files.layout.checkpoint_bytes, self)

    def stop(self, *, lost: bool = False) -> None:
        """Give no further files of this path to the writer; it still writes those that it has."""
        self.stage, self.at, self.states = "handed over", len(self.ids), []
        self.stopped, self.lost = True, lost

    def drop_checkpoint(self, state: State) -> None:
        self.wanted = [one for one in self.wanted if one[1] is not state]
        self.states = [one for one in self.states if one[1] is not state]
        self._check_end()

    def restart(self) -> None:
        self.stage, self.at, self.lost, self.stopped = "new", 0, False, False
        self.tries += 1


def lacking_checkpoints(positions: list[int], present: list[int]) -> set[int]:
    """Choose which checkpoints of a path to write to disk; return their positions in tokens.

    A checkpoint before the newest one on disk (`present`) was on disk once and was dropped by
    thinning, so it is not written again, unless it is the first of the path and before all on disk.
    """
    newer = {at for at in positions if at > max(present, default=0)}
    head = {at for at in positions[:1] if at < min(present, default=0)}
    return newer | head
