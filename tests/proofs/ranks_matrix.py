"""Proof that divided models answer as one process does, for every family that can be divided.

`python -m tests.proofs.ranks_matrix` takes about two hours; `--family`, `--mode`, `--ranks` and
`--precision` choose a part. Each group of processes runs all of `tests.ranks.cells`: turns, edits,
branches, batches, cancels, anticipation, restarts. Exit status 1 on a violation.

In float32 every reply and every count must be those of one process with the whole model; for a
pipeline in bfloat16 too, to the last bit of each probability. With parts of layers in bfloat16,
warm and restored replies are compared with cold ones of the same group, except for the families in
`matrix_rank.CHOOSING`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer
from mlx_lm.utils import load_model

from mlxcache.cli.ranks import RANK, free_port
from mlxcache.errors import ModelError
from mlxcache.ranks.group import check_divisible
from mlxcache.store.parts import Mode
from tests.ranks.cells import CELLS
from tests.ranks.matrix_rank import Plan, Row
from tests.toys.adapter import convert
from tests.toys.configs import FAMILIES
from tests.toys.toy import FUSED, make_toy

WAIT_S = 1400.0
"""Seconds after which a group is given up."""

LAYERS = {"qwen3_5": 8, "qwen3_next": 8}
"""Layers of families of which each of four ranks must have two; others have four layers."""

HEADS = {"deepseek_v41": 8}
"""Heads of families of which each of four ranks must have two; others have four."""

FULL_ONLY = ("deepseek_v41",)
"""Families that MLX computes in float32 only on a CPU."""

MODES: tuple[Mode, ...] = get_args(Mode)


class Precision(StrEnum):
    FULL = "float32"
    HALF = "bfloat16"


@dataclass(frozen=True, slots=True)
class Group:
    """A group to be tried. `size`: number of its processes."""

    family: str
    mode: Mode
    size: int
    precision: Precision

    def __str__(self) -> str:
        return f"{self.family}, {self.mode}, {self.size} ranks, {self.precision}"


@dataclass(slots=True)
class Matrix:
    """Groups that were tried, and what was wrong. `likeliest`: replies' tokens that are those of
    the cold model, and all, of groups whose replies may differ."""

    folder: Path
    say: Callable[[str], None]
    wrong: dict[Group, list[str]] = field(default_factory=dict)
    likeliest: list[tuple[int, int]] = field(default_factory=list)
    refused: dict[tuple[str, Mode], str] = field(default_factory=dict)
    _whole: dict[Path, list[Row]] = field(default_factory=dict)

    def groups(
        self, families: Sequence[str], modes: Sequence[Mode], sizes: Sequence[int]
    ) -> list[tuple[str, Mode, int]]:
        """Return the groups of families that can be divided, and note the others."""
        found = []
        for family in families:
            model, config = load_model(self.model(family, Precision.FULL), lazy=True)
            for mode in modes:
                try:
                    for size in sizes:
                        check_divisible(model, config, size, mode)
                        found.append((family, mode, size))
                except ModelError as error:
                    self.refused[family, mode] = str(error)
        return found

    def model(self, family: str, precision: Precision) -> Path:
        """Make a toy that four ranks can share; return its folder."""
        folder = self.folder / f"{family}-{precision}"
        if folder.exists():
            return folder
        if precision is Precision.HALF:
            return convert(self.model(family, Precision.FULL), folder, "half")
        size = FUSED | {"intermediate": 256, "layers": LAYERS.get(family, 4), "window": 32}
        return make_toy(folder, family, heads=HEADS.get(family, 4), kv_heads=4, **size)

    def whole(self, family: str, precision: Precision) -> list[Row]:
        model = self.model(family, precision)
        if model not in self._whole:
            half = precision is Precision.HALF
            plan = Plan(str(model), str(self.folder / f"{model.name}-whole"), None, half)
            rows, output = run([plan], self.folder)
            for one in compare(rows, None, bits=False):
                self.say(f"{family} with one process, {precision}: {one} {output}")
            self._whole[model] = rows
        return self._whole[model]

    def try_group(self, group: Group) -> None:
        began = time.monotonic()
        model = self.model(group.family, group.precision)
        folder = self.folder / f"{model.name}-{group.mode}-{group.size}"
        half = group.precision is Precision.HALF
        plan = Plan(str(model), str(folder), group.mode, half)
        rows, output = run([plan] * group.size, self.folder)
        same = not half or group.mode == "pipeline"
        others = self.whole(group.family, group.precision) if same else None
        wrong = self.wrong[group] = compare(rows, others, bits=group.mode == "pipeline")
        tokens = sum(row.tokens for row in rows)
        unlike = sum(row.unlike for row in rows)
        if not same:
            self.likeliest.append((tokens - unlike, tokens))
        self.say(
            f"{group}: {len(rows)} of {len(CELLS)} cells, {tokens} tokens, {unlike} not the cold "
            f"model's; {len(wrong)} wrong; {time.monotonic() - began:.0f} s"
        )
        for one in wrong:
            self.say(f"  {one}")
        if len(rows) < len(CELLS):
            lines = [line for line in output.splitlines() if not line.startswith("[ring]")]
            self.say("\n".join(lines[-200:]))

    def table(self) -> list[str]:
        columns = [(mode, size) for mode in MODES for size in (2, 4)]
        lines = [
            "| family | parts of layers, 2 | 4 | pipeline, 2 | 4 |",
            "|---|---|---|---|---|",
        ]
        for family in dict.fromkeys(group.family for group in self.wrong):
            cells = [self._cell(family, mode, size) for mode, size in columns]
            lines.append(f"| {family} | {' | '.join(cells)} |")
        lines += [f"refused: {text}" for text in self.refused.values()]
        good, tokens = (sum(each) for each in zip((0, 0), *self.likeliest, strict=True))
        lines.append(f"parts of layers in bfloat16: {good} of {tokens} tokens as in cold replies")
        return [*lines, f"violations: {sum(map(len, self.wrong.values()))}"]

    def _cell(self, family: str, mode: Mode, size: int) -> str:
        tried = [
            f"{one.precision}: {'wrong' if wrong else 'right'}"
            for one, wrong in self.wrong.items()
            if (one.family, one.mode, one.size) == (family, mode, size)
        ]
        return ", ".join(tried) or "-"


def run(plans: Sequence[Plan], folder: Path) -> tuple[list[Row], str]:
    """Run a process for each of `plans`; return the rows that rank 0 printed, and other output.

    Kills what still runs after `WAIT_S`.
    """
    port, hostfile = free_port(len(plans)), folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port + i}"] for i in range(len(plans))]))
    environ = os.environ | {"MLX_HOSTFILE": str(hostfile)}
    command = [sys.executable, "-m", "tests.ranks.matrix_rank"]
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as out:
        processes = [
            subprocess.Popen(
                [*command, msgspec.json.encode(plan).decode()],
                env=environ | {RANK: str(rank)},
                stdout=log if rank else out,
                stderr=log,
            )
            for rank, plan in enumerate(plans)
        ]
        deadline = time.monotonic() + WAIT_S
        for one in processes:
            try:
                one.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        log.seek(0)
        out.seek(0)
        rows = [msgspec.json.decode(line, type=Row) for line in out if line.endswith(b"\n")]
        return rows, log.read().decode(errors="replace")


def compare(rows: Sequence[Row], others: Sequence[Row] | None, *, bits: bool) -> list[str]:
    """Return what is wrong with the rows of a group, as sentences.

    `others`: the rows of one process, which must be the same, or None. `bits`: in each probability.
    """
    wrong = [f"{row.cell}: {row.error}" for row in rows if row.error is not None]
    missing = [name for name in CELLS if name not in {row.cell for row in rows}]
    wrong += [f"{name}: not run" for name in missing]
    for row, other in zip(rows, others or (), strict=False):
        for i, (mine, theirs) in enumerate(zip(row.asked, other.asked, strict=False)):
            chances = theirs.chances if bits else mine.chances
            if mine != msgspec.structs.replace(theirs, chances=chances):
                wrong.append(f"{row.cell}: request {i} is {mine}, and {theirs} with one process")
    return wrong


Names = Annotated[list[str] | None, typer.Option("--family", help="Only this one; repeatable.")]
Only = Annotated[str | None, typer.Option("--mode", help="Only tensor, or only pipeline.")]
Sizes = Annotated[list[int] | None, typer.Option("--ranks", help="2 or 4; repeatable.")]
Kinds = Annotated[Precision | None, typer.Option("--precision", help="Only this one.")]


def ranks_matrix(
    family: Names = None, mode: Only = None, ranks: Sizes = None, precision: Kinds = None
) -> None:
    """Run all cells on every group; print a table; exit with 1 on a violation."""
    modes = [one for one in MODES if mode in (None, one)]
    with tempfile.TemporaryDirectory(prefix="mlxcache-ranks-") as folder:
        matrix = Matrix(Path(folder), typer.echo)
        chosen = matrix.groups(family or list(FAMILIES), modes, ranks or (2, 4))
        for kind in Precision:
            for name, how, size in chosen if precision in (None, kind) else ():
                if kind is Precision.FULL or name not in FULL_ONLY:
                    matrix.try_group(Group(name, how, size, kind))
        lines = matrix.table()
    for line in lines:
        typer.echo(line)
    raise typer.Exit(1 if any(matrix.wrong.values()) else 0)


if __name__ == "__main__":
    typer.run(ranks_matrix)
